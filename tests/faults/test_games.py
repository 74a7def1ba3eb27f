"""Faults of games of several agents: of a worker, of the game, and changes that reach it."""

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.config.policies import assign_agents
from headrace.envs.api import Guards
from headrace.envs.changes import EnvChange
from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import EnvError
from headrace.seeding import derive
from tests.envs.games import test_parallel, test_turns
from tests.envs.games.support import Camp, GameError, played_plainly
from tests.envs.games.test_parallel import Lingering
from tests.envs.games.turns_support import Moves, Table, choose, columns_of
from tests.envs.games.turns_support import played_plainly as moves_played_plainly
from tests.envs.kernels.support import run
from tests.faults.test_env import assert_balanced
from tests.ladder.test_collect import equal
from tests.ladder.test_games import assert_same_run
from tests.marks import repeats
from tests.support import inline, plan_for, policies_for, workers

pytestmark = pytest.mark.fault_a

RESTART = Guards(on_env_error="restart", max_restarts=200)


def dying(base):
    """A game whose process dies once: in a worker, in the middle of an episode."""

    class Dying(base):
        def __init__(self, once=""):
            super().__init__()
            self.once, self.steps = once and Path(once), 0

        def step(self, action):
            self.steps += action is not None
            if self.steps == 29 and self.once:
                with contextlib.suppress(FileExistsError):  # the first of all
                    self.once.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    return Dying


DyingTable, DyingCamp = dying(Table), dying(Camp)


@repeats(
    ("game", "base", "lag"), [(DyingTable, Table, 0), (DyingCamp, Camp, 0), (DyingTable, Table, 1)]
)
def test_a_worker_that_is_killed_in_a_game_makes_the_same_batches_again(tmp_path, game, base, lag):
    sizes = {"num_steps": 12, "num_envs": 6, "policies": {}, "lag": lag}
    said = []
    one = inline(plan_for(base, **sizes))
    plan = plan_for(game, kwargs={"once": str(tmp_path / "once")}, **sizes)
    many = workers(plan, 2, say=said.append)
    try:
        for version in range(6):
            policies = policies_for(plan, seed=version)
            for collector in (one, many):
                collector.publish(policies, version)
            a, b = one.collect(), many.collect()
            for x, y in zip(a.fragments, b.fragments, strict=True):
                equal(x, y)
            assert sorted(a.episodes) == sorted(b.episodes)
            for collector in (one, many):
                collector.release_batch(more=version < 5)
    finally:
        one.close()
        many.close()
    assert len(said) == 1, said
    # Steps 25 to 36 of each env are the third fragment
    assert "died (SIGKILL), in step 5 of the fragment of env " in said[0]
    ledger = many.ledger
    assert (ledger.restarts, ledger.lost) == (1, 0)
    assert ledger.remade > 0
    assert ledger.collected - ledger.remade == one.ledger.collected == 6 * 12 * 6


def failing(base, wrong):
    """A game that fails in the fourth step of episodes whose seed is a multiple of three."""

    class Failing(base):
        def reset(self, seed=None, options=None):
            self.is_bad, self.count = seed is not None and seed % 3 == 0, 0
            return super().reset(seed, options)

        def step(self, actions):
            if actions is not None:
                self.count += 1
            if self.is_bad and self.count == 4 and actions is not None:
                if wrong == "raises":
                    raise GameError
                found = super().step(actions)
                return found if found is None else self._spoil(*found)
            return super().step(actions)

        def _spoil(self, obs, reward, *rest):
            first = next(iter(reward))
            if wrong == "nan":
                return obs, reward | {first: np.nan}, *rest
            return dict.fromkeys(obs, "nothing"), reward, *rest

        def last(self, observe=True):
            found = list(super().last(observe))
            if self.is_bad and self.count == 4:
                found[1 if wrong == "nan" else 0] = np.nan
            return tuple(found)

    if base is Camp:
        del Failing.last
    return Failing


KINDS = ("raises", "nan", "not its space")
TABLES = {wrong: failing(Table, wrong) for wrong in KINDS}
CAMPS = {wrong: failing(Camp, wrong) for wrong in KINDS}


