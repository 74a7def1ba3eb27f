"""Env steps per second of PPO training on CartPole-v1; and the seconds until it is solved.

The same for all: Gymnasium's Python CartPole, 64 environments × 128 steps, 4 epochs of 4
minibatches, 2 × 64 tanh with separate actor and critic, Adam with lr 2.5e-4, entropy 0.01, gamma
0.99, lambda 0.95, in two cores at most. The rate is that from the end of the first update to the
end of the last, so start-up is left out.

What differs: the number of processes, and of threads of math; where two cores are free, two may
serve. "1 core" is held to one by the kernel. Two learners have 32 environments each, and one batch.
Sample Factory learns while it samples (APPO), each worker has two halves of its environments in
turns, and it runs with the older Gymnasium that it asks for. Headrace's minibatches take equally
many steps of every environment, the others' are drawn from the whole batch. Headrace logs every
update, and the plain PPO keeps returns and no more. Headrace acts by NumPy and has PPO's gradient
written out; once it does all by torch ("plain arithmetic"), to show what that gives.

To solve it (a mean return of 475 over the last 100 training episodes) each has settings of its own
choice: Headrace its preset for CartPole-v1, Stable-Baselines3 those of `peers/sb3_solve.py`. The
time is the process's, from its start to its end, measured from outside: imports are part of it, and
so is the checkpoint that Headrace saves at the end. A turn is a seed (0, 1, 2).
"""

import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.limits import training_limit
from benchmarks.peers.works import SETTINGS

ENV_STEPS = 400_000
NUM_ENVS = SETTINGS["cartpole"].num_envs
FLAGS = SETTINGS["cartpole"].headrace_flags(ENV_STEPS)
TWO_THREADS = ("--learner-threads", "2")
WORKERS = ("--envs-per-vector", str(NUM_ENVS // 2), "--num-workers", "2")
LEARNERS = ("--envs-per-vector", str(NUM_ENVS // 2), "--num-learners", "2")
INLINE = ("--envs-per-vector", str(NUM_ENVS))
SOLVED_AT = 475


def headrace(name, *flags, threads=1, **more):
    return contestants.headrace(name, [*FLAGS, *flags], threads, **more)


def one_process(name, threads, *driver):
    """A peer that does all in one process."""
    sizes = ["--work", "cartpole", "--env-steps", str(ENV_STEPS), "--threads", str(threads)]
    venv, module, *package = driver
    return contestants.driver(name, venv, module, sizes, threads, *package)


def training():
    sample_factory = ["--num-workers", "2", "--env-steps", str(ENV_STEPS)]
    sample_factory += ["--train-dir", f"{contestants.SCRATCH}/train"]
    return turns.Comparison(
        "PPO training, CartPole-v1",
        [
            headrace("Headrace, 2 learners", *LEARNERS),
            headrace("Headrace, 1 core", *INLINE, cores=1),
            headrace("Headrace, inline", *INLINE),
            headrace("Headrace, 2 workers", *WORKERS),
            headrace("Headrace, 2 workers, 2 threads", *WORKERS, *TWO_THREADS, threads=2),
            headrace("Headrace, 2 workers, plain arithmetic", *WORKERS, "--arithmetic", "plain"),
            one_process("plain PPO", 1, "base", "plain_ppo"),
            one_process("plain PPO, 2 threads", 2, "base", "plain_ppo"),
            one_process("Stable-Baselines3", 1, "sb3", "sb3_bench", "stable-baselines3"),
            one_process("Stable-Baselines3, 2 threads", 2, "sb3", "sb3_bench", "stable-baselines3"),
            contestants.driver(
                "Sample Factory, 2 workers", "sf", "sf_bench", sample_factory,
                package="sample-factory",
            ),
            training_limit("cartpole"),
        ],
        Work(ENV_STEPS),
        ratios={"two cores / one core": ("Headrace, 2 learners", "Headrace, 1 core")},
    )  # fmt: skip


def solving():
    seed = ["--seed", contestants.TURN]
    flags = ["CartPole-v1", "--stop-at-return", str(SOLVED_AT), *seed]
    wanted = ["CartPole-v1", "--mean-return", str(SOLVED_AT), *seed]
    return turns.Comparison(
        "CartPole-v1, from the start of the process until it is solved",
        [
            contestants.headrace("Headrace, its preset", flags),
            contestants.driver(
                "Stable-Baselines3, tuned", "sb3", "sb3_solve", wanted, package="stable-baselines3"
            ),
        ],
        Work(None, "turn_s", "s", lower_is_better=True, least_return=SOLVED_AT),
        also={"env steps": lambda result: result["env_steps"]},
        turns=3,
    )


if __name__ == "__main__":
    sys.exit(turns.run("cartpole", __doc__, [training(), solving()], turns=5))
