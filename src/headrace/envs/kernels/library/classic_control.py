"""Gymnasium's classic control: CartPole, Acrobot, MountainCar (two forms) and Pendulum."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import Field, KernelEnv, uniform

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THREE = np.float32(3.0)
_PI = np.float32(math.pi)
_TURN = np.float32(2 * math.pi)
_STEP_COST = np.float32(-1.0)

_GRAVITY = np.float32(9.8)
_POLE = np.float32(0.1)
_TOTAL = np.float32(1.0) + _POLE
_LENGTH = np.float32(0.5)  # half of the pole
_POLE_LENGTH = _POLE * _LENGTH
_FORCE = np.float32(10.0)
_CARTPOLE_TAU = np.float32(0.02)  # seconds of a step
_FOUR_THIRDS = np.float32(4.0 / 3.0)
_MOST_THETA = np.float32(math.radians(12))
_MOST_X = np.float32(2.4)
_CARTPOLE_START = np.float32(0.1)
_CARTPOLE_HIGH = np.array([2 * _MOST_X, np.inf, 2 * _MOST_THETA, np.inf], np.float32)


class CartPole(KernelEnv):
    """Reward 1 for each step until the pole falls: CartPole-v1 (Barto, Sutton, Anderson 1983)."""

    observation_space = gymnasium.spaces.Box(-_CARTPOLE_HIGH, _CARTPOLE_HIGH)
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 500
    state: Mapping[str, Field] = dict.fromkeys(("x", "x_dot", "theta", "theta_dot"), np.float32)

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin near the middle, nearly upright."""
        w.x[e] = (uniform(w, e, 0) - _HALF) * _CARTPOLE_START
        w.x_dot[e] = (uniform(w, e, 1) - _HALF) * _CARTPOLE_START
        w.theta[e] = (uniform(w, e, 2) - _HALF) * _CARTPOLE_START
        w.theta_dot[e] = (uniform(w, e, 3) - _HALF) * _CARTPOLE_START

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
        w.x[e] += _CARTPOLE_TAU * w.x_dot[e]
        w.x_dot[e] += _CARTPOLE_TAU * x_acc
        w.theta[e] = theta + _CARTPOLE_TAU * theta_dot
        w.theta_dot[e] = theta_dot + _CARTPOLE_TAU * theta_acc
        w.reward[e] = _ONE
        w.terminated[e] = abs(w.x[e]) > _MOST_X or abs(w.theta[e]) > _MOST_THETA

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state."""
        out[0] = w.x[e]
        out[1] = w.x_dot[e]
        out[2] = w.theta[e]
        out[3] = w.theta_dot[e]


_INERTIA = np.float32(1.25)  # of a link about its joint: 1 + 1 * 0.5²
_INERTIA_BOTH = np.float32(3.5)  # of both links about the pivot, with the joint at a right angle
_WEIGHT = np.float32(4.9)  # torque of gravity on a level link, about its joint
_WEIGHT_BOTH = np.float32(14.7)  # on both about the pivot, without the outer link's about its joint
_ACROBOT_TAU = np.float32(0.2)  # seconds of a step
_HALF_TAU = np.float32(0.1)
_SIXTH_TAU = np.float32(0.2 / 6)
_MOST_THETA1_DOT = np.float32(4 * math.pi)
_MOST_THETA2_DOT = np.float32(9 * math.pi)
_ACROBOT_START = np.float32(0.2)
_ACROBOT_HIGH = np.array([1, 1, 1, 1, _MOST_THETA1_DOT, _MOST_THETA2_DOT], np.float32)


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
    """Reward -1 for each step, until the end is a link's length above the pivot: Acrobot-v1.

    The equations are those of Sutton and Barto's book, not the NIPS paper's (Sutton 1996). Each
    link is 1 m long, weighs 1 kg, and has its centre of mass in the middle and a moment of inertia
    of 1 kg m².
    """

    observation_space = gymnasium.spaces.Box(-_ACROBOT_HIGH, _ACROBOT_HIGH)
    action_space = gymnasium.spaces.Discrete(3)
    max_episode_steps = 500
    state: Mapping[str, Field] = dict.fromkeys(
        ("theta1", "theta2", "theta1_dot", "theta2_dot"), np.float32
    )

    @staticmethod
    def reset_env(w: Any, e: int) -> None:
        """Begin hanging down, nearly at rest."""
        w.theta1[e] = (uniform(w, e, 0) - _HALF) * _ACROBOT_START
        w.theta2[e] = (uniform(w, e, 1) - _HALF) * _ACROBOT_START
        w.theta1_dot[e] = (uniform(w, e, 2) - _HALF) * _ACROBOT_START
        w.theta2_dot[e] = (uniform(w, e, 3) - _HALF) * _ACROBOT_START

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
        z1, z2 = v1 + _ACROBOT_TAU * c1, v2 + _ACROBOT_TAU * c2
        d1, d2 = _accelerations(p1 + _ACROBOT_TAU * x1, p2 + _ACROBOT_TAU * x2, z1, z2, torque)
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
            w.reward[e] = _STEP_COST

    @staticmethod
    def observe(w: Any, e: int, out: Any) -> None:
        """Write the state, with angles as cosine and sine."""
        out[0] = math.cos(w.theta1[e])
        out[1] = math.sin(w.theta1[e])
        out[2] = math.cos(w.theta2[e])
        out[3] = math.sin(w.theta2[e])
        out[4] = w.theta1_dot[e]
        out[5] = w.theta2_dot[e]


_LEFT = np.float32(-1.2)
_RIGHT = np.float32(0.6)
_CAR_SPEED = np.float32(0.07)  # per step
_SLOPE = np.float32(0.0025)
_FIRST_START = np.float32(-0.6)
_STARTS = np.float32(0.2)
_ENGINE = np.float32(0.001)
_GOAL = np.float32(0.5)
_CONTINUOUS_ENGINE = np.float32(0.0015)
_CONTINUOUS_GOAL = np.float32(0.45)
_AT_GOAL = np.float32(100.0)
_EFFORT = np.float32(-0.1)


def _move(w: Any, e: int, push: Any) -> None:
    """Take one step; the engine adds `push` to the speed. The wall on the left stops the car."""
    slope = _SLOPE * np.float32(math.cos(_THREE * w.position[e]))
    velocity = min(max(w.velocity[e] + push - slope, -_CAR_SPEED), _CAR_SPEED)
    position = min(max(w.position[e] + velocity, _LEFT), _RIGHT)
    if position == _LEFT:
        velocity = max(velocity, _ZERO)
    w.position[e], w.velocity[e] = position, velocity


class _Valley(KernelEnv):
    """The valley of MountainCar-v0 and MountainCarContinuous-v0 (Moore 1990)."""

    observation_space = gymnasium.spaces.Box(
        np.array([_LEFT, -_CAR_SPEED], np.float32),
        np.array([_RIGHT, _CAR_SPEED], np.float32),
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
        w.reward[e] = _STEP_COST


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


_PENDULUM_TAU = np.float32(0.05)  # seconds of a step
_PULL = np.float32(15.0)  # 3/2 g/l, of a rod: g = 10 m/s², l = 1 m
_TWIST = np.float32(3.0)  # 3 / (m l²): m = 1 kg
_MOST_SPEED = np.float32(8.0)
_SPEED_COST = np.float32(0.1)
_TORQUE_COST = np.float32(0.001)
_PENDULUM_HIGH = np.array([1, 1, _MOST_SPEED], np.float32)


class Pendulum(KernelEnv):
    """Reward -(theta² + 0.1 theta_dot² + 0.001 torque²) for each step; theta 0 is upright.

    As Pendulum-v1, but the angle stays within [-pi, pi], while Gymnasium's grows with each turn: a
    float32 near 0 is more precise. Gravity is fixed at 10 m/s².
    """

    observation_space = gymnasium.spaces.Box(-_PENDULUM_HIGH, _PENDULUM_HIGH)
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
        theta_dot = min(max(theta_dot + _PENDULUM_TAU * acc, -_MOST_SPEED), _MOST_SPEED)
        theta += _PENDULUM_TAU * theta_dot  # less than half a turn
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
