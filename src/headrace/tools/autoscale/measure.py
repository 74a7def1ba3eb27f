"""A search with real trials: allowed sizes, measurements, and messages."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from headrace.config.resolve import cpu_cores
from headrace.distributed import child_process
from headrace.errors import ConfigError, HeadraceError
from headrace.tools.autoscale.result import AutoscaleResult
from headrace.tools.autoscale.search import Search
from headrace.tools.autoscale.sizes import SIZE_NAMES, SearchSpace, Sizes
from headrace.tools.autoscale.trial import Trial, TrialSetup, format_gib, run_trial
from headrace.training.job import InspectedRequest

Print = Callable[[str], None]

_TRIAL_S, _FIRST_TRIAL_S = 20.0, 40.0  # the first trial compiles what the others load
_LARGEST_SHARE = 0.3  # share of the time for the largest batch that fits a GPU
_ONE_UPDATE_S = 2.0  # less does not show whether a batch fits


@dataclass
class Measurement:
    """One search.

    Attributes:
        deadline: end of the search on the clock of `time.perf_counter`.
        gpus: number of GPUs; each learner uses one.
    """

    setup: TrialSetup
    inspected: InspectedRequest
    space: SearchSpace
    deadline: float
    say: Print
    gpus: int
    _count: int = 0

    def run(self) -> AutoscaleResult:
        """Run the whole search.

        Raises:
            ConfigError: no trial fits into the memory.
            HeadraceError: no sizes could be measured.
            EnvError: the environment raised.
        """
        left_s, on_gpu = self._time_left(), self.setup.on_gpu
        free = ", ".join(name for name in SIZE_NAMES if name in self.space.free)
        self.say(
            f"Measuring sizes, for {left_s:.0f} s at most"
            + ("" if on_gpu else f", in {format_gib(self.setup.memory_limit())} of memory")
            + f". Open: {free or 'nothing'}."
        )
        child_process.warm_up()
        reserved_s = _LARGEST_SHARE * left_s if on_gpu else 0.0
        search = Search(
            self.space,
            cache(self._is_allowed),
            self._measure,
            lambda: self._time_left() - reserved_s,
            cpu_cores(),
            self.gpus,
        )
        best = search.run()
        if not search.rates:
            raise self._no_result_error(search.tried)
        largest = self._largest(search) if on_gpu else None
        return AutoscaleResult(
            self.space.settings(best),
            search.rate(best),
            [
                asdict(sizes) | asdict(trial) | {"rate": search.rate(sizes) or trial.rate}
                for sizes, trial in search.tried.items()
            ],
            None if largest is None else self.space.settings(largest),
            search.finished,
        )

    def _time_left(self) -> float:
        return self.deadline - time.perf_counter()

    def _is_allowed(self, sizes: Sizes) -> bool:
        """Return True if a run would accept these sizes."""
        try:
            self.inspected.change(**self.space.settings(sizes)).job(Path())
        except ConfigError:
            return False
        return True

    def _measure(self, sizes: Sizes, to_beat: float) -> Trial:
        at_most = _TRIAL_S if self._count else _FIRST_TRIAL_S
        seconds = max(1.0, min(at_most, self._time_left()))
        trial = run_trial(
            self.setup,
            self.space.settings(sizes),
            sizes.batch,
            seconds=seconds,
            to_beat=to_beat,
        )
        self._count += 1
        self.say(f"{self._count:3}. {sizes.describe()}: {_describe(trial)}")
        return trial

    def _largest(self, search: Search) -> Sizes | None:
        """Find the largest batch that fits the GPU."""

        def fits(sizes: Sizes) -> bool | None:
            if (trial := search.tried.get(sizes)) is None:
                if self._time_left() < _ONE_UPDATE_S:
                    return None
                # The speed does not matter, so the trial ends after the first update.
                trial = self._measure(sizes, float("inf"))
            return None if trial.outcome == "crashed" else trial.outcome != "memory"

        best = search.tried[search.best]
        guess = best.gpu_budget / best.gpu_bytes if best.gpu_bytes else 1.0
        return search.largest(fits, guess)

    def _no_result_error(self, tried: Mapping[Sizes, Trial]) -> HeadraceError:
        out_of_memory = {s: t for s, t in tried.items() if t.outcome == "memory"}
        if out_of_memory:
            sizes, trial = min(out_of_memory.items(), key=lambda item: item[1].memory_bytes)
            return ConfigError(
                "The memory budget is too small for any training that was tried. The smallest, "
                f"with {sizes.describe()}: {trial.why}.\n"
                "Use a larger --memory-gib, or a smaller batch or network."
            )
        reasons = "\n".join(f"  {s.describe()}: {_describe(t)}" for s, t in tried.items())
        return HeadraceError(
            f"No sizes could be measured:\n{reasons}\n"
            "If updates take long: use a longer --budget-s, or a smaller batch."
        )


def _describe(trial: Trial) -> str:
    """Format the outcome of a trial."""
    if trial.outcome == "measured":
        memory = format_gib(trial.gpu_bytes or trial.memory_bytes)
        return f"{trial.rate:,.0f} env steps/s, {memory} ({trial.took_s:.1f} s)"
    below = f", below {trial.rate:,.0f} env steps/s" if trial.rate else ""
    return f"{trial.outcome}: {trial.why}{below} ({trial.took_s:.1f} s)"
