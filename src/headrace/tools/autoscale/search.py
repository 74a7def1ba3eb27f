"""The search: which sizes are tried, in which order, and which are the best.

Along each of a few lines (workers, learners, environments, steps) numbers double while that pays,
and then the gap between the best and its better neighbour is halved. Rates of the same sizes differ
by a tenth and more, from one trial to the next: one doubling that seems not to pay is passed over,
other ways to train that are not far behind are followed too, and the best few are compared once
more. Left out: which sizes there can be (`sizes.py`), and how fast they are (`trial.py`): both are
told to it.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.tools.autoscale.sizes import Sizes, Space
from headrace.tools.autoscale.trial import Trial

Measure = Callable[[Sizes, float], Trial]
"""Tries sizes; the second argument is a rate (env steps/s) that is to be beaten."""

_PAYS = 1.03  # less cannot be told from noise
_LARGER_PAYS = 1.05  # of a batch that may be another: settings and presets suit that of theirs
_CLOSE = 1.2  # numbers between two that are as close as that are not tried
_HALVINGS = 3
_ROUNDS = 2  # each line once more after the others have moved
_NEAR_BEST = 0.9  # of the best rate: noise may be what it lacks
_PROMISES = 0.75  # of the best rate: more environments may make up for it
_FEW = 3  # are compared once more
_TURNS = 2  # of these
_OF_ALL = 0.25
_FOR_THAT_S = 24.0  # is kept, at most
_FAR = 2.0  # times as fast with workers: nobody need ask how fast it is without
_BUSY = 0.5


class OutOfTimeError(Exception):
    """There is not enough left for another trial."""


@dataclass
class Search:
    """What was tried, and what is to be tried.

    Attributes:
        space: of sizes.
        allowed: whether sizes can be, by all that is known without trying.
        measure: tries them.
        time_left: how much there is (s).
        cores: of the processor, for workers and learners.
        gpus: that learners have one each of (0: they learn on the CPU).
        tried: in order; the rates of sizes that were tried twice are both in `rates`.
        finished: nothing that is left promised more; else time ended it.
    """

    space: Space
    allowed: Callable[[Sizes], bool]
    measure: Measure
    time_left: Callable[[], float]
    cores: int = 1
    gpus: int = 0
    tried: dict[Sizes, Trial] = field(default_factory=dict)
    rates: dict[Sizes, list[float]] = field(default_factory=dict)
    finished: bool = True
    _kept_s: float = _FOR_THAT_S

    @property
    def best(self) -> Sizes:
        """The fastest of what was measured; the sizes to begin with, if nothing was.

        Where the batch is open, of those that are about as fast the one nearest to the first.
        """
        rates = {sizes: self.rate(sizes) for sizes in self.rates}
        return self._best_of(rates) if rates else self.space.base

    def _best_of(self, rates: dict[Sizes, float]) -> Sizes:
        fastest = max(rates, key=lambda sizes: rates[sizes])
        if self.space.batch is not None:
            return fastest
        near = [s for s in rates if rates[s] * _LARGER_PAYS >= rates[fastest]]

        def away(sizes: Sizes) -> float:
            return abs(math.log(sizes.batch / self.space.base.batch))

        return min(near, key=lambda sizes: (away(sizes), -rates[sizes]))

    def rate(self, sizes: Sizes) -> float:
        """Env steps/s, the mean of what was measured; 0: nothing was."""
        return statistics.fmean(self.rates[sizes]) if sizes in self.rates else 0.0

    def run(self) -> Sizes:
        """Search until nothing gets better, or there is no more time; the best sizes."""
        self._kept_s = min(_FOR_THAT_S, _OF_ALL * self.time_left())
        try:
            self._try(self._begin())
            for _ in range(_ROUNDS):
                before = self.best
                self._one_vector() if self.space.one_vector else self._vectors()
                if self.best == before:
                    break
            if not self.space.one_vector:
                self._other_ways()
        except OutOfTimeError:
            self.finished = False
        return self._compared_again()

    def largest(self, fits: Callable[[Sizes], bool | None], guess: float) -> Sizes | None:
        """The most environments that fit into memory, to a fifth; None: not known.

        Args:
            fits: tries sizes; None: there is no time.
            guess: how many times the best sizes may fit.
        """
        at = self.best
        values = {n: s for n in self.space.envs() if (s := self._envs_at(at, n)) is not None}
        above = sorted(n for n in values if n >= at.num_envs)
        least, most, stride = 0, len(above), 1  # above[least] fits; above[most] does not
        i = max((i for i, n in enumerate(above) if n <= guess * at.num_envs), default=0)
        while most - least > 1:
            i = min(max(i, least + 1), most - 1)
            if (found := fits(values[above[i]])) is None:
                return None
            least, most = (i, most) if found else (least, i)
            i, stride = least + stride, 2 * stride
            if most < len(above):
                i = (least + most) // 2
        return values[above[least]] if above else None

    def _begin(self) -> Sizes:
        """The sizes of settings and preset; where each learner has a GPU, with all of these."""
        base = self.space.base
        if self.gpus > 1 and "num_learners" in self.space.free:
            workers = base.num_workers
            spread = self._at(base, learners=self.gpus, workers=workers)
            if spread is not None and self.allowed(spread):
                return spread
        return base

    def _one_vector(self) -> None:
        self._learners()
        self._envs(self.best)
        at = self.best
        self._line({n: self._at(at, steps=n) for n in self.space.steps()}, at.num_steps)

    def _vectors(self) -> None:
        at, before = self.best, self.rate(self.best)
        wanted = at.num_envs if self._waits(at) else max(1, self.cores // at.num_learners)
        workers = self.space.workers(at.num_learners, at.num_envs)
        spread = min(workers, key=lambda n: (n == 0, abs(n - wanted)), default=0)
        self._try(self._workers_at(at, spread))
        if self.rate(self.best) < _FAR * before:
            self._try(self._workers_at(at, 0))
        lines = [lambda: self._envs(self.best), self._learners, self._more_workers]
        if self._waits(self.best):  # each environment has a worker: more of both
            lines.insert(0, lines.pop())
        for line in lines:
            line()
        self._envs(self.best)

    def _more_workers(self) -> None:
        if (at := self.best).num_workers:
            values = self.space.workers(at.num_learners, at.num_envs)
            line = {n: self._workers_at(at, n) for n in values if n}
            self._line(line, at.workers_each)

    def _other_ways(self) -> None:
        """More environments, or fewer, with other learners, or with workers and without."""

        def way(sizes: Sizes) -> tuple[int, bool]:
            return sizes.num_learners, sizes.num_workers > 0

        ascending = sorted(self.rates, key=self.rate)
        best_of = {way(sizes): sizes for sizes in ascending}  # later ones, which are better, stay
        for at in sorted(best_of.values(), key=self.rate, reverse=True):
            if way(at) != way(self.best) and self.rate(at) >= _PROMISES * self.rate(self.best):
                self._envs(at)

    def _waits(self, sizes: Sizes) -> bool:
        """Whether environments sleep, or wait for something: each can have a worker then."""
        used, processes = self.tried[sizes].busy_cores, max(1, sizes.num_workers)
        return 0.0 < used < _BUSY * min(self.cores, processes)

    def _learners(self) -> None:
        """More of them, while that pays."""
        if "num_learners" not in self.space.free or self.gpus:
            return
        count = 2 * self.best.num_learners
        while count <= self.cores:
            at, before = self.best, self.rate(self.best)
            for workers in {0, -(-at.num_workers // count)}:
                self._try(self._at(at, learners=count, workers=workers))
            if self.rate(self.best) < _PAYS * before:
                return
            count *= 2

    def _envs(self, at: Sizes) -> None:
        self._line({n: self._envs_at(at, n) for n in self.space.envs()}, at.num_envs)

    def _envs_at(self, at: Sizes, envs: int) -> Sizes | None:
        """Other sizes with so many environments."""
        workers = self.space.workers(at.num_learners, envs)
        fewer = max((n for n in workers if n <= at.workers_each), default=0)
        return self._at(at, workers=fewer, envs=envs)

    def _workers_at(self, at: Sizes, workers: int) -> Sizes | None:
        """Other sizes with so many workers of each learner: one environment each, at least."""
        return self._at(at, workers=workers, envs=max(at.num_envs, workers * at.num_learners))

    def _at(self, at: Sizes, **changed: int) -> Sizes | None:
        """Other sizes with some changed, as `Space.at` calls them."""
        like = {
            "learners": at.num_learners, "workers": at.workers_each,
            "envs": at.num_envs, "steps": at.num_steps,
        }  # fmt: skip
        return self.space.at(**like | changed)

    def _line(self, points: dict[int, Sizes | None], start: int) -> None:
        """Double while it pays, or halve; then halve the gap beside the best."""
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
        best, at, passed_over = start, start, False
        pays = _LARGER_PAYS if up and self.space.batch is None else _PAYS
        step = _doubled if up else _halved
        while (beyond := step(line, at)) is not None:
            at = beyond
            trial = self._try(line[at])
            if self.rate(line[at]) > pays * self.rate(line[best]):
                best, passed_over = at, False
            elif not passed_over and (
                trial.outcome == "crashed"  # it says nothing of what comes after
                or self.rate(line[at]) >= _NEAR_BEST * self.rate(line[best]) > 0.0
            ):
                passed_over = True
            elif up or self.rate(line[best]) or trial.outcome != "memory":
                break
        return best

    def _middle(self, line: dict[int, Sizes], best: int) -> int | None:
        """Between the best and its better neighbour."""
        tried = [n for n in line if line[n] in self.tried]
        below = max((n for n in tried if n < best), default=None)
        above = min((n for n in tried if n > best), default=None)

        def promise(n: int) -> float:
            # Up to where memory ends, it may get better still.
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
        """Try sizes, if they were not.

        Raises:
            OutOfTimeError: they were not, and there is no time.
        """
        if sizes is None or not self.allowed(sizes):
            return Trial("refused")
        if sizes not in self.tried:
            needed_s = self._typical_s()
            if self.time_left() < needed_s + min(_TURNS * _FEW * needed_s, self._kept_s):
                raise OutOfTimeError
            self._measure(sizes)
        return self.tried[sizes]

    def _measure(self, sizes: Sizes) -> None:
        trial = self.measure(sizes, self.rate(self.best))
        self.tried.setdefault(sizes, trial)
        if trial.outcome == "measured" and trial.rate is not None:
            self.rates.setdefault(sizes, []).append(trial.rate)

    def _compared_again(self) -> Sizes:
        """The best of the best few, measured again in turns, if they are close and there is time.

        A machine may be faster now and slower then: what was measured one after the other counts,
        and not what one of them reached at another time.
        """
        best = self.best
        near = [s for s in self.rates if self.rate(s) >= _NEAR_BEST * self.rate(best)]
        few = list(dict.fromkeys([best, *sorted(near, key=self.rate, reverse=True)]))[:_FEW]
        while few and self.time_left() < len(few) * self._typical_s():
            few.pop()
        if len(few) < 2:
            return best
        before = {sizes: len(self.rates[sizes]) for sizes in few}
        for _ in range(_TURNS):
            if self.time_left() >= len(few) * self._typical_s():
                for sizes in few:
                    self._measure(sizes)
        again = {sizes: self.rates[sizes][count:] for sizes, count in before.items()}
        means = {sizes: statistics.fmean(rates) for sizes, rates in again.items() if rates}
        return self._best_of(means) if means else best

    def _typical_s(self) -> float:
        """How long a trial takes."""
        took = [trial.took_s for trial in self.tried.values()]
        return 1.2 * statistics.fmean(took) if took else 0.0


def _doubled(line: dict[int, Sizes], at: int) -> int | None:
    """The next one that is twice as many; or the last, if there is none."""
    above = [n for n in line if n > at]
    return min((n for n in above if n >= 2 * at), default=max(above, default=None))


def _halved(line: dict[int, Sizes], at: int) -> int | None:
    below = [n for n in line if n < at]
    return max((n for n in below if n <= at / 2), default=min(below, default=None))
