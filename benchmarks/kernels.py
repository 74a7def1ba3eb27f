"""Kernel environments on this machine's CPU: stepping alone, and training.

Stepping alone is random actions, drawn beforehand, with resets and their random numbers (Philox):
one thread; a thread for each core; or a process for each core, with its share of the environments,
as `--num-learners` has it. Beside CartPole, Gymnasium's own vector form of it, which is NumPy. An
env step is one step of one environment with all its agents; of the Tag games, agent steps are told
as well. In TagContinuous all 110 agents are in the game (nobody reaches anybody), and each sees the
10 nearest others.

Training is PPO: headrace/CartPole-v1 with 1,024 environments × 32 steps, 4 epochs of 4 minibatches,
2 × 64 tanh, separate actor and critic: one process; one process with two threads of math; two
learners, each with half of the environments, on one core each. Its limits are the kernel alone, and
the learner alone (updates from one batch, again and again, without sampling). Then its preset, by
the time until it is solved: from the start of the process until the mean return of the last 100
episodes is 475. The games of tag have their presets: TagGridWorld 2,000 environments × 20 steps
with 4 taggers and a runner, TagContinuous 20 × 25 with 10 taggers and 100 runners; a policy for
each side.
"""

import json
import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.machine import cores
from benchmarks.harness.one_turn import Work

CARTPOLE = "headrace/CartPole-v1"
TAG_GRID = ("headrace/TagGridWorld-v0", {"num_taggers": 4, "length": 100})
TAG_CONTINUOUS = (
    "headrace/TagContinuous-v0",
    {
        "num_taggers": 10, "num_runners": 100, "length": 20.0, "max_episode_steps": 500,
        "full_observation": False, "num_other_agents_observed": 10, "tagging_distance": 0.0,
    },
)  # fmt: skip
ENV_STEPS = 6_000_000
NUM_ENVS, NUM_STEPS = 1024, 32
FLAGS = [
    CARTPOLE, "--num-envs", str(NUM_ENVS), "--num-steps", str(NUM_STEPS), "--num-epochs", "4",
    "--num-minibatches", "4", "--device", "cpu", "--total-env-steps", str(ENV_STEPS),
]  # fmt: skip


def stepping(name, env, num_envs, env_steps, kwargs=None, **also):
    """One thread, one for each core, and a process for each core."""
    arguments = ["--env", env, "--num-envs", str(num_envs), "--env-steps", str(env_steps)]
    arguments += ["--env-kwargs", json.dumps(kwargs or {})]
    found = [
        contestants.headrace_driver(
            text, "step_kernel", [*arguments, "--threads", str(threads)], threads
        )
        for text, threads in (("one thread", 1), (f"{cores()} threads", cores()))
    ]
    found.append(
        contestants.headrace_driver(
            f"{cores()} processes", "step_kernel", [*arguments, "--processes", str(cores())]
        )
    )
    return turns.Comparison(f"{name}, {num_envs:,} environments alone", found, **also)


def agent_steps(result):
    return result["env_steps_per_s"] * result["agents"]


def alone():
    cartpole = stepping("CartPole", CARTPOLE, 16384, 100_000_000, work=Work(None))
    gymnasium = ["--env", "CartPole-v1", "--num-envs", "16384", "--env-steps", "2000000"]
    theirs = contestants.headrace_driver(
        "Gymnasium's vector form", "step_kernel", [*gymnasium, "--form", "gymnasium"], is_peer=True
    )
    also = {"work": Work(None), "also": {"agent steps/s": agent_steps}}
    return [
        turns.Comparison(cartpole.title, [*cartpole.contestants, theirs], cartpole.work),
        stepping("TagGridWorld, 5 agents", TAG_GRID[0], 2000, 6_000_000, TAG_GRID[1], **also),
        stepping(
            "TagContinuous, 110 agents", TAG_CONTINUOUS[0], 100, 100_000, TAG_CONTINUOUS[1], **also
        ),
    ]


def training():
    sizes = ["--num-envs", str(NUM_ENVS), "--num-steps", str(NUM_STEPS)]
    sizes += ["--env-steps", str(ENV_STEPS)]
    kernel = ["--env", CARTPOLE, "--num-envs", str(NUM_ENVS), "--env-steps", str(ENV_STEPS)]
    return turns.Comparison(
        "PPO training, headrace/CartPole-v1, 1,024 environments",
        [
            contestants.headrace("2 learners", [*FLAGS, "--num-learners", "2"]),
            contestants.headrace("1 learner", FLAGS),
            contestants.headrace("1 learner, 2 threads", [*FLAGS, "--learner-threads", "2"], 2),
            contestants.headrace_driver(
                "learner alone, 2 processes", "learn_alone", [*sizes, "--processes", "2"],
                is_limit=True,
            ),
            contestants.headrace_driver("kernel alone, one thread", "step_kernel", kernel),
        ],
        Work(ENV_STEPS),
    )  # fmt: skip


def solving():
    flags = [CARTPOLE, "--device", "cpu", "--stop-at-return", "475", "--seed", contestants.TURN]
    return turns.Comparison(
        "headrace/CartPole-v1, from the start of the process until it is solved",
        [
            contestants.headrace("1 learner", flags),
            contestants.headrace("2 learners", [*flags, "--num-learners", "2"]),
        ],
        Work(None, "turn_s", "s", lower_is_better=True, least_return=475),
        also={"env steps": lambda result: result["env_steps"]},
    )


def tag(env, env_steps):
    flags = [env, "--device", "cpu", "--total-env-steps", str(env_steps)]
    return turns.Comparison(
        f"PPO training, {env}",
        [
            contestants.headrace("2 learners", [*flags, "--num-learners", "2"]),
            contestants.headrace("1 learner", flags),
        ],
        Work(env_steps),
        also={"agent steps/s": lambda r: r["env_steps_per_s"] * r["agent_steps"] / r["env_steps"]},
    )


def comparisons():
    return [
        *alone(),
        training(),
        solving(),
        tag("headrace/TagGridWorld-v0", 1_000_000),
        tag("headrace/TagContinuous-v0", 20_000),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("kernels", __doc__, comparisons(), turns=3))
