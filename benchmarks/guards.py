"""What the guards against faults cost: the same training with them, as by default, and without.

Guards are the checks for NaN and wrong shapes, watching for workers that hang, and the journals by
which a lost worker is replaced. Two workers, on a cheap environment (CartPole-v1, 6 µs a step) and
a dear one (HalfCheetah-v5). The ratio below each table is what is left with guards; that of each
turn says how sure it is.
"""

import sys

from benchmarks import cartpole, cheetah
from benchmarks.harness import turns
from benchmarks.harness.one_turn import Work


def compared(env, headrace, workers, env_steps):
    return turns.Comparison(
        f"Guards on {env}, 2 workers",
        [
            headrace("Headrace", *workers),
            headrace("Headrace, --no-guards", *workers, "--no-guards"),
        ],
        Work(env_steps),
        ratios={"with guards / without": ("Headrace", "Headrace, --no-guards")},
    )


def comparisons():
    return [
        compared("CartPole-v1", cartpole.headrace, cartpole.WORKERS, cartpole.ENV_STEPS),
        compared("HalfCheetah-v5", cheetah.headrace, cheetah.WORKERS, cheetah.ENV_STEPS),
    ]


if __name__ == "__main__":
    sys.exit(turns.run("guards", __doc__, comparisons(), turns=5))
