"""An environment whose steps take unequal time: 3 ms, and 100 ms with probability 1/24.

It sleeps, so that many fit on a few cores. Whoever lets all of N environments wait for the slowest
at each step loses most of the time. The sleep is the workload here, and waits for nothing.
"""

import random
import time

import gymnasium as gym
import numpy as np

SHORT_S, LONG_S, LONG_PROBABILITY = 0.003, 0.1, 1 / 24
MEAN_S = SHORT_S * (1 - LONG_PROBABILITY) + LONG_S * LONG_PROBABILITY
EPISODE_STEPS = 1000


class Uneven(gym.Env):
    """Four random numbers, two actions, no reward; each episode is cut off after 1,000 steps."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self._random, self._steps = random.Random(), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(LONG_S if self._random.random() < LONG_PROBABILITY else SHORT_S)
        self._steps += 1
        obs = np.full(4, self._random.random(), np.float32)
        return obs, 0.0, False, self._steps >= EPISODE_STEPS, {}
