"""The state of a game, and agents' indices, beside observations: held against plain loops."""

import itertools
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from mpe2 import simple_spread_v3
from pettingzoo import AECEnv

from headrace import batch
from headrace.config.policies import assign_agents
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.games.vector import GameVector
from headrace.envs.kernels.pettingzoo_adapter import KernelParallelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.errors import ConfigError, EnvError
from headrace.seeding import derive
from headrace.spec import ActionCodec, Agents, EnvSpec
from tests.envs.games.support import Camp
from tests.envs.kernels.support import Ring, act_at_random, run

BOTH = {"shared_critic": True, "agent_ids": True}
SPREAD = partial(simple_spread_v3.parallel_env, max_cycles=11)


class Telling(Camp):
    """The same, which gives a state of integers."""

    state_space = gym.spaces.Box(-99, 99, (2, 2), np.int64)

    def state(self):
        there = sum(2**i for i, a in enumerate(self.possible_agents) if a in self.agents)
        return np.array([[self.t, int(self.ate)], [there, self.goes["cook_0"]]])


class Lingering(Camp):
    lingers = True


def vector_of(make, n=3, num_steps=40, parts=None, seed=3, **kwargs):
    spec = env_spec(EnvMaker(make, **BOTH))
    parts = list(assign_agents({}, spec).values()) if parts is None else parts
    context = VectorContext(spec, np.arange(n), seed, parts=tuple(parts), **kwargs)
    vector = GameVector([make() for _ in range(n)], context)
    fragments = [
        batch.allocate(batch.columns(spec.for_agents(part), {}, num_steps, n * part.size))
        for part in parts
    ]
    rng = np.random.default_rng(5)
    for fragment, part in zip(fragments, parts, strict=True):
        act_at_random([fragment], spec.for_agents(part), rng)
    return vector, fragments, parts


def joined(game, obs):
    """Return observations of these agents side by side, with zeros for all others."""
    found = []
    for agent in game.possible_agents:
        space = game.observation_space(agent)
        if isinstance(space, gym.spaces.Discrete):
            row = np.zeros(space.n)
            if agent in obs:
                row[obs[agent] - space.start] = 1
        else:
            row = np.ravel(obs[agent]) if agent in obs else np.zeros(space.shape).ravel()
        found.append(row)
    return np.concatenate(found)


