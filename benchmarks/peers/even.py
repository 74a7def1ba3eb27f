"""Environments whose steps all take the same time: some ms of sleep, or next to nothing for images.

The sleep is the workload here, and waits for nothing: an environment that is a program of its own,
or elsewhere, keeps no core busy. How long it really slept is written down (`busy.py`).
"""

import time

import gymnasium as gym
import numpy as np

from benchmarks.peers.busy import Ledger

EPISODE_STEPS = 1000


class _Even(gym.Env):
    """Random observations from a small store, two actions, no reward; 1,000 steps an episode."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self._steps, space = 0, self.observation_space
        space.seed(0)
        self._store = [space.sample() for _ in range(16)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = int(self.np_random.integers(16)) if seed is not None else 0
        self._ends_at = self._steps + EPISODE_STEPS
        return self._store[self._steps % 16], {}

    def step(self, action):
        self._steps += 1
        return self._store[self._steps % 16], 0.0, False, self._steps >= self._ends_at, {}


class Sleeping(_Even):
    """Four numbers; a step takes `step_ms`."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, step_ms=3.0, render_mode=None):
        super().__init__(render_mode)
        self._step_s, self._ledger = float(step_ms) / 1000, Ledger()

    def step(self, action):
        with self._ledger.step():
            time.sleep(self._step_s)
        return super().step(action)


def millisecond():
    """Make an environment of one's own whose step takes 1 ms."""
    return Sleeping(step_ms=1.0)


class Frames(_Even):
    """Four frames of 84 × 84, as Atari's; a step takes some microseconds."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
