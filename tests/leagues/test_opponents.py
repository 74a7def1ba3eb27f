"""Members at play: whose rows they are, what they choose there, and which of them are in memory."""

import weakref
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace import batch
from headrace.batch import each
from headrace.collectors.rollout import FixedActors, RolloutResult, RolloutTask, RolloutWorker
from headrace.config.algorithms import ALGORITHMS
from headrace.config.policies import RANDOM
from headrace.envs.api import VectorContext
from headrace.envs.games.opponents import MemberPolicy, Opponents
from headrace.envs.games.seats import LATEST, Pool
from headrace.envs.vectors import make_vector
from headrace.leagues.members import MemberLoader
from headrace.meter import Meter
from headrace.models.fast_paths import act_for
from headrace.models.numpy_inference import NumpyActor
from headrace.models.policy import Network
from headrace.seeding import action_noise
from headrace.spec import Agents
from tests.envs.games.support import Camp
from tests.leagues.support import (
    GRID,
    POOL,
    RPS,
    SMALL_GRID,
    Strangers,
    Takes,
    Trio,
    copied,
    league_plan,
    seats_before_steps,
)
from tests.leagues.test_seats import assert_frequent
from tests.marks import repeats
from tests.support import never, policies_for

PLAIN, AUTO = (Network(hidden_sizes=(8,), arithmetic=of) for of in ("plain", "auto"))
GAMES = {
    "kernel, one policy": (RPS, {}),
    "kernel, two policies": (GRID, SMALL_GRID),
    "at once": (Trio, {}),
    "in turns, with a mask": (Takes, {}),
    "come and go, boxes and several choices": (Camp, {"length": 5}),
}
N, T = 6, 20


class Sampled:
    """One vector of a plan, sampled as a worker does; `seats` are noted before each step."""

    def __init__(self, plan, seed=1):
        self.plan, self.steps = plan, 0
        self.worker = RolloutWorker(plan, [0], Meter(), "test")
        self.worker.policies.update(policies_for(plan, seed))
        self.vector = self.worker._vectors[0]
        self.fragments = batch.allocate_all(plan.layouts)
        self.seats = seats_before_steps(self.vector) if plan.league else []
        self.raw = []  # the fragments, as they are before the moves of a game in turns are packed
        finish = self.vector.finish

        def noting():
            self.raw = [copied(fragment) for fragment in self.fragments]
            return finish()

        self.vector.finish = noting

    def noise(self):
        """Of the next fragment."""
        draws = [self.worker.policies[name].num_draws for name in self.plan.acting]
        noise = self.plan.action_noise(self.vector.env_id, self.steps, draws)
        return list(map(torch.from_numpy, noise))

    def collect(self, pool=POOL):
        """Fill the fragments; return the episodes that ended."""
        self.seats.clear()
        result = RolloutResult()
        task = RolloutTask(0, self.fragments, self.steps, (), pool if self.plan.league else None)
        self.worker.collect([task], FixedActors(self.worker.actors(), 0), never, result)
        self.steps += self.plan.num_steps
        assert result.whole
        return result.episodes


def learned_rows(seats, side, size):
    """`[T, n * size]`: which rows of a side the learned policies play, from who plays."""
    learned = [(member == LATEST) | (of == side) for member, of in seats]
    return torch.stack(learned).repeat_interleave(size, 1)


def assert_alike(found, expected, exactly):
    if exactly or found.dtype == torch.int64:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("network", [PLAIN, AUTO], ids=["plain", "auto"])
@pytest.mark.parametrize("game", GAMES)
def test_members_choose_for_their_rows_as_their_policies_do(game, network):
    env, kwargs = GAMES[game]
    plan = league_plan(
        env, network=network, kwargs=kwargs, num_envs=N, envs_per_vector=N, num_steps=T
    )
    sampled, load = Sampled(plan), plan.league.load
    exactly, seen = network is PLAIN, set()
    modules = {
        (i, member): load.of(i, member).module
        for i in range(len(plan.parts))
        for member in POOL.members
    }
    for _ in range(2):
        noise = sampled.noise()
        sampled.collect()
        for i, (fragment, u) in enumerate(zip(sampled.raw, noise, strict=True)):
            size = plan.parts[i].size
            learned = learned_rows(sampled.seats, i, size)
            policy = sampled.worker.policies[plan.acting[i]]
            for t, (member, _) in enumerate(sampled.seats):
                obs = each(lambda o, t=t: o[t], fragment.obs)
                own, mine = policy.act(obs, u[t]), learned[t]
                assert_alike(fragment.action[t][mine], own["action"][mine], exactly)
                by_row = member.repeat_interleave(size)
                for each_member in by_row[~mine].unique().tolist():
                    rows = ~mine & (by_row == each_member)
                    act = modules[i, each_member].act(
                        each(lambda o, rows=rows: o[rows], obs), u[t][rows]
                    )
                    assert_alike(fragment.action[t][rows], act["action"], exactly)
                    seen.add((i, each_member))
                # What is learned from says how likely the learned policy was to act so
                for name in ("log_prob", "value"):
                    stored = fragment.stored_outputs[name][t][mine]
                    torch.testing.assert_close(stored, own[name][mine], rtol=1e-5, atol=1e-5)
    assert seen == modules.keys()


