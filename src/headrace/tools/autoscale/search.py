"""The search for sizes, along lines: workers, learners, environments, steps.

On a line it doubles the number while that pays, then halves the gap beside the best. Rates of the
same sizes vary by 10 % and more. So the search skips one doubling that seems not to pay, follows
other configurations that are close, and measures the best few again.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.tools.autoscale.sizes import SearchSpace, Sizes
from headrace.tools.autoscale.trial import Trial

Measure = Callable[[Sizes, float], Trial]
"""Measures sizes; the second argument is the rate (env steps/s) to beat."""

_MIN_GAIN = 1.03  # less is noise
_MIN_BATCH_GAIN = 1.05  # for another batch: settings and presets suit their own
_CLOSE = 1.2  # no numbers are tried between two with a smaller ratio
_HALVINGS = 3
_ROUNDS = 2  # each line is searched again after the others
_NEAR_BEST = 0.9  # share of the best rate that noise may explain
_PROMISING = 0.75  # share of the best rate that more environments may make up for
_FINALISTS = 3  # sizes that are measured again
_FINAL_TURNS = 2
_FINAL_SHARE = 0.25  # of the time
_MAX_FINAL_S = 24.0
_MUCH_FASTER = 2.0  # with workers this much faster, no workers are not tried
_BUSY = 0.5


class OutOfTimeError(Exception):
    """Too little time is left for another trial."""


@dataclass
class Search:
    """A search over sizes.

    Attributes:
        allowed: returns True if a run would accept the sizes.
        gpus: GPUs, one for each learner; 0: learners use the CPU.
        finished: False if the time ended the search.
    """

    space: SearchSpace
    allowed: Callable[[Sizes], bool]
    measure: Measure
    time_left: Callable[[], float]
    cores: int = 1
    gpus: int = 0
    tried: dict[Sizes, Trial] = field(default_factory=dict)
    rates: dict[Sizes, list[float]] = field(default_factory=dict)
    finished: bool = True
    _final_s: float = _MAX_FINAL_S

    @property
    def best(self) -> Sizes:
        """The fastest measured sizes, or the sizes of the settings if nothing was measured.

        If the batch is open, of sizes with about the same rate the one nearest to the settings.
        """
        rates = {sizes: self.rate(sizes) for sizes in self.rates}
        return self._best_of(rates) if rates else self.space.base

    def _best_of(self, rates: dict[Sizes, float]) -> Sizes:
        fastest = max(rates, key=lambda sizes: rates[sizes])
        if self.space.batch is not None:
            return fastest
        near = [s for s in rates if rates[s] * _MIN_BATCH_GAIN >= rates[fastest]]

        def distance(sizes: Sizes) -> float:
            return abs(math.log(sizes.batch / self.space.base.batch))

        return min(near, key=lambda sizes: (distance(sizes), -rates[sizes]))

    def rate(self, sizes: Sizes) -> float:
        """Return the mean measured rate (env steps/s); 0 if nothing was measured."""
        return statistics.fmean(self.rates[sizes]) if sizes in self.rates else 0.0

    def run(self) -> Sizes:
        """Search until nothing improves or the time is over; return the best sizes."""
        self._final_s = min(_MAX_FINAL_S, _FINAL_SHARE * self.time_left())
        try:
            self._try(self._first())
            for _ in range(_ROUNDS):
                before = self.best
                self._search_one_vector() if self.space.one_vector else self._search_workers()
                if self.best == before:
                    break
            if not self.space.one_vector:
                self._search_others()
        except OutOfTimeError:
            self.finished = False
        return self._final_comparison()

    def largest(self, fits: Callable[[Sizes], bool | None], guess: float) -> Sizes | None:
        """Find the most environments that fit into memory, to a fifth; None: unknown.

        Args:
            fits: tries sizes; returns None if there is no time.
            guess: estimate of how many times the best sizes fit.
        """
        at = self.best
        sizes = [self._envs_at(at, n) for n in sorted(self.space.envs()) if n >= at.num_envs]
        above = [each for each in sizes if each is not None]
        least, most, stride = 0, len(above), 1  # above[least] fits; above[most] does not
        i = sum(each.num_envs <= guess * at.num_envs for each in above) - 1
        while most - least > 1:
            i = min(max(i, least + 1), most - 1)
            if (fit := fits(above[i])) is None:
                return None
            least, most = (i, most) if fit else (least, i)
            i, stride = least + stride, 2 * stride
            if most < len(above):
                i = (least + most) // 2
        return above[least] if above else None

    def _first(self) -> Sizes:
        """Return the sizes of settings and preset, with a learner for each GPU."""
        base = self.space.base
        if self.gpus > 1 and "num_learners" in self.space.free:
            spread = self._at(base, learners=self.gpus, workers=base.num_workers)
            if spread is not None and self.allowed(spread):
                return spread
        return base

    def _search_one_vector(self) -> None:
        self._search_learners()
        self._search_envs(self.best)
        at = self.best
        self._search_line({n: self._at(at, steps=n) for n in self.space.steps()}, at.num_steps)

    def _search_workers(self) -> None:
        at, before = self.best, self.rate(self.best)
        target = at.num_envs if self._waits(at) else max(1, self.cores // at.num_learners)
        workers = self.space.workers(at.num_learners, at.num_envs)
        spread = min(workers, key=lambda n: (n == 0, abs(n - target)), default=0)
        self._try(self._workers_at(at, spread))
        if self.rate(self.best) < _MUCH_FASTER * before:
            self._try(self._workers_at(at, 0))
        waits = self._waits(self.best)  # then each environment has a worker: search more of both
        if waits:
            self._search_more_workers()
        self._search_envs(self.best)
        self._search_learners()
        if not waits:
            self._search_more_workers()
        self._search_envs(self.best)

    def _search_more_workers(self) -> None:
        if (at := self.best).num_workers:
            values = self.space.workers(at.num_learners, at.num_envs)
            line = {n: self._workers_at(at, n) for n in values if n}
            self._search_line(line, at.workers_per_learner)

    def _search_others(self) -> None:
        """Search environments for other numbers of learners, and with or without workers."""

        def group(sizes: Sizes) -> tuple[int, bool]:
            return sizes.num_learners, sizes.num_workers > 0

        ascending = sorted(self.rates, key=self.rate)
        best_of = {group(sizes): sizes for sizes in ascending}  # the best of each group stays
        for at in sorted(best_of.values(), key=self.rate, reverse=True):
            if group(at) != group(self.best) and self.rate(at) >= _PROMISING * self.rate(self.best):
                self._search_envs(at)

    def _waits(self, sizes: Sizes) -> bool:
        """Return True if environments mostly wait: then each can have a worker."""
        used, processes = self.tried[sizes].busy_cores, max(1, sizes.num_workers)
        return 0.0 < used < _BUSY * min(self.cores, processes)

    def _search_learners(self) -> None:
        """Double the learners while that pays."""
        if "num_learners" not in self.space.free or self.gpus:
            return
        count = 2 * self.best.num_learners
        while count <= self.cores:
            at, before = self.best, self.rate(self.best)
            for workers in {0, -(-at.num_workers // count)}:
                self._try(self._at(at, learners=count, workers=workers))
            if self.rate(self.best) < _MIN_GAIN * before:
                return
            count *= 2

    def _search_envs(self, at: Sizes) -> None:
        self._search_line({n: self._envs_at(at, n) for n in self.space.envs()}, at.num_envs)

    def _envs_at(self, at: Sizes, envs: int) -> Sizes | None:
        """Return the sizes with another number of environments."""
        workers = self.space.workers(at.num_learners, envs)
        fewer = max((n for n in workers if n <= at.workers_per_learner), default=0)
        return self._at(at, workers=fewer, envs=envs)

    def _workers_at(self, at: Sizes, workers: int) -> Sizes | None:
        """Return the sizes with another number of workers per learner."""
        return self._at(at, workers=workers, envs=max(at.num_envs, workers * at.num_learners))

    def _at(self, at: Sizes, **changed: int) -> Sizes | None:
        """Return the sizes with some changed; the names are those of `SearchSpace.at`."""
        same = {"learners": at.num_learners, "workers": at.workers_per_learner}
        same |= {"envs": at.num_envs, "steps": at.num_steps}
        return self.space.at(**same | changed)

    def _search_line(self, points: dict[int, Sizes | None], start: int) -> None:
        """Double while that pays, or else halve; then halve the gap beside the best."""
        line = {n: s for n, s in points.items() if s is not None and self.allowed(s)}
        if not line:
            return
        start = min(line, key=lambda n: abs(n - start))
        self._try(line[start])
        if (best := self._climb(line, start, up=True)) == start:
            best = self._climb(line, start, up=False)
        for _ in range(_HALVINGS):
            if (middle := self._middle(line, best)) is None:
                break
            self._try(line[middle])
            if self.rate(line[middle]) > self.rate(line[best]):
                best = middle

    def _climb(self, line: dict[int, Sizes], start: int, *, up: bool) -> int:
        best, at, skipped = start, start, False
        min_gain = _MIN_BATCH_GAIN if up and self.space.batch is None else _MIN_GAIN
        while (beyond := _beyond(line, at, up=up)) is not None:
            at = beyond
            trial = self._try(line[at])
            if self.rate(line[at]) > min_gain * self.rate(line[best]):
                best, skipped = at, False
            elif not skipped and (
                trial.outcome == "crashed"  # the next number may still work
                or self.rate(line[at]) >= _NEAR_BEST * self.rate(line[best]) > 0.0
            ):
                skipped = True
            elif up or self.rate(line[best]) or trial.outcome != "memory":
                break
        return best

    def _middle(self, line: dict[int, Sizes], best: int) -> int | None:
        """Return a number between the best and its better neighbour."""
        tried = [n for n in line if line[n] in self.tried]
        below = max((n for n in tried if n < best), default=None)
        above = min((n for n in tried if n > best), default=None)

        def promise(n: int) -> float:
            # Just below the memory limit the rate may still rise.
            is_wall = n > best and self.tried[line[n]].outcome == "memory"
            return float("inf") if is_wall else self.rate(line[n])

        neighbour = max((n for n in (below, above) if n is not None), key=promise, default=None)
        if neighbour is None or max(best, neighbour) < _CLOSE * min(best, neighbour):
            return None
        ends = sorted((best, neighbour))
        within = [n for n in line if ends[0] < n < ends[1]]
        middle = (max(ends[0], 1) * ends[1]) ** 0.5
        return min(within, key=lambda n: abs(n - middle), default=None)

    def _try(self, sizes: Sizes | None) -> Trial:
        """Measure sizes unless they were tried; OutOfTimeError if there is no time."""
        if sizes is None or not self.allowed(sizes):
            return Trial("refused")
        if sizes not in self.tried:
            needed_s = self._typical_s()
            if self.time_left() < needed_s + min(
                _FINAL_TURNS * _FINALISTS * needed_s, self._final_s
            ):
                raise OutOfTimeError
            self._measure(sizes)
        return self.tried[sizes]

    def _measure(self, sizes: Sizes) -> None:
        trial = self.measure(sizes, self.rate(self.best))
        self.tried.setdefault(sizes, trial)
        if trial.outcome == "measured" and trial.rate is not None:
            self.rates.setdefault(sizes, []).append(trial.rate)

    def _final_comparison(self) -> Sizes:
        """Measure the best few again in turns, and return the best of them.

        The speed of a machine varies over time, so only measurements in turns are comparable.
        """
        best = self.best
        near = [s for s in self.rates if self.rate(s) >= _NEAR_BEST * self.rate(best)]
        few = list(dict.fromkeys([best, *sorted(near, key=self.rate, reverse=True)]))[:_FINALISTS]
        while few and self.time_left() < len(few) * self._typical_s():
            few.pop()
        if len(few) < 2:
            return best
        before = {sizes: len(self.rates[sizes]) for sizes in few}
        for _ in range(_FINAL_TURNS):
            if self.time_left() >= len(few) * self._typical_s():
                for sizes in few:
                    self._measure(sizes)
        again = {sizes: self.rates[sizes][count:] for sizes, count in before.items()}
        means = {sizes: statistics.fmean(rates) for sizes, rates in again.items() if rates}
        return self._best_of(means) if means else best

    def _typical_s(self) -> float:
        """Return the expected duration of a trial."""
        took = [trial.took_s for trial in self.tried.values()]
        return 1.2 * statistics.fmean(took) if took else 0.0


def _beyond(line: dict[int, Sizes], at: int, *, up: bool) -> int | None:
    """Return the next number that is at least twice (up) or at most half of `at`, or the last."""
    rest = sorted((n for n in line if (n > at if up else n < at)), reverse=not up)
    far = (n for n in rest if (n >= 2 * at if up else n <= at / 2))
    return next(far, rest[-1] if rest else None)
