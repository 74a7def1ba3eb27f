"""Env steps per second of PPO on CartPole-v1 with one, two and four learners.

The work is that of `cartpole.py` (64 environments × 128 steps, 4 epochs of 4 minibatches), shared
out among the learners, each of which steps its environments itself, with one thread of math; with
the small network (2 × 64) and a wider one (2 × 256). Gradients are averaged through shared
memory, and once more through gloo's own all-reduce, to compare. On two cores, four learners show
what sharing cores costs, and no gain.

"2 runs apart" are two runs of half the work each that know nothing of each other: what two learners
would reach if meeting cost nothing. A minibatch of half as many rows takes more than half the time
(each operation of a small network has its own cost, however few the rows), and no way to meet can
bring that back. The last table lets the batch grow with the learners instead: 64 environments each.
"""

import dataclasses
import sys

from benchmarks import cartpole
from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work

WIDE = ("--hidden-sizes", "256", "256")
WIDE_STEPS = 160_000


def learners(name, count, env_steps, *more, num_envs=cartpole.NUM_ENVS):
    flags = ["--num-envs", str(num_envs), "--envs-per-vector", str(num_envs // count)]
    flags += ["--num-learners", str(count), *more, "--total-env-steps", str(env_steps)]
    return cartpole.headrace(name, *flags)


def apart(name, count, env_steps, *more):
    share = cartpole.NUM_ENVS // count
    flags = ["--count", str(count), *cartpole.FLAGS, "--num-envs", str(share)]
    flags += ["--envs-per-vector", str(share), *more]
    flags += ["--total-env-steps", str(env_steps // count)]
    return contestants.headrace_driver(name, "apart", flags)


def one(*arguments, **more):
    return dataclasses.replace(learners("1 learner", 1, *arguments, **more), is_peer=True)


def shared_out(env_steps, *network):
    return [
        one(env_steps, *network),
        learners("2 learners", 2, env_steps, *network),
        learners("2 learners, gloo", 2, env_steps, *network, "--backend", "gloo"),
        learners("4 learners", 4, env_steps, *network),
        apart("2 runs apart", 2, env_steps, *network),
    ]


if __name__ == "__main__":
    steps, more_envs = cartpole.ENV_STEPS, 2 * cartpole.NUM_ENVS
    tables = [
        turns.Comparison("64 environments in all, 2 x 64 units", shared_out(steps), Work(steps)),
        turns.Comparison(
            "64 environments in all, 2 x 256 units",
            shared_out(WIDE_STEPS, *WIDE),
            Work(WIDE_STEPS),
        ),
        turns.Comparison(
            "64 environments for each learner, 2 x 64 units",
            [one(steps), learners("2 learners", 2, steps, num_envs=more_envs)],
            Work(steps),
        ),
    ]
    sys.exit(turns.run("learners", __doc__, tables, turns=5))
