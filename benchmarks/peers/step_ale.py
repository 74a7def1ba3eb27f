"""ale-py's vector environment alone: Breakout with random actions, no policy."""

import argparse

import numpy as np

from benchmarks.peers.atari import make_vector
from benchmarks.peers.result import Stopwatch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", help="of the environments (0, 1, ...)")
    args = parser.parse_args()
    env = make_vector(args.num_envs, args.threads)
    rng = np.random.default_rng(0)
    env.reset(seed=np.array(args.seeds or range(args.num_envs)))
    stopwatch = Stopwatch()
    for env_steps in range(args.num_envs, args.env_steps + args.num_envs, args.num_envs):
        env.step(rng.integers(0, env.single_action_space.n, args.num_envs))
        stopwatch.mark(env_steps)
    stopwatch.print_result()
    env.close()


if __name__ == "__main__":
    main()
