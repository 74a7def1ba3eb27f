"""Other people's games in PettingZoo's parallel form: held against plain loops, and trained on."""

import json
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from mpe2 import simple_speaker_listener_v4, simple_spread_v3, simple_tag_v3

import headrace
from headrace import batch
from headrace.cli import commands
from headrace.config.policies import assign_agents
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.games.vector import GameVector
from headrace.envs.kernels.pettingzoo_adapter import KernelParallelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.spaces.specs import parallel_roles
from headrace.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    HeadraceError,
    UnsupportedSpaceError,
    UsageError,
)
from headrace.seeding import derive
from headrace.spec import Agents, EnvSpec
from tests import python
from tests.envs.games.support import Camp, played_plainly
from tests.envs.kernels.support import Ring, act_at_random, contents, run

SPREAD, TAG = simple_spread_v3.parallel_env, simple_tag_v3.parallel_env


class Lingering(Camp):
    lingers = True


def vector_of(make, n=3, num_steps=16, env_id=None, parts=None, seed=3, **kwargs):
    spec = env_spec(EnvMaker(make))
    parts = list(assign_agents({}, spec).values()) if parts is None else parts
    env_id = np.arange(n) if env_id is None else env_id
    context = VectorContext(spec, env_id, seed, parts=tuple(parts), **kwargs)
    vector = GameVector([make() for _ in env_id], context)
    fragments = [
        batch.allocate(batch.columns(spec.for_agents(part), {}, num_steps, n * part.size))
        for part in parts
    ]
    return vector, fragments


def act(fragments, vector, parts, rng):
    for fragment, part in zip(fragments, parts, strict=True):
        act_at_random([fragment], vector.spec.for_agents(part), rng)


GAMES = {
    "spread": partial(SPREAD, max_cycles=11),
    "tag": partial(TAG, max_cycles=9),
    "tag, continuous": partial(TAG, max_cycles=9, continuous_actions=True),
    "speaker and listener": partial(simple_speaker_listener_v4.parallel_env, max_cycles=7),
    "camp": Camp,
    "lingering": Lingering,
}


@pytest.mark.parametrize("game", GAMES)
def test_rows_equal_those_of_a_plain_loop(game):
    make, num_steps, env_id = GAMES[game], 40, np.array([4, 5, 6])
    spec = env_spec(EnvMaker(make))
    parts = list(assign_agents({}, spec).values())
    vector, fragments = vector_of(make, env_id=env_id, num_steps=num_steps)
    act(fragments, vector, parts, np.random.default_rng(5))
    episodes = run(vector, fragments)
    actions = [fragment.action.numpy() for fragment in fragments]
    expected, ended = played_plainly(make, spec, parts, actions, 3, num_steps, env_id)
    seen = {"absent": 0, "finals": 0, "terminated": 0}
    for fragment, rows, part in zip(fragments, expected, parts, strict=True):
        for name in ("reward", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(fragment, name).numpy(), rows[name], name)
        obs, space = fragment.obs.numpy(), spec.for_agents(part).observation
        absent = np.zeros(space.shape, space.dtype) + (space.start[0] if space.start else 0)
        for t in range(num_steps + 1):
            for i in range(obs.shape[1]):
                wanted = rows["obs"].get((t, i), absent)
                np.testing.assert_array_equal(obs[t, i], np.asarray(wanted, obs.dtype))
                seen["absent"] += (t, i) not in rows["obs"]
        found = {(int(t), int(i)): o.numpy() for o, t, i in zip(*fragment.finals(), strict=True)}
        assert found.keys() == rows["finals"].keys()
        for key, final in rows["finals"].items():
            np.testing.assert_array_equal(found[key], np.asarray(final, obs.dtype))
        seen["finals"] += len(found)
        seen["terminated"] += int(fragment.terminated.sum())
        assert fragment.env_id.tolist() == [
            int(e) * part.size + i for e in env_id for i in range(part.size)
        ]
    assert [(of.ended_at, of.env_id, of.num_steps) for of in episodes] == [e[:3] for e in ended]
    for episode, (*_, means) in zip(episodes, ended, strict=True):
        sizes = [part.size for part in parts]
        assert episode.total_reward == pytest.approx(np.average(means, weights=sizes))
        assert episode.by_policy == pytest.approx(tuple(means) if len(parts) > 1 else ())
    assert len(ended) > 8
    assert seen["finals"] > 8
    if isinstance(make, type):
        assert all(seen.values()), seen


