"""CartPole that shows only where cart and pole are, not how fast they move: a task for memory.

    headrace train examples.cartpole_without_velocities:make --core lstm --normalize-obs

A network that sees one observation at a time cannot tell a pole that falls from one that rises.
"""

import gymnasium as gym
import numpy as np


class WithoutVelocities(gym.ObservationWrapper):
    """Drops components 1 and 3 of the observation: the velocities of cart and pole."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        whole = env.observation_space
        assert isinstance(whole, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(whole.low[::2], whole.high[::2], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """What is left of it."""
        return observation[::2]


def make() -> gym.Env:
    """One environment."""
    return WithoutVelocities(gym.make("CartPole-v1"))