def test_members_differ_so_that_the_test_above_can_fail():
    plan = league_plan(Trio, num_envs=N, envs_per_vector=N, num_steps=T)
    sampled, load = Sampled(plan), plan.league.load
    noise = sampled.noise()[0]
    sampled.collect()
    obs = sampled.raw[0].obs[:-1]
    modules = [load.of(0, member).module for member in POOL.members]
    modules.append(sampled.worker.policies["default"])
    chosen = [module.act(obs, noise)["action"] for module in modules]
    for k, one in enumerate(chosen):
        for other in chosen[k + 1 :]:
            assert float((one != other).float().mean()) > 0.1


def without_league(plan):
    """The same vector without a league, and its fragments: one for each side, too."""
    n = plan.envs_per_vector
    context = VectorContext(
        plan.spec, np.arange(n), plan.seed, parts=plan.parts, owners=plan.owners
    )
    return make_vector(plan.maker, context), batch.allocate_all(plan.layouts)


@pytest.mark.parametrize("game", GAMES)
def test_rows_of_members_are_not_valid_and_all_others_are_as_without_a_league(game):
    env, kwargs = GAMES[game]
    plan = league_plan(env, kwargs=kwargs, num_envs=N, envs_per_vector=N, num_steps=T)
    sampled = Sampled(plan)
    vector, fragments = without_league(plan)
    assert vector.seats is None
    episodes = invalid = valid = 0
    for _ in range(3):
        ended = sampled.collect()
        vector.bind(*fragments)
        for fragment, raw in zip(fragments, sampled.raw, strict=True):
            fragment.action.copy_(raw.action)
        for t in range(T):
            vector.step(t)
        for i, (fragment, raw) in enumerate(zip(fragments, sampled.raw, strict=True)):
            learned = learned_rows(sampled.seats, i, plan.parts[i].size)
            assert torch.equal(raw.valid, fragment.valid & learned)
            for name in ("reward", "terminated", "truncated", "env_id"):
                assert torch.equal(getattr(raw, name), getattr(fragment, name)), name
            each(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0),
                 raw.obs, fragment.obs)  # fmt: skip
            valid, invalid = valid + int(raw.valid.sum()), invalid + int((~learned).sum())
        assert [of._replace(match=()) for of in ended] == vector.finish()
        episodes += len(ended)
        for of in ended:
            member, side = (int(x[of.env_id]) for x in sampled.seats[of.ended_at])
            assert of.match[:2] == (() if member == LATEST else (member, side))
    assert min(valid, invalid) > 100
    assert episodes > 20
    vector.close()


def transitions(raws):
    """A column's transitions, from rows as they happened: (obs, action, reward, ended)."""
    found, now = [], None
    for raw in raws:
        for t in range(T):
            if raw.valid[t] and raw.learned[t]:
                now = [raw.obs["observation"][t].tolist(), int(raw.action[t]), 0.0, False]
                found.append(now)
            if now is not None:
                now[2] += float(raw.reward[t])
                if raw.terminated[t] or raw.truncated[t]:
                    now[3], now = True, None
    return found


def test_in_turns_the_transitions_of_learned_sides_alone_are_packed():
    plan = league_plan(Takes, num_envs=N, envs_per_vector=N, num_steps=T)
    sampled = Sampled(plan)
    columns = {(i, c): ([], []) for i in range(2) for c in range(N)}
    for _ in range(4):
        sampled.collect()
        for (i, c), (raws, packed) in columns.items():
            of, learned = sampled.raw[i], learned_rows(sampled.seats, i, 1)
            column = SimpleNamespace(learned=learned[:, c])
            for name in ("obs", "action", "reward", "terminated", "truncated", "valid"):
                setattr(column, name, each(lambda o, c=c: o[:, c], getattr(of, name)))
            raws.append(column)
            now = sampled.fragments[i]
            ends = now.terminated | now.truncated
            packed += [
                [now.obs["observation"][t, c].tolist(), int(now.action[t, c]),
                 float(now.reward[t, c]), bool(ends[t, c])]
                for t in range(T) if now.valid[t, c]
            ]  # fmt: skip
    for raws, packed in columns.values():
        expected = transitions(raws)
        assert 3 < len(packed) <= len(expected) <= len(packed) + 1  # the last one waits
        for one, other in zip(packed, expected, strict=False):
            # A column is cut off where its next transition is of another fragment
            assert one[:3] == other[:3]
            assert one[3] or not other[3]
        assert sum(of[2] != 0 for of in packed) > 2


