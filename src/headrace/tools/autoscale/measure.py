"""A search with real trials: which sizes can be, their trials, and what is said of them.

Left out: the order of trials (`search.py`), one trial (`trial.py`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from headrace.config.resolve import cpu_cores
from headrace.distributed import child_process
from headrace.errors import ConfigError, HeadraceError
from headrace.tools.autoscale import resources
from headrace.tools.autoscale.result import Found
from headrace.tools.autoscale.search import Search
from headrace.tools.autoscale.sizes import FREE, Sizes, Space
from headrace.tools.autoscale.trial import SHARE, Limits, Trained, Trial, gib, run_trial
from headrace.training.job import InspectedRequest

Say = Callable[[str], None]

_TRIAL_S, _FIRST_TRIAL_S = 20.0, 40.0  # the first one compiles what the others load
_FOR_LARGEST = 0.3  # of the time, for the largest batch that fits a GPU
_ONE_UPDATE_S = 2.0  # and less is not enough to see whether it fits


class Measuring:
    """One search.

    Args:
        trained: what all trials train.
        want: the same, as it was looked at.
        space: of sizes.
        limits: of memory.
        deadline: for all of it, as `time.perf_counter` has it.
        say: told of each trial.
        gpus: that learners have one each of.
    """

    def __init__(
        self,
        trained: Trained,
        want: InspectedRequest,
        space: Space,
        limits: Limits,
        deadline: float,
        say: Say,
        gpus: int,
    ) -> None:
        self._trained, self._want, self._space, self._limits = trained, want, space, limits
        self._deadline, self._say, self._gpus, self._count = deadline, say, gpus, 0
        self._budget = limits.memory_bytes or int(SHARE * resources.available_bytes())

    def run(self) -> Found:
        """All of it.

        Raises:
            ConfigError: no trial fits the memory.
            HeadraceError: none could be measured.
            EnvError: the environment raised.
        """
        left_s, on_gpu = self._time_left(), self._trained.on_gpu
        free = ", ".join(name for name in FREE if name in self._space.free)
        self._say(
            f"Measuring sizes, for {left_s:.0f} s at most"
            + ("" if on_gpu else f", in {gib(self._budget)} of memory")
            + f". Open: {free or 'nothing'}."
        )
        child_process.warm_up()
        reserved_s = _FOR_LARGEST * left_s if on_gpu else 0.0
        search = Search(
            self._space,
            cache(self._allowed),
            self._measure,
            lambda: self._time_left() - reserved_s,
            cpu_cores(),
            self._gpus,
        )
        best = search.run()
        if not search.rates:
            raise self._nothing(search.tried)
        largest = self._largest(search) if on_gpu else None
        return Found(
            self._space.settings(best),
            search.rate(best),
            [
                asdict(sizes) | asdict(trial) | {"rate": search.rate(sizes) or trial.rate}
                for sizes, trial in search.tried.items()
            ],
            None if largest is None else self._space.settings(largest),
            search.finished,
        )

    def _time_left(self) -> float:
        return self._deadline - time.perf_counter()

    def _allowed(self, sizes: Sizes) -> bool:
        """Whether a run would begin with them."""
        try:
            self._want.change(**self._space.settings(sizes)).job(Path())
        except ConfigError:
            return False
        return True

    def _measure(self, sizes: Sizes, to_beat: float) -> Trial:
        at_most = _TRIAL_S if self._count else _FIRST_TRIAL_S
        seconds = max(1.0, min(at_most, self._time_left()))
        limits = replace(self._limits, seconds=seconds, to_beat=to_beat)
        trial = run_trial(self._trained, self._space.settings(sizes), sizes.batch, limits)
        self._count += 1
        self._say(f"{self._count:3}. {sizes.told()}: {_told(trial)}")
        return trial

    def _largest(self, search: Search) -> Sizes | None:
        """The largest batch that fits the GPU."""

        def fits(sizes: Sizes) -> bool | None:
            if (trial := search.tried.get(sizes)) is None:
                if self._time_left() < _ONE_UPDATE_S:
                    return None
                # How fast it is does not matter: it ends after the first update.
                trial = self._measure(sizes, float("inf"))
            return None if trial.outcome == "crashed" else trial.outcome != "memory"

        of_best = search.tried[search.best]
        guess = of_best.gpu_budget / of_best.gpu_bytes if of_best.gpu_bytes else 1.0
        return search.largest(fits, guess)

    def _nothing(self, tried: Mapping[Sizes, Trial]) -> HeadraceError:
        """Why nothing could be measured."""
        of_memory = {s: t for s, t in tried.items() if t.outcome == "memory"}
        if of_memory:
            sizes, trial = min(of_memory.items(), key=lambda item: item[1].memory_bytes)
            return ConfigError(
                "The memory budget is too small for any training that was tried. The smallest, "
                f"with {sizes.told()}: {trial.why}.\n"
                "Use a larger --memory-gib, or a smaller batch or network."
            )
        whys = "\n".join(f"  {s.told()}: {_told(t)}" for s, t in tried.items())
        return HeadraceError(
            f"No sizes could be measured:\n{whys}\n"
            "If updates take long: a longer --budget-s, or a smaller batch."
        )


def _told(trial: Trial) -> str:
    """How it ended, in words."""
    if trial.outcome == "measured":
        took = gib(trial.gpu_bytes or trial.memory_bytes)
        return f"{trial.rate:,.0f} env steps/s, {took} ({trial.took_s:.1f} s)"
    below = f", below {trial.rate:,.0f} env steps/s" if trial.rate else ""
    return f"{trial.outcome}: {trial.why}{below} ({trial.took_s:.1f} s)"
