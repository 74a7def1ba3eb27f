"""What sampling beside learning gives, and what it costs: PPO at lag 1 against lag 0.

At lag 1 the next batch is made while this one is learned from, with weights that are one update
older. It gives time, where learner and workers have cores of their own: HalfCheetah-v5 as in
`cheetah.py` and Breakout as in `atari.py`, once with one worker (the learner has the other core),
once with two. It costs steps, perhaps: those that PPO's preset takes until CartPole-v1 has a mean
return of 475 over the last 100 training episodes, with the seeds 0 to 4 (a turn is a seed).

The rate is that from the end of the first update to the end of the last. No peers: the row that
the others are compared with is the one at lag 0 with as many workers.
"""

import dataclasses
import sys

from benchmarks import atari, cheetah
from benchmarks.cartpole import SOLVED_AT
from benchmarks.harness import contestants, turns
from benchmarks.harness.one_turn import Work


def pair(make, workers, *flags):
    """The same at lag 0 and at lag 1."""
    at_0, at_1 = (make(f"{workers}, lag {lag}", *flags, "--lag", str(lag)) for lag in (0, 1))
    return [dataclasses.replace(at_0, is_peer=True), at_1]


def ratio(workers):
    return {f"{workers}: lag 1 / lag 0": (f"{workers}, lag 1", f"{workers}, lag 0")}


def overlap():
    one, two = ("--num-workers", "1"), ("--num-workers", "2")
    in_two = ("--envs-per-vector", "4")
    yield turns.Comparison(
        "PPO training at lag 0 and 1, HalfCheetah-v5",
        [
            *pair(cheetah.headrace, "1 worker", "--envs-per-vector", "8", *one),
            *pair(cheetah.headrace, "2 workers", *in_two, *two),
        ],
        Work(cheetah.ENV_STEPS),
        ratios=ratio("1 worker") | ratio("2 workers"),
    )
    # At lag 1 the emulators have the core that the learner leaves them; at lag 0, both.
    threads = ("--learner-threads", "1")
    yield turns.Comparison(
        "PPO training at lag 0 and 1, Breakout",
        pair(atari.headrace, "1 worker", *one, *threads),
        Work(atari.TRAINED),
        ratios=ratio("1 worker"),
        turns=3,
    )


def steps_needed():
    flags = ["CartPole-v1", "--stop-at-return", str(SOLVED_AT), "--seed", contestants.TURN]
    return turns.Comparison(
        "Env steps of PPO's preset until CartPole-v1 is solved, at lag 0 and 1",
        [
            contestants.headrace(f"lag {lag}", [*flags, "--lag", str(lag)], is_peer=lag == 0)
            for lag in (0, 1)
        ],
        Work(
            None, "env_steps", "env steps", lower_is_better=True, least_return=SOLVED_AT
        ),
        ratios={"steps at lag 0 / at lag 1": ("lag 1", "lag 0")},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(turns.run("lag", __doc__, [steps_needed(), *overlap()], turns=5))