@pytest.mark.parametrize("length", [90, 7])
@pytest.mark.parametrize("wrong", KINDS)
def test_a_game_in_turns_that_fails_is_dropped_and_made_anew(wrong, length):
    vector = test_turns.vector_of(TABLES[wrong], (4, 5, 6), guards=RESTART)
    num_steps = 90 // length * length
    dropped, lost = [], 0
    fragments, rng = test_turns.fragments_of(vector, length), np.random.default_rng(5)
    moves = [Moves(fragment.num_envs) for fragment in fragments]
    actions, episodes = [[] for _ in fragments], []

    def act(t):
        choose(vector, fragments, vector.parts, t, rng)
        for taken, fragment in zip(actions, fragments, strict=True):
            taken.append(fragment.action[t].numpy().copy())

    for first in range(0, num_steps, length):
        ended = test_turns.played(vector, fragments, act)
        episodes += [of._replace(ended_at=of.ended_at + first) for of in ended]
        dropped += vector.dropped
        lost += vector.lost_steps
        assert vector.count_env_steps(length) == 3 * length - vector.lost_steps
        for of_policy, fragment in zip(moves, fragments, strict=True):
            of_policy.read(*columns_of(fragment))
    expected, ended = moves_played_plainly(
        TABLES["raises"], vector.spec, vector.parts, list(map(np.stack, actions)), 3, num_steps,
        (4, 5, 6),
    )  # fmt: skip
    for of_policy, wanted in zip(moves, expected, strict=True):
        of_policy.assert_equal(wanted)
    assert [(of.ended_at, of.env_id, of.num_steps) for of in episodes] == [e[:3] for e in ended]
    assert len(dropped) == lost > 4
    assert all("episode" in line and "of Failing, inline" in line for line in dropped)
    assert len(ended) > 4


@pytest.mark.parametrize("wrong", KINDS)
def test_a_parallel_game_that_fails_is_dropped_and_made_anew(wrong):
    make, env_id, num_steps = CAMPS[wrong], np.array([4, 5, 6]), 60
    spec = env_spec(EnvMaker(make))
    parts = list(assign_agents({}, spec).values())
    vector, fragments = test_parallel.vector_of(
        make, env_id=env_id, num_steps=num_steps, guards=RESTART
    )
    vector._remake = make
    test_parallel.act(fragments, vector, parts, np.random.default_rng(5))
    episodes = run(vector, fragments)
    actions = [fragment.action.numpy() for fragment in fragments]
    expected, ended = played_plainly(CAMPS["raises"], spec, parts, actions, 3, num_steps, env_id)
    for fragment, rows in zip(fragments, expected, strict=True):
        for name in ("valid", "truncated", "terminated", "reward"):
            np.testing.assert_array_equal(getattr(fragment, name).numpy(), rows[name], name)
        found = {(int(t), int(i)): o.numpy() for o, t, i in zip(*fragment.finals(), strict=True)}
        assert found.keys() == rows["finals"].keys()
        for key, final in rows["finals"].items():
            np.testing.assert_array_equal(found[key], np.asarray(final, found[key].dtype))
    assert [(of.ended_at, of.env_id, of.num_steps) for of in episodes] == [e[:3] for e in ended]
    assert len(vector.dropped) == vector.lost_steps > 4
    assert len(ended) > 4


class BadReset(Table):
    """Fails in the reset of every third episode, after it has paid, or in the third step."""

    def __init__(self):
        super().__init__(length=5)  # where the episodes of all agents end

    def reset(self, seed=None, options=None):
        super().reset(seed, options)
        self.leaves_after = dict.fromkeys(self.leaves_after, 99)
        self.fails_in_step = seed % 3 == 1
        if seed % 3 == 0 or seed == derive(3, "env", 0, 0):
            self._cumulative_rewards[self.agent_selection] = 1e6
            self.observe = lambda agent: None

    def step(self, action):
        if self.fails_in_step and self.moves == 2:
            raise GameError
        super().step(action)


def test_a_game_that_fails_in_a_reset_begins_with_the_next_episode():
    vector = test_turns.vector_of(BadReset, guards=RESTART)
    fragments, rng, dropped = test_turns.fragments_of(vector, 20), np.random.default_rng(5), []
    for _ in range(4):
        act = lambda t: choose(vector, fragments, vector.parts, t, rng)  # noqa: E731
        for of in test_turns.played(vector, fragments, act):
            assert of.total_reward < 100
            assert of.num_steps == 5
        dropped += vector.dropped
        assert vector.lost_steps == sum("GameError" in line for line in vector.dropped)
        assert max(float(fragment.reward.max()) for fragment in fragments) < 100
    in_reset = [line for line in dropped if "without the key" in line]
    assert len(in_reset) > 4
    assert len(dropped) > len(in_reset), "steps failed as well"
    for line in in_reset:
        assert "episode" in line and "0 steps so far" in line and "with action" not in line


