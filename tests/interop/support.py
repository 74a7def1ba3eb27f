"""Environments of any spaces, in which the models are trained that tests import."""

import gymnasium as gym
import numpy as np


class Spaces(gym.Env):
    """Episodes of 8 steps with random observations and rewards."""

    def __init__(self, observation, action):
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.np_random.normal())
        return self.observation_space.sample(), reward, False, self.t == 8, {}


def box(*shape, low=-3.0, high=5.0, dtype=np.float32):
    return gym.spaces.Box(low, high, shape, dtype)


def steering():
    """Continuous actions whose bounds are neither -1 to 1 nor symmetric."""
    bounds = np.array([-2.0, 0.0]), np.array([1.0, 3.0])
    return Spaces(box(5), gym.spaces.Box(*(each.astype(np.float32) for each in bounds)))


def wide_steering():
    """The same sizes as `steering`, and other bounds."""
    bounds = np.array([-4.0, 0.0]), np.array([2.0, 6.0])
    return Spaces(box(5), gym.spaces.Box(*(each.astype(np.float32) for each in bounds)))


def other_gears():
    """As many choices in all as `gears`, shared out otherwise."""
    return Spaces(box(4), gym.spaces.MultiDiscrete([4, 3, 2]))


def gears():
    return Spaces(box(4), gym.spaces.MultiDiscrete([3, 2, 4]))


def as_many_logits():
    """Another action space than that of `gears`, of as many logits."""
    return Spaces(box(4), gym.spaces.Discrete(9))


def pictures():
    return Spaces(box(36, 36, 3, low=0, high=255, dtype=np.uint8), gym.spaces.Discrete(4))


def goals():
    """A Dict of vectors, whose keys are not in the order of the alphabet."""
    parts = {"observation": box(4), "achieved_goal": box(2), "desired_goal": box(2)}
    return Spaces(gym.spaces.Dict(parts), box(2, low=-0.5, high=0.5))


def other_goals():
    """The keys of `goals`, and as many numbers in all."""
    parts = {"observation": box(2), "achieved_goal": box(2), "desired_goal": box(4)}
    return Spaces(gym.spaces.Dict(parts), box(2, low=-0.5, high=0.5))


def rooms():
    """Choices as observations."""
    return Spaces(gym.spaces.Discrete(6), gym.spaces.Discrete(3))


class _Locked(Spaces):
    """`rooms`, whose `info` says which door is open; to take another one is an error."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs, info | self._mask()

    def step(self, action):
        assert action == self.t % 3, "that door is locked"
        obs, *rest, info = super().step(action)
        return obs, *rest, info | self._mask()

    def _mask(self):
        return {"action_mask": np.arange(3) == self.t % 3}


def locked_rooms():
    """Choices of which one at a time is allowed."""
    return _Locked(gym.spaces.Discrete(6), gym.spaces.Discrete(3))
