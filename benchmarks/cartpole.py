"""Env steps per second of PPO training on CartPole-v1, from one process or two workers.

The same for all: Gymnasium's Python CartPole, 64 environments × 128 steps, 4 epochs of 4
minibatches, 2 × 64 tanh with separate actor and critic, Adam with lr 2.5e-4, entropy 0.01, gamma
0.99, lambda 0.95, in two cores at most. The rate is that from the end of the first update to the
end of the last, so start-up is left out.

What differs: the number of threads of math; where two cores are free, two may serve. Sample Factory
learns while it samples (APPO), each worker has two halves of its environments in turns, and it runs
with the older Gymnasium that it asks for. Headrace's minibatches take equally many steps of every
environment, the others' are drawn from the whole batch. Headrace logs every update, and the plain
PPO keeps returns and no more. Headrace acts by NumPy and has PPO's gradient written out; once it
does all by torch ("plain arithmetic"), to show what that gives.
"""

import sys

from benchmarks import turns

NUM_ENVS, ENV_STEPS = 64, 400_000


FLAGS = (
    f"CartPole-v1 --num-envs {NUM_ENVS} --num-steps 128 --num-epochs 4 --num-minibatches 4 "
    "--lr 2.5e-4 --ent-coef 0.01 --lr-schedule constant --clip-schedule constant "
    f"--gamma 0.99 --gae-lambda 0.95 --total-env-steps {ENV_STEPS}"
).split()


def headrace(name, *more, threads=1):
    return turns.headrace(name, [*FLAGS, *more], threads)


def one_process(name, threads, *driver):
    """A peer that does all in one process."""
    sizes = ["--num-envs", str(NUM_ENVS), "--env-steps", str(ENV_STEPS)]
    sizes += ["--threads", str(threads)]
    venv, module, *package = driver
    return turns.driver(name, venv, module, ["--env", "cartpole", *sizes], threads, *package)


def contestants():
    workers = ["--envs-per-vector", str(NUM_ENVS // 2), "--num-workers", "2"]
    return [
        headrace("Headrace, inline", "--envs-per-vector", str(NUM_ENVS)),
        headrace("Headrace, 2 workers", *workers),
        headrace("Headrace, 2 workers, 2 threads", *workers, "--learner-threads", "2", threads=2),
        headrace("Headrace, 2 workers, plain arithmetic", *workers, "--arithmetic", "plain"),
        one_process("plain PPO", 1, "base", "plain_ppo"),
        one_process("plain PPO, 2 threads", 2, "base", "plain_ppo"),
        one_process("Stable-Baselines3", 1, "sb3", "sb3_bench", "stable-baselines3"),
        one_process("Stable-Baselines3, 2 threads", 2, "sb3", "sb3_bench", "stable-baselines3"),
        turns.driver(
            "Sample Factory, 2 workers",
            "sf",
            "sf_bench",
            [
                *("--num-workers", "2", "--envs-per-worker", str(NUM_ENVS // 2)),
                *("--env-steps", str(ENV_STEPS), "--train-dir", f"{turns.SCRATCH}/train"),
            ],
            package="sample-factory",
        ),
    ]


if __name__ == "__main__":
    training = turns.Comparison("PPO training, CartPole-v1", contestants(), ENV_STEPS)
    sys.exit(turns.run("cartpole", __doc__, [training], turns=5))
