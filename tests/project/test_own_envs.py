"""The environments of benchmarks/own_envs.py: valid, and as hard as their docstrings say."""

import re
import statistics

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from benchmarks.own_envs import ALL, Ferry
from benchmarks.own_players import PLAYERS, at_random, play


@pytest.mark.parametrize("kind", ALL)
def test_gymnasium_finds_nothing_wrong(kind):
    check_env(kind(), skip_render_check=True)


@pytest.mark.parametrize("kind", ALL)
def test_observations_stay_within_their_space_to_the_end_of_an_episode(kind):
    env = kind()
    env.action_space.seed(0)
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            assert env.observation_space.contains(observation), observation
            observation, _, terminated, truncated, _ = env.step(at_random(env))
            ended = terminated or truncated
        assert env.observation_space.contains(observation), observation


@pytest.mark.parametrize("kind", ALL)
def test_random_actions_and_the_scripted_player_return_what_the_docstring_says(kind):
    found = re.search(r"random actions (-?[\d.]+), scripted player (-?[\d.]+)\.", kind.__doc__)
    random, best = map(float, found.groups())
    for act, wanted in ((at_random, random), (PLAYERS[kind], best)):
        returns, _ = play(kind(), act, 100, seed=1000)  # others than the docstring's
        error = statistics.stdev(returns) / 10
        assert statistics.mean(returns) == pytest.approx(wanted, abs=4 * error + 0.05)


def test_the_current_carries_a_ferry_that_does_nothing():
    env = Ferry()
    env.reset(seed=1)
    env.x, env.y = 0.0, env.WIDTH / 2
    observation, *_ = env.step(np.zeros(2, np.float32))
    assert env.x == pytest.approx(env.strongest)
    assert observation[0] == pytest.approx(-env.strongest)