@pytest.mark.parametrize("env", [RPS, Trio, Takes], ids=["kernel", "at once", "in turns"])
def test_a_league_in_which_nobody_is_met_is_as_none(env):
    """A side is a part of the rows of a policy: the same agents, noise and ids."""
    more = {"num_envs": 4, "envs_per_vector": 4, "num_steps": T}
    alone = Pool((3,), (1.0,), 1.0, ("",) * 4)
    league, plain = (Sampled(league_plan(env, pool, **more)) for pool in (alone, None))
    plain.worker.policies.update(league.worker.policies)
    size = plain.plan.spec.num_agents
    for _ in range(2):
        ended, expected = league.collect(alone), plain.collect()
        assert ended == expected
        assert len(ended) > 4
        (whole,) = plain.fragments
        for i, fragment in enumerate(league.fragments):
            assert fragment.env_id.tolist() == whole.env_id[i::size].tolist()
            for name in ("action", "reward", "terminated", "truncated", "valid"):
                of_side = getattr(whole, name)[:, i::size]
                assert torch.equal(getattr(fragment, name), of_side), name
            each(lambda x, y, i=i: torch.testing.assert_close(x, y[:, i::size], rtol=0, atol=0),
                 fragment.obs, whole.obs)  # fmt: skip


def box(n):
    return gym.spaces.Box(-1, 1, (n,), np.float32)


HEADS = {
    "categorical": gym.spaces.Discrete(4),
    "several choices": gym.spaces.MultiDiscrete([3, 2, 5]),
    "gaussian": box(3),
}


def spec_of(action):
    class Game(Camp):
        possible_agents = ["a_0", "a_1"]  # noqa: RUF012

        def observation_space(self, agent):
            return box(5)

        def action_space(self, agent):
            return action

    return league_plan(Game).spec


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_numpy_actions_of_some_rows_are_those_of_torch(head, normalize):
    spec = spec_of(HEADS[head])
    network = Network(hidden_sizes=(16, 8), normalize_obs=normalize, activation="silu")
    module = Strangers((("a", spec),), network).of(0, 4).module
    obs = torch.randn(300, 5, generator=torch.Generator().manual_seed(1)) * 2
    if normalize:
        module.normalize_obs.update(obs * 3 + 1, torch.ones(300, dtype=torch.bool))
    act = act_for(module, spec, network)
    assert isinstance(act.__self__, NumpyActor)
    noise = torch.from_numpy(action_noise(1, np.arange(300), 0, 1, module.num_draws))[0]
    for rows in (torch.arange(300), torch.tensor([7]), torch.arange(0, 300, 7)):
        found = act(obs[rows], noise[rows])
        expected = module.act(obs[rows], noise[rows])["action"]
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert_alike(found, expected, exactly=False)
    assert len(found.unique()) > 1


SIDES = {"a": Agents(0, 1), "b": Agents(1, 1)}


@pytest.mark.parametrize("game", [RPS, Takes, "gaussian"], ids=["choices", "mask", "gaussian"])
def test_a_random_member_is_random_whatever_it_sees(game):
    spec = spec_of(HEADS["gaussian"]) if game == "gaussian" else league_plan(game).spec
    loader = MemberLoader(
        {name: (agents, spec.for_agents(agents)) for name, agents in SIDES.items()}
    )
    loaded = loader(Pool((0,), (1.0,), 0.0, (RANDOM,)), 0)
    assert loaded.keys() == SIDES.keys()
    of, n = loaded["b"], 3000
    act = act_for(of.module, of.spec, of.network)
    noise = torch.from_numpy(action_noise(1, np.arange(n), 0, 1, of.module.num_draws))[0]
    if game == "gaussian":
        for obs in (torch.zeros(n, 5), torch.full((n, 5), 3.0)):
            action = act(obs, noise)
            assert float(action.mean(0).abs().max()) < 0.1
            assert float((action.std(0) - 1).abs().max()) < 0.05
        return
    if game == RPS:
        action = act(torch.zeros(n, 1), noise)
        assert_frequent(action.bincount(minlength=3), np.full(3, n / 3))
        return
    for heap, allowed in ((12, 3), (2, 2), (1, 1)):
        mask = torch.tensor([k < allowed for k in range(3)], dtype=torch.int8).repeat(n, 1)
        obs = {"observation": torch.full((n, 2), float(heap)), "action_mask": mask}
        counts = act(obs, noise).bincount(minlength=3)
        assert int(counts[allowed:].sum()) == 0
        assert_frequent([*counts[:allowed], 0], [*([n / allowed] * allowed), 1e-9])