def test_rewards_may_be_arrays_of_one_number():
    class Paid(Camp):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return obs, {agent: np.array([paid]) for agent, paid in reward.items()}, *rest

    found = []
    for make in (Camp, Paid):
        vector, fragments = vector_of(make)
        act(fragments, vector, vector.parts, np.random.default_rng(5))
        run(vector, fragments)
        found.append([fragment.reward for fragment in fragments])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)


def test_short_fragments_equal_one_long_fragment():
    make = GAMES["camp"]
    long, fragments = vector_of(make, num_steps=24)
    act(fragments, long, long.parts, np.random.default_rng(5))
    episodes = run(long, fragments)
    short, pieces = vector_of(make, num_steps=8)
    told = []
    for k in range(3):
        for piece, fragment in zip(pieces, fragments, strict=True):
            piece.action.copy_(fragment.action[8 * k : 8 * k + 8])
        told += [of._replace(ended_at=of.ended_at + 8 * k) for of in run(short, pieces)]
        for piece, fragment in zip(pieces, fragments, strict=True):
            rows = slice(8 * k, 8 * k + 8)
            for name in ("reward", "terminated", "truncated", "valid"):
                assert torch.equal(getattr(piece, name), getattr(fragment, name)[rows]), name
            assert torch.equal(piece.obs, fragment.obs[8 * k : 8 * k + 9])
    assert told == episodes


def test_a_kernel_game_in_pettingzoo_form_gives_the_same_rows():
    num_steps, n, parts = 60, 3, [Agents(0, 2), Agents(2, 1)]
    make = partial(KernelParallelEnv, Ring, compiled=True)
    # Each env is seeded once, and goes on by itself
    vector, fragments = vector_of(make, n=n, num_steps=num_steps, reseed=False)
    act(fragments, vector, parts, np.random.default_rng(7))
    run(vector, fragments)
    for e in range(n):
        context = VectorContext(
            vector.spec, np.arange(1), derive(3, "env", e, 0), parts=tuple(parts)
        )
        own = KernelVector(Ring(), context)
        theirs = [
            batch.allocate(batch.columns(vector.spec, {}, num_steps, part.size)) for part in parts
        ]
        for one, other, part in zip(theirs, fragments, parts, strict=True):
            one.action.copy_(other.action[:, e * part.size : (e + 1) * part.size])
        run(own, theirs)
        for one, other, part in zip(theirs, fragments, parts, strict=True):
            mine = slice(e * part.size, (e + 1) * part.size)
            assert torch.equal(one.valid, other.valid[:, mine])
            valid = one.valid
            assert not valid.all()
            for name in ("reward", "terminated", "truncated"):
                assert torch.equal(
                    getattr(one, name)[valid], getattr(other, name)[:, mine][valid]
                ), name
            assert torch.equal(one.obs[:-1][valid], other.obs[:-1, mine][valid])
            found = contents(other)
            of_env = (found["final_row"] >= mine.start) & (found["final_row"] < mine.stop)
            assert torch.equal(found["final_obs"][of_env], contents(one)["final_obs"])
        own.close()


def test_games_are_seeded_by_env_and_episode():
    for reseed in (True, False):
        vector, fragments = vector_of(Camp, n=2, env_id=np.array([3, 8]), reseed=reseed)
        act(fragments, vector, vector.parts, np.random.default_rng(5))
        run(vector, fragments)
        for env, game in zip((3, 8), vector._envs, strict=True):
            wanted = [derive(3, "env", env, k) for k in range(len(game.resets))]
            if not reseed:
                wanted[1:] = [None] * (len(wanted) - 1)
            assert len(game.resets) > 2
            assert game.resets == wanted
    state = vector.state()
    after = [int(of) + 1 for of in state["episode"]]
    for begin, numbers in (
        (lambda again: again.restore(state), after),
        (lambda again: again.start_after(9), [10, 10]),
    ):
        again, fragments = vector_of(Camp, n=2, env_id=np.array([3, 8]), reseed=False)
        assert begin(again).new_episode == 2
        again.bind(*fragments)
        assert [game.resets for game in again._envs] == [
            [derive(3, "env", env, k)] for env, k in zip((3, 8), numbers, strict=True)
        ]


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (["a_0", "a_1", "b_0"], (("a", 2), ("b", 1))),
        (["a_0", "b_0", "a_1", "a_2"], (("a", 1), ("b", 1), ("a-2", 2))),
        (["a-2_0", "a_0", "b", "a_1"], (("a-2", 1), ("a", 1), ("b", 1), ("a-3", 1))),
        (["red_team_1", "red_team_2"], (("red_team", 2),)),
        ([0, 1, 2], (("agent", 3),)),
        (["../x_0", "_7"], (("agent----x", 1), ("agent", 1))),
    ],
)
def test_roles_are_names_up_to_a_number(names, roles):
    assert parallel_roles(names) == roles


