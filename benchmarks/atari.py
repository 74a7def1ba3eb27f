"""Env steps per second on ALE/Breakout-v5: stepping alone, and PPO training.

All play the same game (`peers/atari.py`; sticky actions, four frames a step, so four emulator
frames for each env step counted). Stepping takes random actions, in two threads; seeds and actions
are the same for both, so that they play the same games.

Training is the same for all: NatureCNN, 8 environments × 128 steps, 4 epochs of 4 minibatches, Adam
with lr 2.5e-4, entropy 0.01, two threads of math. The rate is that from the end of the first update
to the end of the last. What differs: Stable-Baselines3 steps Gymnasium's Python wrappers one
environment after the other, as it does by default; the plain PPO and Headrace use ale-py's vector
environment. bf16 is another precision, not the same arithmetic, and has a limit of its own.
"""

import dataclasses
import sys

from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work
from benchmarks.limits import training_limit
from benchmarks.peers.works import SETTINGS
from headrace.seeding import derive

STEPPED = 40_000
TRAINED = 6_000
THREADS = 2
LIMIT, LIMIT_BF16 = "limit of this machine, fp32", "limit of this machine, bf16"


def stepping(num_envs):
    sizes = ["--num-envs", str(num_envs), "--env-steps", str(STEPPED), "--threads", str(THREADS)]
    seeds = [str(derive(0, "env", env, 0)) for env in range(num_envs)]  # as step_headrace's
    return turns.Comparison(
        f"Stepping, Breakout, {num_envs} environments",
        [
            contestants.headrace_driver(
                f"Headrace, {num_envs} envs", "step_headrace", sizes, THREADS
            ),
            contestants.driver(
                f"ale-py, {num_envs} envs", "base", "step_ale", [*sizes, "--seeds", *seeds], THREADS
            ),
        ],
        Work(STEPPED),
        turns=5,
    )


def headrace(name, *flags, **more):
    given = [*SETTINGS["atari"].headrace_flags(TRAINED), "--learner-threads", str(THREADS)]
    given += ["--env-kwargs", "use_fire_reset=False"]
    made = contestants.headrace(name, [*given, *flags], THREADS, must_say="Box(4, 84, 84) uint8")
    return dataclasses.replace(made, **more)


def training():
    sizes = ["--work", "atari", "--env-steps", str(TRAINED), "--threads", str(THREADS)]
    return turns.Comparison(
        "PPO training, Breakout",
        [
            headrace("Headrace"),
            headrace("Headrace, bf16", "--precision", "bf16", compared_with=LIMIT_BF16),
            contestants.driver("plain PPO", "base", "plain_ppo", sizes, THREADS),
            contestants.driver(
                "Stable-Baselines3", "sb3", "sb3_bench", sizes, THREADS, "stable-baselines3"
            ),
            training_limit("atari", "fp32", LIMIT),
            training_limit("atari", "bf16", LIMIT_BF16),
        ],
        Work(TRAINED),
    )


if __name__ == "__main__":
    comparisons = [stepping(8), stepping(32), training()]
    sys.exit(turns.run("atari", __doc__, comparisons, turns=3))
