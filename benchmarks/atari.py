"""Env steps per second on ALE/Breakout-v5: stepping alone, and PPO training.

All play the same game (`peers/atari.py`; sticky actions, four frames a step, so four emulator
frames for each env step counted). Stepping takes random actions, in two threads.

Training is the same for all: NatureCNN, 8 environments × 128 steps, 4 epochs of 4 minibatches, Adam
with lr 2.5e-4, entropy 0.01, two threads of math. The rate is that from the end of the first update
to the end of the last. What differs: Stable-Baselines3 steps Gymnasium's Python wrappers one
environment after the other, as it does by default; the plain PPO and Headrace use ale-py's vector
environment. bf16 is another precision, not the same arithmetic.
"""

import sys

from benchmarks import turns

STEPPED = 40_000
TRAINED = 6_000
THREADS = 2


def stepping(num_envs):
    sizes = ["--num-envs", str(num_envs), "--env-steps", str(STEPPED), "--threads", str(THREADS)]
    return turns.Comparison(
        f"Stepping, Breakout, {num_envs} environments",
        [
            turns.headrace_driver(f"Headrace, {num_envs} envs", "step_headrace", sizes, THREADS),
            turns.driver(f"ale-py, {num_envs} envs", "base", "step_ale", sizes, THREADS),
        ],
        STEPPED,
    )


def headrace(name, *more):
    flags = (
        "ALE/Breakout-v5 --num-envs 8 --num-steps 128 --num-epochs 4 --num-minibatches 4 "
        "--lr 2.5e-4 --ent-coef 0.01 --lr-schedule constant --clip-schedule constant "
        f"--clip-coef 0.2 --gamma 0.99 --gae-lambda 0.95 --learner-threads {THREADS} "
        f"--env-kwargs use_fire_reset=False --total-env-steps {TRAINED}"
    )
    return turns.headrace(name, [*flags.split(), *more], THREADS, must_say="Box(4, 84, 84) uint8")


def training():
    sizes = ["--env", "atari", "--num-envs", "8", "--env-steps", str(TRAINED)]
    sizes += ["--threads", str(THREADS)]
    return turns.Comparison(
        "PPO training, Breakout",
        [
            headrace("Headrace"),
            headrace("Headrace, bf16", "--precision", "bf16"),
            turns.driver("plain PPO", "base", "plain_ppo", sizes, THREADS),
            turns.driver(
                "Stable-Baselines3", "sb3", "sb3_bench", sizes, THREADS, "stable-baselines3"
            ),
        ],
        TRAINED,
    )


if __name__ == "__main__":
    comparisons = [stepping(8), stepping(32), training()]
    sys.exit(turns.run("atari", __doc__, comparisons, turns=3))
