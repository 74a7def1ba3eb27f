"""Breakout as all contestants play it, as Gymnasium's wrappers and as ale-py's vector environment.

Both: frame skip 4 with the maximum of the last two frames, 84 × 84 gray, 4 frames stacked, up to 30
no-ops at the start, sticky actions (0.25, the default of `ALE/...-v5`), rewards clipped to their
sign, episodes of all lives, no FIRE pressed at the start.
"""

import ale_py
import gymnasium as gym
import numpy as np

REPEAT_ACTION_PROBABILITY = 0.25


def make_env():
    """One environment, observations `[4, 84, 84]`."""
    gym.register_envs(ale_py)
    env = gym.make(
        "ALE/Breakout-v5", frameskip=1, repeat_action_probability=REPEAT_ACTION_PROBABILITY
    )
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    env = gym.wrappers.TransformReward(env, np.sign)
    return gym.wrappers.FrameStackObservation(env, 4)


def make_vector(num_envs, num_threads):
    """The same, as a vector that steps in `num_threads` threads of C++."""
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        "breakout",
        num_envs,
        num_threads=num_threads,
        repeat_action_probability=REPEAT_ACTION_PROBABILITY,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        frameskip=4,
        noop_max=30,
        reward_clipping=True,
        use_fire_reset=False,
    )
