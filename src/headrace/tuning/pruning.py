"""How far trials are trained, and which of them go on.

A rung is a number of env steps at which a trial is measured. It is saved there, and its process
ends; if it goes on, it goes on exactly, so no env step is made twice.

- `asha`: of the trials that reached a rung, the best third goes on to the next one, as soon as they
  are known (Li et al. 2020, arXiv:1810.05934). Three rungs: a ninth, a third, and all env steps.
- `median`: at the same rungs, a trial whose score is below the median of those that were there
  before it is stopped, once there are five (Golovin et al. 2017).
- `none`: all are trained to the end.

Left out: running them (`study.py`).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

PRUNERS = ("asha", "median", "none")
REDUCTION = 3
"""Of so many trials that reach a rung, one goes on."""
_NUM_RUNGS = 3
LEAST_BATCHES = 5
_LEAST_TRIALS = 5


@dataclass(frozen=True)
class Standing:
    """Where a trial stands.

    Attributes:
        rung: the last that it reached; -1: none.
        scores: at the rungs that it reached.
        waits: whether it may go on: it neither runs nor has ended.
    """

    number: int
    rung: int
    scores: tuple[float, ...]
    waits: bool


def make_rungs(pruner: str, total: int, batch: int, learning_starts: int = 0) -> list[int]:
    """Return the env steps of all rungs; the last is `total`.

    A rung takes at least five batches, and twice the env steps before learning starts.
    """
    if pruner == "none":
        return [total]
    least = max(LEAST_BATCHES * batch, 2 * learning_starts)
    rungs = [total // REDUCTION**i for i in reversed(range(1, _NUM_RUNGS))]
    return [*(rung for rung in rungs if rung >= least), total]


def promoted(pruner: str, num_rungs: int, standings: Sequence[Standing]) -> Standing | None:
    """Return the trial that goes on to its next rung now; None: none does yet."""
    goes_on = {"asha": _is_among_best, "median": _is_not_below_median, "none": _always}[pruner]
    ready = [s for s in standings if s.waits and 0 <= s.rung < num_rungs - 1]
    # The highest rung first, then the best: a whole trial is worth more than several begun ones.
    for each in sorted(ready, key=lambda s: (-s.rung, -s.scores[s.rung], s.number)):
        if goes_on(each, standings):
            return each
    return None


def last_promoted(num_rungs: int, standings: Sequence[Standing]) -> Standing | None:
    """Return the best waiting trial if no trial has reached the last rung, or runs to it.

    Asked when nothing else is left to do: a small study has a whole trial, too.
    """
    if any(s.rung == num_rungs - 1 for s in standings):
        return None
    ready = [s for s in standings if s.waits and s.rung >= 0]
    return max(ready, key=lambda s: (s.rung, s.scores[s.rung], -s.number), default=None)


def _is_among_best(trial: Standing, standings: Sequence[Standing]) -> bool:
    there = [s for s in standings if s.rung >= trial.rung]
    best = sorted(there, key=lambda s: (-s.scores[trial.rung], s.number))
    return trial in best[: len(there) // REDUCTION]


def _is_not_below_median(trial: Standing, standings: Sequence[Standing]) -> bool:
    there = [s.scores[trial.rung] for s in standings if s.rung >= trial.rung and s is not trial]
    return len(there) < _LEAST_TRIALS or trial.scores[trial.rung] >= statistics.median(there)


def _always(trial: Standing, standings: Sequence[Standing]) -> bool:
    return True
