"""Headrace's own vector environment alone: Breakout with random actions, no policy.

It prints the same line as the peers' drivers do (`peers/step_ale.py` is its counterpart), and plays
the same Breakout (`peers/atari.py`).
"""

import argparse

import numpy as np

from benchmarks.peers.result import Stopwatch
from headrace import batch
from headrace.envs.api import VectorContext
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.vectors import make_vector

NUM_STEPS = 128


def step_headrace(num_envs: int, env_steps: int, threads: int, stopwatch: Stopwatch) -> None:
    """Step `num_envs` environments with random actions, `env_steps` in all, in `threads` threads.

    Calls `stopwatch.mark(steps so far)` after each step of the vector.
    """
    # As the peers: no FIRE at the start. Rewards are not clipped here, which costs ale-py nothing.
    maker = EnvMaker("ALE/Breakout-v5", {"use_fire_reset": False}, native=True)
    spec = env_spec(maker)
    vector = make_vector(
        maker, VectorContext(spec, np.arange(num_envs), seed=0, num_threads=threads)
    )
    fragment = batch.allocate(batch.columns(spec, {}, NUM_STEPS, num_envs))
    rng = np.random.default_rng(0)
    done = 0
    while done < env_steps:
        vector.bind(fragment)
        for t in range(NUM_STEPS):
            fragment.action.numpy()[t] = rng.integers(0, spec.action.nvec[0], num_envs)
            vector.step(t)
            done += num_envs
            stopwatch.mark(done)
            if done >= env_steps:
                break
        else:
            vector.finish()
    vector.close()


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