class Echo:
    """Each agent is to say what it sees: one kind knows two words, the other one four."""

    possible_agents = ["child_0", "child_1", "parent_0"]  # noqa: RUF012
    words = {"child_0": 2, "child_1": 2, "parent_0": 4}  # noqa: RUF012

    def observation_space(self, agent):
        return gym.spaces.Box(0, 1, (self.words[agent],), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(self.words[agent])

    def reset(self, seed=None, options=None):
        self.random, self.t = np.random.default_rng(seed), 0
        self.agents = list(self.possible_agents)
        return self._obs(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        reward = {a: float(self.said[a] == action) for a, action in actions.items()}
        ends, infos = ({a: of for a in self.agents} for of in (False, {}))
        cut, obs = dict.fromkeys(self.agents, self.t == 10), self._obs()
        if self.t == 10:
            self.agents = []
        return obs, reward, ends, cut, infos

    def close(self):
        pass

    def _obs(self):
        self.said = {agent: int(self.random.integers(n)) for agent, n in self.words.items()}
        return {a: np.eye(n, dtype=np.float32)[self.said[a]] for a, n in self.words.items()}


def test_policies_with_different_spaces_train_in_one_game(tmp_path):
    run = headrace.train(
        Echo, run_dir=tmp_path / "r", quiet=True, num_envs=8, num_steps=32, seed=1, lr=1e-2,
        total_env_steps=10_000,
    )  # fmt: skip
    assert run.summary["mean_return_by_policy"].keys() == {"child", "parent"}
    assert run.summary["agent_steps"] == 3 * run.summary["env_steps"]
    played = run.evaluate(episodes=6)
    # At random: 5 and 2.5 of 10
    assert min(played.by_policy["child"]) > 9
    assert min(played.by_policy["parent"]) > 9
    assert set(played.lengths) == {10}


class Kids(Echo):
    """The same, by another name."""

    possible_agents = ["kid_0", "kid_1", "parent_0"]  # noqa: RUF012
    words = {"kid_0": 2, "kid_1": 2, "parent_0": 4}  # noqa: RUF012


class Crowd(Echo):
    """One more of them."""

    possible_agents = ["child_0", "child_1", "child_2", "parent_0"]  # noqa: RUF012
    words = {"child_0": 2, "child_1": 2, "child_2": 2, "parent_0": 4}  # noqa: RUF012


def test_resume_and_evaluate_refuse_another_game(tmp_path):
    run = train(tmp_path, "r", Echo)
    with pytest.raises(CheckpointError, match=r"policies act for 3 agents, and Crowd has 4"):
        headrace.resume(run.dir, env=Crowd, total_env_steps=300, quiet=True)
    with pytest.raises(CheckpointError, match=r"child=0:2, parent=2:3; those of Kids would be kid"):
        headrace.resume(run.dir, env=Kids, total_env_steps=300, quiet=True)
    with pytest.raises(CheckpointError, match=r"policies act for 3 agents, and .*Crowd has 4"):
        env = "tests.envs.games.test_parallel:Crowd"
        commands.FLAGS["eval"](run_dir=run.dir, env=env).execute([])


SETTINGS = {"quiet": True, "num_envs": 2, "num_steps": 25, "seed": 5, "num_minibatches": 5}


def train(tmp_path, name, env=TAG, updates=2, **more):
    steps = SETTINGS["num_envs"] * SETTINGS["num_steps"]
    return headrace.train(
        env, run_dir=tmp_path / name, total_env_steps=updates * steps, **SETTINGS | more
    )


def test_each_policy_is_saved_loaded_frozen_and_played_with_its_own_spaces(tmp_path, capsys):
    first = train(tmp_path, "first", eval_every=50, eval_episodes=2)
    saved = json.loads(next(first.dir.glob("checkpoints/step_*/manifest.json")).read_text())
    sizes = {
        name: EnvSpec.from_json(of["spec"]).observation.shape
        for name, of in saved["policies"].items()
    }
    assert sizes == {"adversary": (16,), "agent": (14,)}
    assert headrace.load_policy(first.dir, policy="agent")(np.zeros(14, np.float32)) in range(5)
    assert first.evaluate(episodes=2).by_policy.keys() == {"adversary", "agent"}
    frozen = {"agent": str(first.dir)}
    second = train(tmp_path, "second", frozen=frozen, init_from=str(first.dir))
    before, after = (run.policies["agent"].module.state_dict() for run in (first, second))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    random = train(tmp_path, "third", frozen={"agent": "random"})
    assert random.policies["agent"].module(torch.randn(3, 14))[0].unique().numel() == 1
    resumed = headrace.resume(second.dir, env=TAG, total_env_steps=200)
    assert "0 restored, 2 replayed, 0 begun anew" in capsys.readouterr().out
    assert resumed.summary["env_steps"] == 200
    for env in (SPREAD, Camp):
        with pytest.raises(CheckpointError, match="is of another environment"):
            headrace.resume(second.dir, env=env, total_env_steps=300, quiet=True)


def test_a_policy_plays_only_agents_with_equal_spaces(tmp_path):
    spec = env_spec(EnvMaker(TAG))
    assert spec.roles == (("adversary", 3), ("agent", 1))
    assert spec.for_agents(Agents(3, 1)).observation.shape == (14,)
    assert EnvSpec.from_json(spec.to_json()) == spec
    run = train(tmp_path, "r", policies={"a": "0:1", "b": "1:3", "c": "3:"})
    assert set(run.policies) == {"a", "b", "c"}
    for policies in ({"all": ":"}, {"a": "0:2", "b": "2:"}):
        with pytest.raises(ConfigError, match=r"agents \d and 3 of policy '\w+' have different"):
            train(tmp_path, "none", policies=policies)
    spread = env_spec(EnvMaker(SPREAD))
    assert spread.agent_spaces == ()
    assert spread.for_agents(Agents(1, 1)) is spread


@pytest.mark.more
def test_two_learners_have_half_of_the_games_each(tmp_path):
    run = train(tmp_path, "r", num_learners=2, check_ranks=1)
    assert run.summary["env_steps"] == 100


def test_command_line_trains_evaluates_and_resumes_a_game(tmp_path):
    game, here = "mpe2.simple_spread_v3:parallel_env", str(tmp_path / "r")
    for words in (
        ["train", game, "--env-kwargs", "N=2", "max_cycles=5", "--num-envs", "2", "--num-steps",
         "8", "--total-env-steps", "32", "--run-dir", here],
        ["eval", here, "--env", game, "--episodes", "3"],
        ["resume", here, "--env", game, "--total-env-steps", "64"],
    ):  # fmt: skip
        done = python.run(python.command(*words, "--json"))
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 64


def test_games_train_without_pettingzoo_installed(tmp_path):
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "import headrace; from tests.envs.games.support import Camp\n"
        "run = headrace.train(Camp, run_dir=sys.argv[1], quiet=True, num_envs=2, num_steps=16,"
        " total_env_steps=32)\n"
        "print(run.summary['env_steps'])\n"
    )
    out = python.run([sys.executable, "-c", code, str(tmp_path / "r")])
    assert out.stdout == "32\n", out.stderr


def wrong(**how):
    """`Camp` that says something else in its third step."""

    class Wrong(Camp):
        def step(self, actions):
            names = ("obs", "reward", "terminated", "truncated", "infos")
            given = dict(zip(names, super().step(actions), strict=True))
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:
                for name, change in how.items():
                    given[name] = change(given[name], self)
            return tuple(given.values())

    return Wrong


def without(agent):
    return lambda of, game: {name: value for name, value in of.items() if name != agent}


def but(agent, value):
    return lambda of, game: of | {agent: value}


def gone(agent):
    def change(of, game):
        game.agents = [name for name in game.agents if name != agent]
        return of

    return change


def joined(agent):
    def change(of, game):
        game.agents = [*game.agents, agent]
        return of

    return change


PLACE = r"env [01] of Wrong, inline, episode \d+ \(reset seed \d+, \d+ steps so far\)"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"obs": lambda o, g: 1 / 0}, r"ZeroDivisionError: .*\n\nThe environment failed in step \d "
         r"with action \{'guest_0': \[.*'cook_0': \[\d, \d\]\}, " + PLACE),
        ({"obs": without("cook_0")}, "no observation of agent cook_0.*" + PLACE),
        ({"reward": without("cook_0")}, "no reward of agent cook_0.*" + PLACE),
        ({"terminated": without("cook_0")}, "no terminated of agent cook_0"),
        ({"truncated": lambda *_: None}, "no truncated of agent"),
        ({"obs": but("guest_0", np.zeros(2))}, r"agent guest_0 an observation of shape \(2,\)"),
        ({"obs": but("guest_0", np.array([0, np.nan, 1]))},
         r"gave agent guest_0 a value that is not finite.*nan.*" + PLACE),
        ({"reward": but("guest_0", np.inf)}, "gave agent guest_0 a value.*reward inf"),
        ({"reward": but("guest_0", np.ones(2))}, r"expected one number.*" + PLACE),
        ({"reward": but("guest_0", "much")}, r"ValueError(.|\n)*failed in step"),
        ({"obs": but("cook_0", 1)}, r"cook_0 a value .* not in its space: observation 1"),
        ({"obs": but("cook_0", 22)}, r"cook_0 a value .* not in its space: observation 22"),
        ({"obs": gone("guest_0")}, "guest_0 is no longer in `agents`, and step said neither"),
        ({"obs": joined("nobody")}, "The agent 'nobody' is in `agents`, and not in"),
        ({"obs": joined("guest_9")}, "not in `possible_agents`"),
    ],
)  # fmt: skip
def test_bad_values_of_a_game_are_refused_with_agent_and_position(how, message):
    class Long(wrong(**how)):
        def reset(self, seed=None, options=None):
            found = super().reset(seed, options)
            self.goes = dict.fromkeys(self.goes, 99)
            self.comes = dict.fromkeys(self.comes, 0)
            self.agents = list(self.possible_agents)
            return self._all(self._obs), found[1]

    Long.__name__ = "Wrong"
    vector, fragments = vector_of(Long, n=2)
    act(fragments, vector, vector.parts, np.random.default_rng(5))
    with pytest.raises(EnvError, match=message):
        run(vector, fragments)


