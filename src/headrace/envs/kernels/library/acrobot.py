"""Swing the end of two links above their pivot: Gymnasium's Acrobot-v1 (Sutton 1996).

The equations are those of Sutton and Barto's book, not the NIPS paper's. Each link is 1 m long,
weighs 1 kg, and has its centre of mass in the middle and a moment of inertia of 1 kg m².
"""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_HALF = np.float32(0.5)
_PI = np.float32(math.pi)
_TURN = np.float32(2 * math.pi)
_INERTIA = np.float32(1.25)  # of a link about its joint: 1 + 1 * 0.5²
_INERTIA_BOTH = np.float32(3.5)  # of both links about the pivot, with the joint at a right angle
_WEIGHT = np.float32(4.9)  # torque of gravity on a level link, about its joint
_WEIGHT_BOTH = np.float32(14.7)  # on both about the pivot, without the outer link's about its joint
_TAU = np.float32(0.2)  # seconds of a step
_HALF_TAU = np.float32(0.1)
_SIXTH_TAU = np.float32(0.2 / 6)
_MOST_THETA1_DOT = np.float32(4 * math.pi)
_MOST_THETA2_DOT = np.float32(9 * math.pi)
_START = np.float32(0.2)
_REWARD = np.float32(-1.0)
_HIGH = np.array([1, 1, 1, 1, _MOST_THETA1_DOT, _MOST_THETA2_DOT], np.float32)


def _accelerations(theta1: Any, theta2: Any, theta1_dot: Any, theta2_dot: Any, torque: Any) -> Any:
    """Return the accelerations of the first link and of the joint, in rad/s²."""
    sin1 = np.float32(math.sin(theta1))
    sin2, cos2 = np.float32(math.sin(theta2)), np.float32(math.cos(theta2))
    inertia1, inertia2 = _INERTIA_BOTH + cos2, _INERTIA + _HALF * cos2
    pull2 = _WEIGHT * np.float32(math.sin(theta1 + theta2))
    pull1 = pull2 + _WEIGHT_BOTH * sin1 - (_HALF * theta2_dot + theta1_dot) * theta2_dot * sin2
    ratio = inertia2 / inertia1
    acc2 = (torque + ratio * pull1 - _HALF * theta1_dot * theta1_dot * sin2 - pull2) / (
        _INERTIA - ratio * inertia2
    )
    return -(inertia2 * acc2 + pull1) / inertia1, acc2


def _wrap(theta: Any) -> Any:
    """Return the same angle within [-pi, pi]."""
    while theta > _PI:
        theta -= _TURN
    while theta < -_PI:
        theta += _TURN
    return theta


class Acrobot(KernelEnv):
    """Reward -1 for each step, until the end is a link's length above the pivot."""

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH)
    action_space = gymnasium.spaces.Discrete(3)
    max_episode_steps = 500
    state: Mapping[str, Field] = dict.fromkeys(
        ("theta1", "theta2", "theta1_dot", "theta2_dot"), np.float32
    )

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin hanging down, nearly at rest."""
        w.theta1[e] = (uniform(w, e, 0) - _HALF) * _START
        w.theta2[e] = (uniform(w, e, 1) - _HALF) * _START
        w.theta1_dot[e] = (uniform(w, e, 2) - _HALF) * _START
        w.theta2_dot[e] = (uniform(w, e, 3) - _HALF) * _START

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take one step of the fourth-order Runge-Kutta method."""
        torque = np.float32(w.action[e] - 1)
        p1, p2, v1, v2 = w.theta1[e], w.theta2[e], w.theta1_dot[e], w.theta2_dot[e]
        a1, a2 = _accelerations(p1, p2, v1, v2, torque)
        # Three more evaluations: speeds u, x, z and accelerations b, c, d
        u1, u2 = v1 + _HALF_TAU * a1, v2 + _HALF_TAU * a2
        b1, b2 = _accelerations(p1 + _HALF_TAU * v1, p2 + _HALF_TAU * v2, u1, u2, torque)
        x1, x2 = v1 + _HALF_TAU * b1, v2 + _HALF_TAU * b2
        c1, c2 = _accelerations(p1 + _HALF_TAU * u1, p2 + _HALF_TAU * u2, x1, x2, torque)
        z1, z2 = v1 + _TAU * c1, v2 + _TAU * c2
        d1, d2 = _accelerations(p1 + _TAU * x1, p2 + _TAU * x2, z1, z2, torque)
        theta1 = _wrap(p1 + _SIXTH_TAU * (v1 + _TWO * (u1 + x1) + z1))
        theta2 = _wrap(p2 + _SIXTH_TAU * (v2 + _TWO * (u2 + x2) + z2))
        theta1_dot = v1 + _SIXTH_TAU * (a1 + _TWO * (b1 + c1) + d1)
        theta2_dot = v2 + _SIXTH_TAU * (a2 + _TWO * (b2 + c2) + d2)
        w.theta1[e], w.theta2[e] = theta1, theta2
        w.theta1_dot[e] = min(max(theta1_dot, -_MOST_THETA1_DOT), _MOST_THETA1_DOT)
        w.theta2_dot[e] = min(max(theta2_dot, -_MOST_THETA2_DOT), _MOST_THETA2_DOT)
        height = -np.float32(math.cos(theta1)) - np.float32(math.cos(theta1 + theta2))
        w.terminated[e] = height > _ONE
        if not w.terminated[e]:
            w.reward[e] = _REWARD

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state, with angles as cosine and sine."""
        out[0] = math.cos(w.theta1[e])
        out[1] = math.sin(w.theta1[e])
        out[2] = math.cos(w.theta2[e])
        out[3] = math.sin(w.theta2[e])
        out[4] = w.theta1_dot[e]
        out[5] = w.theta2_dot[e]
