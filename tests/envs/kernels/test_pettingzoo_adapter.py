"""Kernel environments in PettingZoo's parallel form."""

import sys
import warnings

import gymnasium
import numpy as np
import pytest

from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.library import IDS
from headrace.envs.kernels.library.classic_control import CartPole
from headrace.envs.kernels.pettingzoo_adapter import KernelParallelEnv
from headrace.errors import UsageError
from tests import python
from tests.envs.kernels.support import Ring, act_at_random, run, vector_of
from tests.marks import repeats

with warnings.catch_warnings():  # it imports a game of its own in a way that it warns of
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import parallel_api_test, parallel_seed_test

GAMES = [
    Ring,
    "tests.envs.kernels.support:Ring",
    CartPole,
    *(i for i, k in IDS.items() if k().agents),
]


@repeats("game", GAMES, keep=3)
@repeats("compiled", [False, True])
def test_pettingzoo_s_checker_passes(game, compiled):
    """Each of its warnings is an error here: agents that die early are told of, and no others."""
    parallel_api_test(KernelParallelEnv(game, compiled=compiled), num_cycles=200)


def test_same_seed_gives_the_same_episodes():
    parallel_seed_test(lambda: KernelParallelEnv(Ring), num_cycles=50)
    one = KernelParallelEnv(Ring, cells=100)
    starts = [np.stack(list(one.reset(seed=seed)[0].values())) for seed in (1, 2, 1, None)]
    assert (starts[0] != starts[1]).any()
    assert (starts[0] == starts[2]).all()
    assert (starts[2] != starts[3]).any()
    others = [KernelParallelEnv(Ring, cells=1000).reset()[0]["first_0"] for _ in range(2)]
    assert (others[0] != others[1]).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_parallel_env_plays_what_workers_play(compiled):
    num_steps = 80
    vector, (fragment,) = vector_of(Ring(), 1, num_steps, "python", seed=3)
    act_at_random([fragment], vector.spec, np.random.default_rng(5))
    run(vector, [fragment])
    finals = {
        (int(t), int(i)): o for o, t, i in zip(*fragment.finals(), strict=True) if t < num_steps
    }
    game = KernelParallelEnv(Ring, compiled=compiled)
    row = {agent: i for i, agent in enumerate(game.possible_agents)}
    assert list(row) == ["first_0", "first_1", "second_0"]
    obs, infos = game.reset(seed=3)
    seen = {"left": 0, "terminated": 0, "cut": 0}
    for t in range(num_steps):
        alive = [agent for agent in row if fragment.valid[t, row[agent]]]
        assert game.agents == alive
        for agent in alive:
            np.testing.assert_array_equal(obs[agent], fragment.obs[t, row[agent]])
        actions = {agent: fragment.action[t, row[agent]].numpy() for agent in alive}
        obs, reward, terminated, truncated, infos = game.step(actions)
        for item in (obs, reward, terminated, truncated, infos):
            assert list(item) == alive
        for agent, i in ((agent, row[agent]) for agent in alive):
            assert reward[agent] == fragment.reward[t, i]
            assert terminated[agent] == fragment.terminated[t, i]
            assert truncated[agent] == fragment.truncated[t, i]
            if truncated[agent]:
                np.testing.assert_array_equal(obs[agent], finals[t, i])
                seen["cut"] += 1
            seen["terminated"] += terminated[agent]
            assert (agent in game.agents) == (not terminated[agent] and not truncated[agent])
        seen["left"] += 0 < len(game.agents) < len(alive)
        if not game.agents:
            assert game.step({}) == ({}, {}, {}, {}, {})
            obs, infos = game.reset()
            assert list(obs) == list(infos) == list(row)
    assert all(seen.values()), seen
    game.close()


def test_missing_and_invalid_actions_are_refused():
    game = KernelParallelEnv(Ring)
    with pytest.raises(gymnasium.error.ResetNeeded, match="before reset"):
        game.step({})
    game.reset(seed=1)
    actions = {agent: game.action_space(agent).sample() for agent in game.agents}
    with pytest.raises(UsageError, match="no action for first_1"):
        game.step({name: action for name, action in actions.items() if name != "first_1"})
    with pytest.raises(UsageError, match="is not in the action space MultiDiscrete"):
        game.step(actions | {"second_0": np.array([3, 0])})
    with pytest.raises(UsageError, match="Ring does not take"):
        KernelParallelEnv(Ring, colour=3)


def test_missing_pettingzoo_error_names_the_extra():
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "from headrace.errors import MissingExtraError\n"
        "try: import headrace.envs.kernels.pettingzoo_adapter\n"
        "except MissingExtraError as error: print(error)"
    )
    out = python.run([sys.executable, "-c", code], check=True)
    assert "[pettingzoo]'" in out.stdout


class Leaving(KernelEnv):
    """The first agent leaves at once; all agents observe its action."""

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2, start=5)
    max_episode_steps = 4
    agents = {"agent": 2}  # noqa: RUF012
    state = {"seen": np.float32}  # noqa: RUF012

    @staticmethod
    def reset_env(w, e):
        w.seen[e] = 0

    @staticmethod
    def step_env(w, e):
        w.seen[e] = w.action[e, 0]
        w.alive[e, 0] = False

    @staticmethod
    def observe(w, e, i, out):
        out[0] = w.seen[e]


def test_agent_that_left_takes_a_valid_default_action():
    game = KernelParallelEnv(Leaving)
    game.reset(seed=1)
    game.step({"agent_0": 6, "agent_1": 6})
    obs, *_ = game.step({"agent_1": 6})
    assert {agent: float(seen[0]) for agent, seen in obs.items()} == {"agent_1": 5.0}
