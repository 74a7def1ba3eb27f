"""Drive out of a valley with too weak an engine: MountainCar-v0 and MountainCarContinuous-v0.

Both are Gymnasium's (Moore 1990): the same valley, with different engines, goals and rewards. The
car may reach the goal at any speed.
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_LEFT = np.float32(-1.2)
_RIGHT = np.float32(0.6)
_MOST_SPEED = np.float32(0.07)  # per step
_GRAVITY = np.float32(0.0025)
_THREE = np.float32(3.0)
_ZERO = np.float32(0.0)
_FIRST_START = np.float32(-0.6)
_STARTS = np.float32(0.2)
_ENGINE = np.float32(0.001)
_GOAL = np.float32(0.5)
_REWARD = np.float32(-1.0)
_CONTINUOUS_ENGINE = np.float32(0.0015)
_CONTINUOUS_GOAL = np.float32(0.45)
_AT_GOAL = np.float32(100.0)
_EFFORT = np.float32(-0.1)


def _move(w: Any, e: int, push: Any) -> None:
    """Take one step; the engine adds `push` to the speed. The wall on the left stops the car."""
    slope = _GRAVITY * np.float32(math.cos(_THREE * w.position[e]))
    velocity = min(max(w.velocity[e] + push - slope, -_MOST_SPEED), _MOST_SPEED)
    position = min(max(w.position[e] + velocity, _LEFT), _RIGHT)
    if position == _LEFT:
        velocity = max(velocity, _ZERO)
    w.position[e], w.velocity[e] = position, velocity


class _Valley(KernelEnv):
    """The common part of both environments."""

    observation_space = gymnasium.spaces.Box(
        np.array([_LEFT, -_MOST_SPEED], np.float32), np.array([_RIGHT, _MOST_SPEED], np.float32)
    )
    state: Mapping[str, Field] = dict.fromkeys(("position", "velocity"), np.float32)

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin at rest, near the bottom."""
        w.position[e] = _FIRST_START + uniform(w, e, 0) * _STARTS
        w.velocity[e] = _ZERO

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state."""
        out[0] = w.position[e]
        out[1] = w.velocity[e]


class MountainCar(_Valley):
    """Actions left, none, right. Reward -1 for each step until the top of the right hill."""

    action_space = gymnasium.spaces.Discrete(3)
    max_episode_steps = 200

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take one step."""
        _move(w, e, np.float32(w.action[e] - 1) * _ENGINE)
        w.terminated[e] = w.position[e] >= _GOAL and w.velocity[e] >= _ZERO
        w.reward[e] = _REWARD


class MountainCarContinuous(_Valley):
    """Reward 100 at the top of the right hill, less 0.1 action² for each step."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    max_episode_steps = 999

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take one step."""
        throttle = w.action[e, 0]
        _move(w, e, throttle * _CONTINUOUS_ENGINE)
        w.terminated[e] = w.position[e] >= _CONTINUOUS_GOAL and w.velocity[e] >= _ZERO
        reached = _AT_GOAL if w.terminated[e] else _ZERO
        w.reward[e] = reached + _EFFORT * throttle * throttle
