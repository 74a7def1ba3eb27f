"""An environment whose steps and resets take unequal time (`step_times.py` says how unequal).

It sleeps, so that many fit on a few cores. Whoever lets all of N environments wait for the slowest
at each step loses much of the time. The sleep is the workload here, and waits for nothing. Each
environment writes down how long it really slept (`busy.py`), and nothing else counts as its time:
not the policy's work, not the way there and back.
"""

import random
import time

import gymnasium as gym
import numpy as np

from benchmarks.peers.busy import Ledger
from benchmarks.peers.step_times import DISTRIBUTIONS


class Uneven(gym.Env):
    """Four random numbers, two actions, no reward; episodes are only ever cut off.

    The first episode begins somewhere in its middle, so that environments do not all reset at the
    same time, as they would not after a while.

    Args:
        distribution: a name in `step_times.DISTRIBUTIONS`; ValueError if it is not.
        render_mode: as Gymnasium has it; nothing is to be seen.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, distribution="stalls", render_mode=None):
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution {distribution!r}: expected {', '.join(DISTRIBUTIONS)}")
        self.render_mode = render_mode
        self.times, self.ledger = DISTRIBUTIONS[distribution], Ledger()
        self._random, self._steps_left, self._is_first = random.Random(), 0, True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        with self.ledger.reset():
            if self.times.reset_s:
                time.sleep(self.times.reset_s)
        steps = self._random.randint(*self.times.episode_steps)
        self._steps_left = self._random.randint(1, steps) if self._is_first else steps
        self._is_first = False
        return np.zeros(4, np.float32), {}

    def step(self, action):
        seconds = self.times.draw(self._random)
        with self.ledger.step():
            time.sleep(seconds)
        self._steps_left -= 1
        obs = np.full(4, self._random.random(), np.float32)
        return obs, 0.0, False, self._steps_left <= 0, {}