def test_errors_of_reset_and_close_are_reported():
    class Failing(Camp):
        def reset(self, seed=None, options=None):
            if len(self.resets) == 2:
                raise RuntimeError("it rains")
            return super().reset(seed, options)

        def close(self):
            raise RuntimeError("no way home")

    vector, fragments = vector_of(Camp, n=1)
    vector._envs[0] = Failing(3)
    vector._replaced(0)
    act(fragments, vector, vector.parts, np.random.default_rng(5))
    rain = r"it rains\n\nThe environment failed in reset, env 0 of Camp, inline, episode 2 "
    with pytest.raises(EnvError, match=rain + r"\(reset seed \d+, 0 steps"):
        run(vector, fragments)
    with pytest.raises(EnvError, match="no way home\n\nThe environment failed while closing"):
        vector.close()


def test_a_run_ends_with_the_error_of_its_game(tmp_path):
    with pytest.raises(EnvError, match="ZeroDivisionError") as raised:
        train(tmp_path, "r", wrong(obs=lambda *_: 1 / 0))
    assert any("--on-env-error restart" in note for note in raised.value.__notes__)


class Nobody(Camp):
    def reset(self, seed=None, options=None):
        super().reset(seed, options)
        self.agents = []
        return {}, {}


class Nameless(Camp):
    possible_agents = property()  # raises AttributeError


