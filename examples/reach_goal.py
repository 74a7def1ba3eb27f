"""A goal environment: its observations hold a goal, and what is achieved of it.

A point moves on a plane, and the reward is 0 within 0.05 of the goal, else -1. At random it hardly
ever gets there. Headrace learns from such environments by hindsight: it replaces the goals of
stored transitions by places that were reached later, and asks `compute_reward` for the rewards.

    headrace train examples.reach_goal:ReachGoal --algo sac --total-env-steps 10000
"""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Observation = dict[str, Any]


class ReachGoal(gym.Env[Observation, Floats]):
    """Reach a goal on a plane, in 50 steps."""

    def __init__(self) -> None:
        place = gym.spaces.Box(-2, 2, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(
            {"observation": place, "achieved_goal": place, "desired_goal": place}
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Floats) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._place = np.clip(self._place + 0.1 * action, -2, 2).astype(np.float32)
        self._steps += 1
        reward = float(self.compute_reward(self._place, self._goal, {}))
        return self._observe(), reward, False, self._steps == 50, {}

    def compute_reward(self, achieved_goal: Floats, desired_goal: Floats, info: Any) -> Floats:
        """Rewards of places `[..., 2]` that are reached, for goals `[..., 2]`."""
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return np.asarray(distance > 0.05, np.float32) * -1

    def _observe(self) -> Observation:
        place = self._place.copy()
        return {"observation": place, "achieved_goal": place, "desired_goal": self._goal}