RUN = {
    "num_envs": 4, "envs_per_vector": 2, "num_steps": 24, "seed": 5, "quiet": True,
    "total_env_steps": 4 * 24 * 6, "max_worker_restarts": 1000, "check_ranks": 1,
    "algo": headrace.PPO(num_minibatches=2, num_epochs=1),
}  # fmt: skip


def bad_table():
    return TABLES["nan"]()


def bad_camp():
    return CAMPS["raises"]()


@repeats("game", [bad_table, bad_camp])
def test_a_run_goes_on_when_games_fail_and_counts_them(tmp_path, game):
    runs = [
        headrace.train(
            game, run_dir=tmp_path / str(w), num_workers=w, on_env_error="restart", **RUN
        )
        for w in (0, 2)
    ]
    for run_ in runs:
        assert_balanced(run_.summary)
        ledger = run_.summary["ledger"]
        assert ledger["dropped_episodes"] == run_.summary["lost_env_steps"] > 4
        assert ledger["remade"] == 0
        assert run_.summary["env_steps"] >= 4 * 24 * 6
    assert_same_run(*runs)
    with pytest.raises(EnvError, match="GameError" if game is bad_camp else "not finite") as raised:
        headrace.train(game, run_dir=tmp_path / "fails", num_workers=2, **RUN)
    assert any("--on-env-error restart" in note for note in raised.value.__notes__)


def test_a_game_that_fails_too_often_ends_the_run(tmp_path):
    settings = RUN | {"max_worker_restarts": 1}
    with pytest.raises(EnvError, match=r"more than 1 times in 10 minutes .--max-worker-restarts"):
        headrace.train(
            bad_table, run_dir=tmp_path / "run", num_workers=0, on_env_error="restart", **settings
        )


class Long(Table):
    """What `on_update` changes: when all are cut off, and how much is paid."""

    bonus = 0.0

    def reset(self, seed=None, options=None):
        super().reset(seed, options)
        self.leaves_after = dict.fromkeys(self.leaves_after, 99)

    def set_bonus(self, bonus):
        self.bonus = bonus

    def _pay(self, mover, size):
        super()._pay(mover, size + self.bonus)


class LongCamp(Lingering):
    bonus = 0.0

    def set_bonus(self, bonus):
        self.bonus = bonus

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, {agent: paid + self.bonus for agent, paid in reward.items()}, *rest


def curriculum(number, metrics):
    """In the middle of games."""
    if number == 2:
        return headrace.call_envs("set_bonus", 8.0) + headrace.set_envs(length=19)
    return headrace.set_envs(bonus=64.0) if number == 4 else None


@repeats("game", [Long, LongCamp])
def test_changes_reach_games_and_are_made_again_in_a_resumed_run(tmp_path, game):
    settings = RUN | {"max_worker_restarts": 3}
    del settings["total_env_steps"]
    seen = []

    def on_update(number, metrics):
        seen.append(metrics["mean_return"])
        return curriculum(number, metrics)

    whole = headrace.train(
        game, run_dir=tmp_path / "whole", total_env_steps=6 * 96, num_workers=0,
        schedule_env_steps=6 * 96, on_update=on_update, **settings,
    )  # fmt: skip
    assert seen[-1] > seen[1] + 20, seen
    headrace.train(
        game, run_dir=tmp_path / "part", total_env_steps=3 * 96, num_workers=2,
        schedule_env_steps=6 * 96, on_update=curriculum, **settings,
    )  # fmt: skip
    again = headrace.resume(
        tmp_path / "part", env=game, total_env_steps=6 * 96, quiet=True, on_update=curriculum
    )
    assert_same_run(whole, again)


def test_a_change_brings_nobody_back_who_lingers():
    """Those who have left stay in `agents`: they are not taken for others who join."""
    found = []
    for changes in ((), (EnvChange("length", None, 7, 1),)):
        vector, fragments = test_parallel.vector_of(Lingering, num_steps=5)
        rng, rows = np.random.default_rng(5), []
        for k in range(8):
            vector.change(changes[:1] if k else ())
            test_parallel.act(fragments, vector, vector.parts, rng)
            run(vector, fragments)
            for fragment in fragments:
                rows += [fragment.valid.clone(), fragment.reward.clone(), fragment.obs.clone()]
        found.append(rows)
        assert not all(of.all() for of in rows[::3])
    for one, other in zip(*found, strict=True):
        assert one.equal(other)
