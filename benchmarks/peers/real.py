"""Two real environments whose time is uneven: traffic, and mazes that take long to be made.

Both compute, and do not sleep, so that they can keep no more than the machine's cores busy. Both
give flat float32 vectors, and write down the time that they took (`busy.py`). On one core here,
with random actions:

- `highway`: highway-env's `highway-fast-v0` with 8 vehicles, of which each looks at the others; a
  step takes 9 to 17 ms (mean 14), and less as vehicles crash or fall behind; a reset 8 ms.
- `minigrid`: MiniGrid's MultiRoom with 12 rooms of up to 9 cells, which are thrown until they fit:
  a reset takes 2 to 220 ms (mean 48), as long as the 240 steps of 0.2 ms of its episode.
"""

import gymnasium as gym
import numpy as np

from benchmarks.peers.busy import Measured

VEHICLES = 8
ROOMS, ROOM_SIZE = 12, 9


def highway(render_mode=None):
    """Observations: `[25]`, of 5 vehicles each presence, place and velocity; 5 actions."""
    import highway_env

    gym.register_envs(highway_env)
    config = {"vehicles_count": VEHICLES}
    env = gym.make("highway-fast-v0", config=config, render_mode=render_mode)
    return Measured(_flat(env))


def minigrid(render_mode=None):
    """Observations: `[147]`, 7 × 7 cells in view with 3 numbers each; 7 actions."""
    from minigrid.envs import MultiRoomEnv
    from minigrid.wrappers import ImgObsWrapper

    env = MultiRoomEnv(ROOMS, ROOMS, maxRoomSize=ROOM_SIZE, render_mode=render_mode)
    return Measured(_flat(ImgObsWrapper(env)))


def _flat(env):
    return gym.wrappers.DtypeObservation(gym.wrappers.FlattenObservation(env), np.float32)
