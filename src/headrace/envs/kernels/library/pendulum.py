"""Swing a pendulum up with too weak a motor, and hold it there: Gymnasium's Pendulum-v1.

The angle stays within [-pi, pi], while Gymnasium's grows with each turn. Nothing depends on the
turns, and a float32 near 0 is more precise. Gravity is fixed at 10 m/s².
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_PI = np.float32(math.pi)
_TURN = np.float32(2 * math.pi)
_TAU = np.float32(0.05)  # seconds of a step
_PULL = np.float32(15.0)  # 3/2 g/l, of a rod: g = 10 m/s², l = 1 m
_TWIST = np.float32(3.0)  # 3 / (m l²): m = 1 kg
_MOST_SPEED = np.float32(8.0)
_SPEED_COST = np.float32(0.1)
_TORQUE_COST = np.float32(0.001)
_HALF = np.float32(0.5)
_TWO = np.float32(2.0)
_HIGH = np.array([1, 1, _MOST_SPEED], np.float32)


class Pendulum(KernelEnv):
    """Reward -(theta² + 0.1 theta_dot² + 0.001 torque²) for each step; theta 0 is upright."""

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH)
    action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)
    max_episode_steps = 200
    state: Mapping[str, Field] = dict.fromkeys(("theta", "theta_dot"), np.float32)

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin at any angle, with up to 1 rad/s."""
        w.theta[e] = (uniform(w, e, 0) - _HALF) * _TURN
        w.theta_dot[e] = (uniform(w, e, 1) - _HALF) * _TWO

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take one step of Euler's method, the speed first, as in Gymnasium."""
        theta, theta_dot, torque = w.theta[e], w.theta_dot[e], w.action[e, 0]
        w.reward[e] = -(
            theta * theta + _SPEED_COST * theta_dot * theta_dot + _TORQUE_COST * torque * torque
        )
        acc = _PULL * np.float32(math.sin(theta)) + _TWIST * torque
        theta_dot = min(max(theta_dot + _TAU * acc, -_MOST_SPEED), _MOST_SPEED)
        theta += _TAU * theta_dot  # less than half a turn
        if theta > _PI:
            theta -= _TURN
        elif theta < -_PI:
            theta += _TURN
        w.theta[e], w.theta_dot[e] = theta, theta_dot

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state, with the angle as cosine and sine."""
        out[0] = math.cos(w.theta[e])
        out[1] = math.sin(w.theta[e])
        out[2] = w.theta_dot[e]
