"""Balance a pole on a cart: Gymnasium's CartPole-v1 (Barto, Sutton, Anderson 1983)."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_GRAVITY = np.float32(9.8)
_CART = np.float32(1.0)
_POLE = np.float32(0.1)
_TOTAL = _CART + _POLE
_LENGTH = np.float32(0.5)  # half of the pole
_POLE_LENGTH = _POLE * _LENGTH
_FORCE = np.float32(10.0)
_TAU = np.float32(0.02)  # seconds of a step
_FOUR_THIRDS = np.float32(4.0 / 3.0)
_MOST_THETA = np.float32(math.radians(12))
_MOST_X = np.float32(2.4)
_ONE = np.float32(1.0)
_START = np.float32(0.1)
_HALF = np.float32(0.5)
_HIGH = np.array([2 * _MOST_X, np.inf, 2 * _MOST_THETA, np.inf], np.float32)


class CartPole(KernelEnv):
    """Reward 1 for each step until the pole falls."""

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH)
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 500
    state: Mapping[str, Field] = dict.fromkeys(("x", "x_dot", "theta", "theta_dot"), np.float32)

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin near the middle, nearly upright."""
        w.x[e] = (uniform(w, e, 0) - _HALF) * _START
        w.x_dot[e] = (uniform(w, e, 1) - _HALF) * _START
        w.theta[e] = (uniform(w, e, 2) - _HALF) * _START
        w.theta_dot[e] = (uniform(w, e, 3) - _HALF) * _START

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take one step of Euler's method, as in Gymnasium."""
        force = _FORCE if w.action[e] == 1 else -_FORCE
        theta, theta_dot = w.theta[e], w.theta_dot[e]
        cos, sin = np.float32(math.cos(theta)), np.float32(math.sin(theta))
        push = (force + _POLE_LENGTH * theta_dot * theta_dot * sin) / _TOTAL
        theta_acc = (_GRAVITY * sin - cos * push) / (
            _LENGTH * (_FOUR_THIRDS - _POLE * cos * cos / _TOTAL)
        )
        x_acc = push - _POLE_LENGTH * theta_acc * cos / _TOTAL
        w.x[e] += _TAU * w.x_dot[e]
        w.x_dot[e] += _TAU * x_acc
        w.theta[e] = theta + _TAU * theta_dot
        w.theta_dot[e] = theta_dot + _TAU * theta_acc
        w.reward[e] = _ONE
        w.terminated[e] = abs(w.x[e]) > _MOST_X or abs(w.theta[e]) > _MOST_THETA

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state."""
        out[0] = w.x[e]
        out[1] = w.x_dot[e]
        out[2] = w.theta[e]
        out[3] = w.theta_dot[e]
