"""CartPole without velocities: the policy needs a memory.

    headrace train examples.cartpole_without_velocities:make --core lstm --normalize-obs

One observation does not show whether the pole falls or rises; a recurrent network remembers.
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
        """Return the positions only."""
        return observation[::2]


def make() -> gym.Env:
    """Make one environment."""
    return WithoutVelocities(gym.make("CartPole-v1"))