def states_of(make, spec, parts, actions, num_steps, n, state):
    """Step games as PettingZoo's documentation does; return the states before and after each step.

    Those after a step are of the same episode. Both by (step, game).
    """
    before, after = {}, {}
    for e in range(n):
        game, episode, gone = make(), 0, set()
        obs, _ = game.reset(seed=derive(3, "env", e, episode))
        for t in range(num_steps):
            before[t, e] = state(game, {a: obs[a] for a in game.agents if a not in gone})
            given = {}
            for agent in game.agents:
                i = game.possible_agents.index(agent)
                p = next(p for p, (first, size) in enumerate(parts) if first <= i < first + size)
                row = actions[p][t][e * parts[p].size + i - parts[p].first]
                codec = ActionCodec(spec.for_agents(parts[p]).action)
                given[agent] = codec.to_env(row[None])[0]
            obs, _, terminated, truncated, _ = game.step(given)
            left = {a for a in obs if terminated.get(a)} | gone
            after[t, e] = state(game, {a: o for a, o in obs.items() if a not in left})
            gone |= {a for a in obs if terminated.get(a) or truncated.get(a)}
            if all(a in gone for a in game.agents):
                episode, gone = episode + 1, set()
                obs, _ = game.reset(seed=derive(3, "env", e, episode))
        before[num_steps, e] = state(game, {a: obs[a] for a in game.agents if a not in gone})
    return before, after


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (SPREAD, lambda game, obs: game.state()),
        (Telling, lambda game, obs: game.state()),
        (Camp, joined),
        (Lingering, joined),
    ],
    ids=["spread", "camp that tells", "camp", "lingering"],
)
def test_states_and_ids_equal_those_of_a_plain_loop(make, state):
    num_steps, n = 40, 3
    vector, fragments, parts = vector_of(make)
    run(vector, fragments)
    actions = [fragment.action.numpy() for fragment in fragments]
    before, after = states_of(make, vector.spec, parts, actions, num_steps, n, state)
    num_finals = 0
    for fragment, part in zip(fragments, parts, strict=True):
        ids = np.tile(np.arange(part.first, part.first + part.size), n)
        assert (fragment.obs["agent_id"].numpy() == ids).all()
        found = fragment.obs["state"].numpy()
        for t, row in np.argwhere(fragment.valid.numpy()):
            wanted = before[t, row // part.size]
            np.testing.assert_array_equal(found[t, row], np.asarray(wanted, found.dtype))
        final_obs, steps, rows = fragment.finals()
        assert (final_obs["agent_id"].numpy() == ids[rows.numpy()]).all()
        for final, t, row in zip(final_obs["state"].numpy(), steps, rows, strict=True):
            wanted = after[int(t), int(row) // part.size]
            np.testing.assert_array_equal(final, np.asarray(wanted, final.dtype))
            num_finals += 1
    assert num_finals > 8


class Relay(AECEnv):
    """Three agents in turns; each sees its number and how many moves it has made.

    The second one leaves after three moves; after `length` moves in all the others are cut off. By
    who begins, the second one has left by then, leaves with the last move, or is cut off too.
    """

    metadata = {"name": "relay"}  # noqa: RUF012
    possible_agents = ["a_0", "a_1", "a_2"]  # noqa: RUF012
    length = 8

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 99, (2,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        random = np.random.default_rng(seed)
        self.numbers = dict(zip(self.possible_agents, random.random(3), strict=True))
        self.agents, self.total = list(self.possible_agents), 0
        self.moves = dict.fromkeys(self.agents, 0)
        self.agent_selection = self.agents[int(random.integers(3))]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.moves[agent] += 1
        self.total += 1
        self.rewards = dict.fromkeys(self.agents, float(action))
        self.terminations[agent] = agent == "a_1" and self.moves[agent] == 3
        if self.total == self.length:
            self.truncations = {a: not self.terminations[a] for a in self.agents}
        after = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self.agent_selection = after
        self._accumulate_rewards()
        self._deads_step_first()

    def observe(self, agent):
        return np.array([self.numbers[agent], self.moves[agent]], np.float32)


class TellingRelay(Relay):
    state_space = gym.spaces.Box(0, 99, (2,), np.float32)

    def state(self):
        return np.array([self.total, len(self.agents)], np.float32)


def relay_played_plainly(game, action_of, num_moves, state):
    """Return the (observation, state) of each agent's turns, dead ones of the cut off included."""
    turns, episode, last = {agent: [] for agent in game.possible_agents}, 0, None
    game.reset(seed=derive(3, "env", 0, episode))
    t = 0
    while t < num_moves:
        agent = game.agent_selection
        obs, _, ends, cut, _ = game.last()
        there = {a: game.observe(a) for a in game.agents if not game.terminations[a]}
        now = state(game, there)
        if cut and not ends:  # all who are cut off are so in the same moment
            last = now if last is None else last
            turns[agent].append((obs, last, "end"))
        elif not ends:
            turns[agent].append((obs, now, "move"))
        game.step(None if ends or cut else action_of(t, agent))
        t += not (ends or cut)
        if not game.agents:
            episode, last = episode + 1, None
            game.reset(seed=derive(3, "env", 0, episode))
    return turns


@pytest.mark.parametrize(
    ("make", "state"),
    [(TellingRelay, lambda game, obs: game.state()), (Relay, joined)],
    ids=["state", "joined"],
)
def test_in_turns_an_agent_has_the_state_at_its_own_move(make, state):
    num_steps = 60
    vector, (fragment,), _ = vector_of(make, n=1, num_steps=num_steps)
    actions = fragment.action.clone()  # the vector packs them
    run(vector, [fragment])
    index = {agent: i for i, agent in enumerate(Relay.possible_agents)}
    turns = relay_played_plainly(
        make(), lambda t, agent: int(actions[t, index[agent]]), num_steps, state
    )
    finals = {
        (int(t), int(i)): {key: part[k].numpy() for key, part in fragment.final_obs.items()}
        for k, (t, i) in enumerate(zip(*fragment.finals()[1:], strict=True))
    }
    num_ends = 0
    for agent, i in index.items():
        moves = [turn for turn in turns[agent] if turn[2] == "move"]
        pairs = itertools.pairwise(turns[agent])
        follows = [after for turn, after in pairs if turn[2] == "move"]
        assert (fragment.obs["agent_id"][:, i] == i).all()
        count = int(fragment.valid[:, i].sum())
        assert count > 5
        for j in range(count):
            obs, now, _ = moves[j]
            np.testing.assert_array_equal(fragment.obs[""][j, i], obs)
            np.testing.assert_array_equal(fragment.obs["state"][j, i], np.float32(now))
            if (j, i) in finals:
                obs, now, kind = follows[j]
                np.testing.assert_array_equal(finals[j, i][""], obs)
                np.testing.assert_array_equal(finals[j, i]["state"], np.float32(now))
                num_ends += kind == "end"
    assert num_ends > 4


def test_a_kernel_game_has_the_states_of_its_pettingzoo_form():
    num_steps, n, parts = 25, 3, [Agents(0, 2), Agents(2, 1)]
    make = partial(KernelParallelEnv, Ring, compiled=True)
    seen = {"left": 0, "left at the end": 0, "finals": 0}
    # Each env is seeded once, and goes on by itself
    vector, fragments, _ = vector_of(make, n=n, num_steps=num_steps, parts=parts, reseed=False)
    spec = env_spec(EnvMaker(Ring, native=True, **BOTH))
    assert spec.observation == vector.spec.observation
    games = []
    for e in range(n):
        context = VectorContext(spec, np.arange(1), derive(3, "env", e, 0), parts=tuple(parts))
        theirs = [
            batch.allocate(batch.columns(spec, {}, num_steps, part.size, capacity=99))
            for part in parts
        ]
        games.append((KernelVector(Ring(), context), theirs))
    for _ in range(3):
        run(vector, fragments)
        for e, (own, theirs) in enumerate(games):
            for one, other, part in zip(theirs, fragments, parts, strict=True):
                one.action.copy_(other.action[:, e * part.size : (e + 1) * part.size])
            run(own, theirs)
            for one, other, part in zip(theirs, fragments, parts, strict=True):
                mine = slice(e * part.size, (e + 1) * part.size)
                for key in ("", "state", "agent_id"):
                    rows = one.obs[key][:-1][one.valid]
                    assert torch.equal(rows, other.obs[key][:-1, mine][one.valid]), key
                found = [by_place(fragment, part) for fragment in (one, other)]
                wanted = {k[:2]: of for k, of in found[1].items() if k[2] == e}
                assert {k[:2] for k in found[0]} == wanted.keys()
                for (t, i, _), final in found[0].items():
                    for key, array in final.items():
                        assert torch.equal(array, wanted[t, i][key]), key
                    states = final["state"].view(3, 4)
                    seen["finals"] += 1
                    seen["left at the end"] += int((states == 0).all(1).any())
                seen["left"] += int((~one.valid).sum())
    assert all(seen.values()), seen
    for own, _ in games:
        own.close()


def by_place(fragment, part):
    """Return final observations by (step, agent of the part, game)."""
    obs, steps, rows = fragment.finals()
    return {
        (int(t), int(i) % part.size, int(i) // part.size): {k: o[j] for k, o in obs.items()}
        for j, (t, i) in enumerate(zip(steps, rows, strict=True))
        if t < fragment.num_steps
    }


@pytest.mark.parametrize("make", [Camp, TellingRelay, "kernel"])
def test_a_restored_vector_goes_on_with_the_same_states(make):
    def vector():
        if make != "kernel":
            return vector_of(make, num_steps=20)[:2]
        spec = env_spec(EnvMaker(Ring, native=True, **BOTH))
        own = KernelVector(Ring(), VectorContext(spec, np.arange(3), 3))
        fragment = batch.allocate(batch.columns(spec, {}, 20, 9))
        act_at_random([fragment], spec, np.random.default_rng(5))
        return own, [fragment]

    (one, first), (other, second) = vector(), vector()
    taken = [fragment.action.clone() for fragment in first]
    run(one, first)
    state = one.state() | one.obs()
    for e in range(len(one.env_id)):  # as a worker keeps them
        if "taken" in state:
            steps = int(state["episode_step"][e])
            state[f"env{e}.actions"] = state["taken"][20 - steps :, e]
    restored = other.restore(state)
    assert restored.new_episode == 0
    for fragments in (first, second):
        for fragment, actions in zip(fragments, taken, strict=True):
            fragment.action.copy_(actions)
    run(one, first)
    run(other, second)
    for fragment, again in zip(first, second, strict=True):
        for key, part in fragment.obs.items():
            assert torch.equal(part, again.obs[key]), key


def test_the_spec_says_who_sees_what_and_survives_its_file():
    spec = env_spec(EnvMaker(Camp, **BOTH))
    cook = spec.for_agents(Agents(3, 1))
    assert [key for key, _ in cook.observation.parts] == ["", "agent_id", "state"]
    assert cook.seen.describe() == "Dict(Discrete(20), agent_id: Discrete(4))"
    assert dict(cook.seen_by_critic.parts)["state"].shape == (3 * 3 + 20,)
    assert cook.given.describe() == "Discrete(20)"
    assert EnvSpec.from_json(spec.to_json()) == spec
    assert "the critic also sees all agents' observations: Box(29,) float32" in spec.notes
    told = env_spec(EnvMaker(Telling, shared_critic=True))
    assert told.seen.describe() == "Box(3,) float32"
    assert "the critic also sees state(): Box(2, 2) int64" in told.notes
    plain = env_spec(EnvMaker(Camp))
    old = {k: v for k, v in plain.to_json().items() if k not in ("state_key", "id_key")}
    assert EnvSpec.from_json(old) == plain


def test_keys_of_the_game_s_own_are_left_to_it():
    class Mapped(Camp):
        def observation_space(self, agent):
            own = super().observation_space(agent)
            return gym.spaces.Dict(state=own, agent_id=gym.spaces.Tuple([own]))

        def _obs(self, agent):
            own = super()._obs(agent)
            return {"state": own, "agent_id": (own,)}

    spec = env_spec(EnvMaker(Mapped, **BOTH))
    assert (spec.state_key, spec.id_key) == ("state_", "agent_id")
    assert [key for key, _ in spec.observation.parts] == [
        "state", "agent_id.0", "agent_id", "state_"
    ]  # fmt: skip
    vector, fragments, _ = vector_of(Mapped)
    run(vector, fragments)
    guests = fragments[0].obs
    assert torch.equal(guests["state"], guests["agent_id.0"])
    assert guests["state_"].shape[-1] == 2 * (3 * 3 + 20)


class Forgetful(Relay):
    """Only who is to move observes something that is as declared."""

    def observe(self, agent):
        return super().observe(agent)[: 2 if agent == self.agent_selection else 1]


def changed(**attributes):
    return type("Changed", (Telling,), attributes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (changed(state=lambda self: np.zeros(3)), r"a state of shape \(3,\) and dtype float64, but "
         r"the environment declares Box\(2, 2\) int64 \(env 0 of Changed, .* 0 steps so far"),
        (changed(state=lambda self: 1 / 0), r"ZeroDivisionError(.|\n)*failed in reset, env 0"),
        (changed(state=lambda self: np.full(2, np.nan), state_space=gym.spaces.Box(-1, 1, (2,))),
         r"a value that is not finite.*'state': array\(\[nan, nan\]"),
        (changed(_obs=lambda self, agent: Camp._obs(self, agent) if self.t < 2 else np.int64(3)),
         r"gave agent guest_\d an observation of shape \(\) and dtype int64.* 1 steps so far"),
        (Forgetful, r"gave agent \d an observation of shape \(1,\).*\(env 0 of Forgetful, "),
    ],
)  # fmt: skip
def test_bad_states_are_refused(make, message):
    vector, fragments, _ = vector_of(make)
    with pytest.raises(EnvError, match=message):
        run(vector, fragments)


def test_images_are_not_joined():
    class Film(Camp):
        def observation_space(self, agent):
            return gym.spaces.Box(0, 255, (9, 9), np.uint8)

    message = r"gives no state, and agent 0 observes an image \(Box\(9, 9\) uint8\)"
    with pytest.raises(ConfigError, match=message):
        env_spec(EnvMaker(Film, shared_critic=True))
    assert env_spec(EnvMaker(Film, agent_ids=True)).state_key == ""
