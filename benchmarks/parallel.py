"""Many environments at a time, with replay: seconds until TD3 and SAC reach what PPO reaches.

The environments are kernels, on this machine's CPU; each algorithm has the settings of its preset.
TD3 and SAC take few gradient steps for each env step, in the manner of FastTD3 (Seo et al. 2025,
arXiv:2505.22642), whose batches of tens of thousands of rows take a GPU (`gpu.py`). The time is the
process's, from its start, imports included, until the mean return of the last 100 training episodes
is reached. A turn is a seed (0, 1, 2).
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work

RETURNS = {"headrace/Pendulum-v1": -170, "headrace/Reacher-v0": -30}
"""What is to be reached: near what PPO's preset ends with."""
ALGORITHMS = ("ppo", "td3", "sac")


def title(env):
    """The title of an environment's table."""
    return f"{env}, from the start of the process until the return is {RETURNS[env]}"


def comparison(env):
    """Build the table of one environment."""
    wanted = RETURNS[env]
    flags = [env, "--device", "cpu", "--stop-at-return", str(wanted), "--seed", contestants.TURN]
    return turns.Comparison(
        title(env),
        [
            contestants.headrace(algo.upper(), [*flags, "--algo", algo], cores())
            for algo in ALGORITHMS
        ],
        Work(None, "turn_s", "s", lower_is_better=True, least_return=wanted),
        also={
            "env steps": lambda result: result["env_steps"],
            "gradient steps": lambda result: result["learner_steps"],
        },
    )


if __name__ == "__main__":
    sys.exit(turns.run("parallel", __doc__, [comparison(env) for env in RETURNS], turns=3))
