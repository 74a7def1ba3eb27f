"""Env steps per second of PPO training on HalfCheetah-v5: numbers as actions, a dear environment.

The same for all: 8 environments × 512 steps, 10 epochs of 8 minibatches of 512, 2 × 64 tanh with
separate actor and critic and a deviation that is learned, Adam with lr 3e-4, no entropy bonus,
gamma 0.99, lambda 0.95, nothing normalized but advantages; one thread of math in each process. The
rate is that from the end of the first update to the end of the last.

What differs: the number of processes. Stable-Baselines3 steps all environments in its own process,
or each in one of its own; the plain PPO steps them in its own, and takes the time limit for an end.
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.limits import training_limit
from benchmarks.peers.works import SETTINGS

ENV_STEPS = 10 * SETTINGS["cheetah"].batch
FLAGS = SETTINGS["cheetah"].headrace_flags(ENV_STEPS)
WORKERS = ("--envs-per-vector", "4", "--num-workers", "2")


def headrace(name, *flags):
    return contestants.headrace(name, [*FLAGS, *flags])


def training():
    sizes = ["--work", "cheetah", "--env-steps", str(ENV_STEPS), "--threads", "1"]
    sb3 = ("sb3", "sb3_bench")
    return turns.Comparison(
        "PPO training, HalfCheetah-v5",
        [
            headrace("Headrace, inline", "--envs-per-vector", "8"),
            headrace("Headrace, 2 workers", *WORKERS),
            headrace("Headrace, 2 learners", "--envs-per-vector", "4", "--num-learners", "2"),
            contestants.driver("plain PPO", "base", "plain_ppo", sizes),
            contestants.driver("Stable-Baselines3", *sb3, sizes, package="stable-baselines3"),
            contestants.driver(
                "Stable-Baselines3, 8 processes", *sb3, [*sizes, "--subproc"],
                package="stable-baselines3",
            ),
            training_limit("cheetah"),
        ],
        Work(ENV_STEPS),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(turns.run("cheetah", __doc__, [training()], turns=5))
