"""An environment whose steps need the only core of their machine: they take turns, and sleep.

So machines that are made of processes on one real machine are as fast as machines of their own, and
workers that have to share a machine are slower. The sleep is the workload here, and waits for
nothing.
"""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

EPISODE_STEPS = 200


class OneCore(gym.Env):
    """Four zeros, two actions, no reward; 200 steps an episode.

    Args:
        step_ms: of the core, for each step.
    """

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, step_ms=5.0, render_mode=None):
        self.render_mode, self._step_s, self._steps = render_mode, step_ms / 1000, 0
        # Ray tells each process of a machine which daemon has started it.
        machine = os.environ.get("RAY_RAYLET_PID", "none")
        self._core = os.open(Path(tempfile.gettempdir(), f"headrace-core-{machine}"), os.O_CREAT)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._steps += 1
        fcntl.flock(self._core, fcntl.LOCK_EX)
        time.sleep(self._step_s)
        fcntl.flock(self._core, fcntl.LOCK_UN)
        return np.zeros(4, np.float32), 0.0, False, self._steps >= EPISODE_STEPS, {}

    def close(self):
        os.close(self._core)
