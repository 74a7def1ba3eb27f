"""Gymnasium's AsyncVectorEnv alone: a process for each environment, all wait for all.

An environment whose episode ends is reset within the step, so that each step of the vector is an
env step of every environment.
"""

import gymnasium as gym
import numpy as np

from benchmarks.peers import sampling


def main():
    args = sampling.parser(__doc__).parse_args()
    env = gym.vector.AsyncVectorEnv(
        [sampling.maker(args)] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    rng = np.random.default_rng(0)
    env.reset()

    def step():
        env.step(rng.integers(0, env.single_action_space.n, args.num_envs))
        return args.num_envs

    sampling.sample(step, args.seconds)
    env.close()


if __name__ == "__main__":
    main()