class Empty(Camp):
    possible_agents = []  # noqa: RUF012


class Others(Camp):
    made = 0

    def __init__(self):
        super().__init__()
        Others.made += 1
        if Others.made % 2:
            self.possible_agents = self.possible_agents[::-1]


class Maps(Camp):
    def observation_space(self, agent):
        return gym.spaces.Dict(map=super().observation_space(agent))


class Masked(Camp):
    def reset(self, seed=None, options=None):
        obs, _ = super().reset(seed, options)
        return obs, {agent: {"action_mask": np.ones(5)} for agent in self.possible_agents}


class Texts(Camp):
    def observation_space(self, agent):
        return gym.spaces.Text(3)


@pytest.mark.parametrize(
    ("env", "more", "error", "message"),
    [
        (TAG, {"wrapper": gym.wrappers.ClipAction}, UsageError, "Leave --wrapper out"),
        (TAG, {"vectorization": "native"}, ConfigError, "vectorization='native'"),
        (TAG, {"env_kwargs": {"num_oodles": 1}}, EnvError, "num_oodles"),
        (Nameless, {}, UsageError, "no possible_agents"),
        (Empty, {}, UsageError, "no possible_agents"),
        (Others, {}, UsageError, "other possible_agents each time"),
        (Nobody, {}, EnvError, "nobody in `agents` .env 0 of Nobody"),
        (Maps, {}, EnvError, r"agent guest_0 an observation without the key 'map' \(it has n"),
        (Masked, {}, EnvError, "agent cook_0 no action mask in info.*env 0 of Masked"),
        (Texts, {}, UnsupportedSpaceError, r"Text(.|\n)*agent guest_0 of Texts"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, env, more, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path, "r", env, **more)


def test_games_that_cannot_draw_are_not_filmed(tmp_path):
    run = train(tmp_path, "r", Camp)
    with pytest.raises(HeadraceError, match="Camp offers no render_mode 'rgb_array'"):
        run.evaluate(episodes=2, video=tmp_path / "film.mp4")
