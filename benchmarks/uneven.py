"""Env steps per second of PPO training where steps take unequal time: who waits for whom?

24 environments (`peers/uneven.py`), each in a process of its own, since they sleep: a step takes
3 ms, and 100 ms with probability 1/24. If nobody ever waited, 24 of them would make 24 / mean step
= 3,408 env steps/s: the limit of this table. Each batch has 128 steps of each environment, and is
learned from (4 epochs of 4 minibatches, 2 × 64) before the next begins: lag 0.

Stable-Baselines3 waits for the slowest environment at each step; Headrace for the slowest at the
end of a batch. The rate is that from the end of the first update to the end of the last, with
learning in it; "while collecting" leaves out the time in which nobody sampled (Headrace: the spans
of the learner's meter that are not `wait`).
"""

import sys

from benchmarks import contestants, turns
from benchmarks.one_turn import Work
from benchmarks.peers.uneven import MEAN_S
from benchmarks.peers.works import SETTINGS

UNEVEN = SETTINGS["uneven"]
ENV_STEPS = 5 * UNEVEN.batch
IDEAL = UNEVEN.num_envs / MEAN_S
BETWEEN = ("transport", "learn", "publish", "log")
"""Spans of the learner in each update, while samplers wait."""


def while_collecting(result):
    """Share of the ideal in the time in which experience was made."""
    if result.get("collecting_s"):
        return result["env_steps"] / result["collecting_s"] / IDEAL
    updates = result["env_steps"] / UNEVEN.batch
    between = sum(result["meter"].get(span, 0.0) for span in BETWEEN) / updates
    return UNEVEN.batch / (UNEVEN.batch / result["env_steps_per_s"] - between) / IDEAL


def training():
    flags = UNEVEN.headrace_flags(ENV_STEPS)
    flags += ["--num-workers", str(UNEVEN.num_envs), "--envs-per-vector", "1"]
    sizes = ["--work", "uneven", "--env-steps", str(ENV_STEPS), "--threads", "1", "--subproc"]
    return turns.Comparison(
        "PPO training, 24 environments with uneven steps",
        [
            contestants.headrace("Headrace, 24 workers", flags),
            contestants.driver(
                "Stable-Baselines3, 24 processes",
                *("sb3", "sb3_bench", sizes),
                package="stable-baselines3",
            ),
        ],
        Work(ENV_STEPS),
        also={"of the limit while collecting": while_collecting},
        limit=IDEAL,
    )


if __name__ == "__main__":
    sys.exit(turns.run("uneven", __doc__, [training()], turns=3))
