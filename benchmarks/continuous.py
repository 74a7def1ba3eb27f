"""Env steps per second of SAC and TD3 on HalfCheetah-v5, one gradient step per env step.

The same for all: `peers/continuous_works.py`; all cores do math. Each contestant alternates 8 steps
of each of 8 environments with the gradient steps that are due. Rates go from the end of the first
block of gradient steps to that of the last; Headrace's begins one batch earlier, and so has the
first block as well.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work
from benchmarks.limits import continuous_limit
from benchmarks.peers.continuous_works import headrace_flags

ENV_STEPS = 4_096
TITLES = {"sac": "SAC, HalfCheetah-v5", "td3": "TD3, HalfCheetah-v5"}


def comparison(algo):
    """Build the table of one algorithm."""
    threads = cores()
    sizes = ["--algo", algo, "--env-steps", str(ENV_STEPS), "--threads", str(threads)]
    flags = [*headrace_flags(algo, ENV_STEPS), "--learner-threads", str(threads)]
    peers = [
        contestants.driver(f"plain {algo.upper()}", "sb3", "plain_continuous", sizes, threads),
        contestants.driver(
            "Stable-Baselines3", "sb3", "sb3_continuous", sizes, threads, "stable-baselines3"
        ),
    ]
    return turns.Comparison(
        TITLES[algo],
        [contestants.headrace("Headrace", flags, threads), *peers, continuous_limit(algo)],
        Work(ENV_STEPS),
        also={"gradient steps": lambda result: result.get("learner_steps")},
        ratios={f"Headrace / {each.name}": ("Headrace", each.name) for each in peers},
    )


if __name__ == "__main__":
    sys.exit(turns.run("continuous", __doc__, [comparison(algo) for algo in TITLES], turns=3))