class Counted:
    """A `LoadMember` that notes whom it loads, and holds nobody."""

    def __init__(self, strangers):
        self.strangers, self.loads, self.alive = strangers, [], weakref.WeakSet()

    def __call__(self, pool, member):
        loaded = self.strangers(pool, member)
        self.loads.append(member)
        self.alive.update(of.module for of in loaded.values())
        return loaded


@repeats("env", [GRID, Trio], ids=["kernel", "python"])
def test_of_a_hundred_snapshots_those_of_the_pool_and_those_that_play_are_in_memory(env):
    more = {"num_envs": N, "envs_per_vector": N, "num_steps": 3, "network": PLAIN}
    more |= {"kwargs": SMALL_GRID} if env == GRID else {}
    load = Counted(league_plan(env, **more).league.load)
    plan = league_plan(env, load=load, **more)
    sampled, outlasted, num_sides = Sampled(plan), 0, len(plan.parts)
    for newest in range(100):
        members = tuple(range(max(0, newest - 3), newest + 1))
        pool = Pool(members, (1.0,) * len(members), 0.2, ("",) * (newest + 1))
        playing = sampled.vector.seats.in_use() if newest else set()
        sampled.collect(pool)
        assert len(load.alive) <= num_sides * len(playing | set(members))
        outlasted += len(playing - set(members))
    assert len(set(load.loads)) > 60
    assert load.loads and len(load.loads) == len(set(load.loads))  # nobody was loaded twice
    assert outlasted > 10


def test_forgets_who_is_out_of_the_pool_once_the_last_game_is_over():
    plan = league_plan(RPS, num_envs=N, envs_per_vector=N, num_steps=4)
    sampled = Sampled(plan)
    opponents = sampled.worker._opponents
    first, second = (Pool((k,), (1.0,), 0.0, ("",) * 4) for k in (1, 2))
    sampled.collect(first)
    assert set(opponents._acts) == {1}
    sampled.collect(second)  # its first games were begun before
    assert set(opponents._acts) == {1, 2}
    sampled.collect(second)
    assert set(opponents._acts) == {1, 2}  # the pool is the same: nothing is looked through
    third = Pool((2,), (1.0,), 0.0, ("",) * 4)
    sampled.collect(third)
    assert set(opponents._acts) == {2}


def test_members_may_be_of_another_algorithm_in_the_same_vector():
    """A policy of values takes the same noise."""
    plan = league_plan(RPS, num_envs=N, envs_per_vector=N, num_steps=T)
    dqn, spec = ALGORITHMS["dqn"], plan.spec.for_agents(Agents(0, 1))
    network = Network(hidden_sizes=(4,))
    module = dqn.build_policy(spec, network, dqn.Config())
    module.head.epsilon.fill_(0.0)

    def load(pool, member):
        return {side: MemberPolicy(spec, network, module) for side in plan.policies}

    plan = league_plan(RPS, num_envs=N, envs_per_vector=N, num_steps=T, load=load)
    sampled = Sampled(plan)
    sampled.collect(Pool((0,), (1.0,), 0.0, ("",)))
    best = int(module.outputs(torch.zeros(1, 1))[0, :, 0].argmax())
    for i, fragment in enumerate(sampled.fragments):
        learned = learned_rows(sampled.seats, i, 1)
        assert (~learned).any()
        assert fragment.action[~learned].unique().tolist() == [best]
        assert len(fragment.action[learned].unique()) == 3


def test_opponents_load_nobody_who_is_not_met():
    load = Counted(Strangers((), PLAIN))
    opponents = Opponents(load, ["a", "b"], torch.device("cpu"))
    plan = league_plan(RPS, num_envs=N, envs_per_vector=N, num_steps=T, load=load)
    sampled = Sampled(plan)
    sampled.collect(Pool((0, 1), (1.0, 1.0), 1.0, ("", "")))
    assert load.loads == []
    assert opponents._acts == {}
