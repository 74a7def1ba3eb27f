"""A robot's arm with two joints on a plane: Reacher."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_TWO = np.float32(2.0)
_PI = np.float32(math.pi)
_TURN = np.float32(2 * math.pi)

_LENGTH = np.float32(0.5)  # of each link (m); a mass of 1 kg is at its end
_INERTIA = _LENGTH * _LENGTH
_DAMPING = np.float32(0.1)  # torque for each rad/s
_TORQUE = np.float32(1.0)  # the most (N m)
_TAU = np.float32(0.025)  # seconds of a substep
_SUBSTEPS = 2
_MOST_SPEED = np.float32(10.0)  # rad/s
_EFFORT = np.float32(0.01)
_NEAR, _FAR = np.float32(0.2), np.float32(0.95)  # distances of targets from the shoulder (m)
_HIGH = np.array([1, 1, 1, 1, _MOST_SPEED, _MOST_SPEED, 1, 1, 2, 2], np.float32)


class Reacher(KernelEnv):
    """Reward -(distance of the hand from the target + 0.01 torque²) for each step of 0.05 s.

    Actions are the torques of shoulder and elbow. Observations are cosines and sines of both
    angles, their speeds, the target, and the way from the hand to the target. The plane is level:
    there is no gravity.
    """

    observation_space = gymnasium.spaces.Box(-_HIGH, _HIGH)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    max_episode_steps = 100
    state: Mapping[str, Field] = dict.fromkeys(
        ("shoulder", "elbow", "shoulder_dot", "elbow_dot", "target_x", "target_y"), np.float32
    )

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin at rest, at any angles, with a target anywhere within reach."""
        w.shoulder[e] = (uniform(w, e, 0) - _HALF) * _TURN
        w.elbow[e] = (uniform(w, e, 1) - _HALF) * _TURN
        w.shoulder_dot[e] = w.elbow_dot[e] = _ZERO
        distance = _NEAR + uniform(w, e, 2) * (_FAR - _NEAR)
        angle = (uniform(w, e, 3) - _HALF) * _TURN
        w.target_x[e] = distance * np.float32(math.cos(angle))
        w.target_y[e] = distance * np.float32(math.sin(angle))

    @staticmethod
    def step_env(w: Any, e: int) -> None:
        """Take two substeps of Euler's method, the speeds first."""
        torque0, torque1 = w.action[e, 0] * _TORQUE, w.action[e, 1] * _TORQUE
        q0, q1, v0, v1 = w.shoulder[e], w.elbow[e], w.shoulder_dot[e], w.elbow_dot[e]
        for _ in range(_SUBSTEPS):
            # M(q) a = torque - c(q, v) - damping v, of two point masses on massless links
            cos, sin = np.float32(math.cos(q1)), np.float32(math.sin(q1))
            bend = _INERTIA * sin
            m00 = _INERTIA * (np.float32(3.0) + _TWO * cos)
            m01 = _INERTIA * (np.float32(1.0) + cos)
            m11 = _INERTIA
            push0 = torque0 + bend * (_TWO * v0 * v1 + v1 * v1) - _DAMPING * v0
            push1 = torque1 - bend * v0 * v0 - _DAMPING * v1
            det = m00 * m11 - m01 * m01
            v0 += _TAU * (m11 * push0 - m01 * push1) / det
            v1 += _TAU * (m00 * push1 - m01 * push0) / det
            v0 = min(max(v0, -_MOST_SPEED), _MOST_SPEED)
            v1 = min(max(v1, -_MOST_SPEED), _MOST_SPEED)
            q0, q1 = q0 + _TAU * v0, q1 + _TAU * v1  # less than half a turn
            if q0 > _PI:
                q0 -= _TURN
            elif q0 < -_PI:
                q0 += _TURN
            if q1 > _PI:
                q1 -= _TURN
            elif q1 < -_PI:
                q1 += _TURN
        w.shoulder[e], w.elbow[e], w.shoulder_dot[e], w.elbow_dot[e] = q0, q1, v0, v1
        x = w.target_x[e] - _LENGTH * np.float32(math.cos(q0) + math.cos(q0 + q1))
        y = w.target_y[e] - _LENGTH * np.float32(math.sin(q0) + math.sin(q0 + q1))
        effort = torque0 * torque0 + torque1 * torque1
        w.reward[e] = -(np.float32(math.sqrt(x * x + y * y)) + _EFFORT * effort)

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state, with angles as cosine and sine, and the way to the target."""
        q0, q1 = w.shoulder[e], w.elbow[e]
        out[0] = math.cos(q0)
        out[1] = math.sin(q0)
        out[2] = math.cos(q1)
        out[3] = math.sin(q1)
        out[4] = w.shoulder_dot[e]
        out[5] = w.elbow_dot[e]
        out[6] = w.target_x[e]
        out[7] = w.target_y[e]
        out[8] = w.target_x[e] - _LENGTH * np.float32(math.cos(q0) + math.cos(q0 + q1))
        out[9] = w.target_y[e] - _LENGTH * np.float32(math.sin(q0) + math.sin(q0 + q1))
