"""An environment in Gymnasium's form: heat a room to 20 °C, whatever the weather.

    headrace train thermostat:Thermostat       # in this folder

docs/migrate/ trains on it with other libraries as well, so it imports nothing of Headrace. All
episodes are cut off by their time limit.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
GOAL, EPISODE_STEPS = 20.0, 50


class Thermostat(gym.Env[Floats, Any]):
    """The reward of a step is minus the distance from 20 °C, in tens of degrees."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)  # heater off, half, full

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        self._outside = self.np_random.uniform(-5.0, 15.0)
        self._inside = self.np_random.uniform(5.0, 30.0)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Floats, float, bool, bool, dict[str, Any]]:
        self._inside += 0.1 * (self._outside - self._inside) + 2.0 * int(action)
        self._steps += 1
        reward = -abs(self._inside - GOAL) / 10
        return self._observe(), reward, False, self._steps == EPISODE_STEPS, {}

    def _observe(self) -> Floats:
        degrees = np.array([self._inside - GOAL, self._outside - GOAL], np.float32)
        return degrees / np.float32(10)
