"""Sizes of batches and minibatches that fit the number of environments.

Left out: refusing what does not divide (`checks.py`).
"""

import math
from typing import Any

LEAST_STEPS = 32
LEAST_SHARE = 4
"""With more environments a batch keeps its rows by fewer env steps of each one: at least
`LEAST_STEPS`, and at least a `LEAST_SHARE`-th of what it would have with the default number. With
fewer, advantages look too few steps ahead (Hopper-v5 with 64 environments learns less with 32 of
256 steps than with 64)."""


def fitting_steps(num_envs: int, batch_size: int, num_steps: int, multiple_of: int) -> int:
    """Return the env steps of each environment that keep the rows of a batch, if possible.

    Args:
        batch_size: rows to keep.
        num_steps: as suggested for another number of environments.
        multiple_of: env steps of each environment in a minibatch.
    """
    fewest = min(num_steps, max(LEAST_STEPS, num_steps // LEAST_SHARE))
    least = math.ceil(fewest / multiple_of)
    return max(least, round(batch_size / num_envs / multiple_of)) * multiple_of


def fitting_minibatches(whole: int, others: int, minibatch_size: int) -> int:
    """Return the number of minibatches whose size is nearest to the wanted one.

    Args:
        whole: what is divided among minibatches: env steps of each environment, or (with a
            recurrent core) environments.
        others: rows of each of these.
    """
    wanted = minibatch_size / others

    def distance(part: int) -> float:
        return abs(math.log(part / wanted))

    return whole // min((d for d in range(1, whole + 1) if whole % d == 0), key=distance)


def minibatch_sizes(run: Any, network: Any, count: int, size: int) -> dict[str, int]:
    """Return number and size of minibatches that divide the batch, and agree.

    Args:
        count: number of minibatches. The nearest one that divides the batch is taken.
        size: rows of a minibatch, in place of `count`; 0: it follows.
    """
    whole, others = run.num_steps, run.num_envs
    if network.core != "none":
        whole, others = others, whole
    if size:
        count = fitting_minibatches(whole, others, size)
    else:
        count = min(
            (d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: abs(d - count)
        )
    return {"num_minibatches": count, "minibatch_size": whole * others // count}
