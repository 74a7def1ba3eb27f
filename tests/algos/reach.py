"""A small environment with continuous actions, which both terminates and is cut off."""

import gymnasium as gym
import numpy as np


class Reach(gym.Env):
    """A point on a plane moves by the action. Far from the origin the episode terminates."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(np.float32([-0.5, -1.0]), np.float32([1.5, 1.0]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self._steps = 0
        return self._at.copy(), {}

    def step(self, action):
        self._at += 0.4 * np.asarray(action, np.float32)
        self._steps += 1
        distance = float(np.linalg.norm(self._at))
        return self._at.copy(), -distance, distance > 2.5, self._steps >= 12, {}
