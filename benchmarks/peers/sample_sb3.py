"""stable-baselines3's SubprocVecEnv alone: a process for each environment, all wait for all.

An environment whose episode ends is reset within the step. Processes are forked, which starts them
sooner than its default and changes nothing after that.
"""

import numpy as np
from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.peers import sampling


def main():
    args = sampling.parser(__doc__).parse_args()
    env = SubprocVecEnv([sampling.maker(args)] * args.num_envs, start_method="fork")
    rng = np.random.default_rng(0)
    env.reset()

    def step():
        env.step(rng.integers(0, env.action_space.n, args.num_envs))
        return args.num_envs

    sampling.sample(step, args.seconds)
    env.close()


if __name__ == "__main__":
    main()
