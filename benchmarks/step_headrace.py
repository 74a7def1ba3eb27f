"""Headrace's own vector environment alone: Breakout with random actions, no policy.

It prints the same line as the peers' drivers do (`peers/step_ale.py` is its counterpart), and plays
the same Breakout (`peers/atari.py`).
"""

import argparse

from benchmarks.peers.result import Stopwatch


def step_headrace(num_envs: int, env_steps: int, threads: int, stopwatch: Stopwatch) -> None:
    """Step `num_envs` environments with random actions, `env_steps` in all, in `threads` threads.

    Calls `stopwatch.mark(steps so far)` after each step of the vector.
    """
    raise NotImplementedError("Headrace has no native vector of Atari environments yet.")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    stopwatch = Stopwatch()
    step_headrace(args.num_envs, args.env_steps, args.threads, stopwatch)
    stopwatch.print_result()


if __name__ == "__main__":
    main()
