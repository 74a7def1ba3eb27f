"""A meter of one process: every second belongs to exactly one span.

A lap gives the time since the last lap to a span. So the spans add up to the life of the process,
and a step of the loop reads the clock once.

Each lap is also a heartbeat that another process can see. Laps of environments are counted by their
duration. With a timeline, each lap is kept.
"""

import math
import time
from array import array
from typing import NamedTuple

SPANS = (
    "start",  # imports, building environments and models, waiting for workers to come up
    "env_step",  # the environments' step
    "env_reset",  # the environments' reset
    "infer",  # the policy's forward pass, sampling, writing its outputs
    "rollout",  # the rest of a worker's inner loop: noise table, bookkeeping of episodes
    "wait",  # learner: for workers; worker: for the next order
    "transport",  # joining fragments into a batch, moving it to the learner's device
    "replay",  # storing transitions, drawing them, writing their priorities
    "learn",  # targets, loss, backward, optimizer, normalizers
    "allreduce",  # summing gradients over ranks, waiting for them (CPU ranks of one host)
    "ranks",  # exchanging counts, moments and states of workers between ranks
    "publish",  # writing weights for workers; in a worker, reading them
    "eval",  # evaluating the policy during training
    "log",  # metrics files and display
    "checkpoint",  # saving and restoring
    "other",  # the rest
)

MOST_LAPS = 500_000
"""Laps kept of each process, at least: half an hour of laps of 4 ms."""

_INDEX = {span: i for i, span in enumerate(SPANS)}
_EXPONENTS = 64
_FINEST = -40  # 2^-40 s: the first bucket's upper edge


class Laps:
    """The newest laps of one process, one after the other.

    Attributes:
        begin: of the first lap that is kept (s, of one clock for all).
        spans: index in `SPANS` of each lap.
        ends: of each lap (s).
        cpu_s: seconds that the process computed meanwhile, dropped laps included.
        queued_s: seconds that it waited for a core, likewise (0 if the system does not count them).
    """

    def __init__(self, begin: float, cpu_s: float = 0.0, queued_s: float = 0.0) -> None:
        self.begin, self.spans, self.ends = begin, bytearray(), array("d")
        self.cpu_s, self.queued_s = cpu_s, queued_s

    def add(self, span: int, end: float) -> None:
        """Add a lap. A lap of the same span as the one before extends that one."""
        if self.spans and self.spans[-1] == span:
            self.ends[-1] = end
            return
        self.spans.append(span)
        self.ends.append(end)
        if len(self.spans) > 2 * MOST_LAPS:
            self._drop(MOST_LAPS)

    def join(self, later: "Laps") -> None:
        """Append later laps of the same process, or of its replacement."""
        if self.spans and later.begin > self.ends[-1]:
            self.add(SPANS.index("other"), later.begin)
        elif not self.spans:
            self.begin = later.begin
        self.cpu_s += later.cpu_s
        self.queued_s += later.queued_s
        self.spans += later.spans
        self.ends += later.ends
        self._drop(len(self.spans) - 2 * MOST_LAPS)

    def _drop(self, oldest: int) -> None:
        if oldest > 0:
            self.begin = self.ends[oldest - 1]
            del self.spans[:oldest], self.ends[:oldest]


class Readings(NamedTuple):
    """A meter's results, sent to another process. `laps` are those since the last reading."""

    seconds: dict[str, float]
    usual_s: float
    laps: Laps | None


class Timings:
    """Results of one worker's meters, over all its processes."""

    def __init__(self) -> None:
        self.usual_s = 0.0  # see `Meter.usual_s`
        self.laps: Laps | None = None  # if they are kept
        self._past: dict[str, float] = {}
        self._latest: dict[str, float] = {}

    def read(self, readings: Readings) -> None:
        """Enter what the present process has measured."""
        self._latest, self.usual_s, laps = readings
        if self.laps and laps:
            self.laps.join(laps)
        else:
            self.laps = self.laps or laps

    def seconds(self) -> dict[str, float]:
        """Return the seconds by span."""
        past, latest = self._past, self._latest
        return {span: past.get(span, 0.0) + latest.get(span, 0.0) for span in past | latest}

    def retire(self) -> None:
        """Keep the seconds of the present process, which has ended."""
        self._past, self._latest = self.seconds(), {}


class Meter:
    """Seconds by span since `started`.

    Args:
        started: a reading of `time.perf_counter`; default: now.
        beats: memory whose first element counts laps; default: a list.
        keeps_laps: for a timeline.
    """

    def __init__(
        self,
        started: float | None = None,
        beats: "memoryview[int] | list[int] | None" = None,
        *,
        keeps_laps: bool = False,
    ) -> None:
        self.started = time.perf_counter() if started is None else started
        self.beats = [0] if beats is None else beats
        self._last = self.started
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._histograms = {span: [0] * _EXPONENTS for span in ("env_step", "env_reset")}
        self.keep_laps(keep=keeps_laps)

    def keep_laps(self, *, keep: bool = True) -> None:
        """Keep the laps from now on, or stop."""
        self._laps = Laps(self._last) if keep else None
        self._core_s = _core_seconds() if keep else (0.0, 0.0)

    def lap(self, span: str) -> None:
        """Give the time since the last lap to `span` (KeyError if there is no such span)."""
        now = time.perf_counter()
        took = now - self._last
        self._seconds[span] += took
        self._last = now
        self.beats[0] += 1
        if span in self._histograms:
            # By powers of two: the exponent costs less than any other bucket.
            self._histograms[span][math.frexp(took)[1] - _FINEST] += 1
        if self._laps is not None:
            self._laps.add(_INDEX[span], now)

    def usual_s(self) -> float:
        """Return the 99.9th percentile of environments' laps (s), up to twofold; 0: none yet."""
        return max(map(_percentile, self._histograms.values()))

    def seconds(self) -> dict[str, float]:
        """Return span -> seconds since `started`. The time since the last lap is `other`."""
        self.lap("other")
        return {span: s for span, s in self._seconds.items() if s > 0.0}

    def readings(self) -> Readings:
        """Return all results; the laps are those since the last call."""
        return Readings(self.seconds(), self.usual_s(), self.take_laps())

    def take_laps(self) -> Laps | None:
        """Return the laps since the last call, in seconds since 1970, which all machines share."""
        if (laps := self._laps) is None:
            return None
        before = self._core_s
        self._laps, self._core_s = Laps(self._last), _core_seconds()
        laps.cpu_s, laps.queued_s = (now - b for now, b in zip(self._core_s, before, strict=True))
        ahead = time.time() - time.perf_counter()
        laps.begin, laps.ends = laps.begin + ahead, array("d", [end + ahead for end in laps.ends])
        return laps


def _core_seconds() -> tuple[float, float]:
    """Return the seconds that this process computed, and that it waited for a core (on Linux)."""
    try:
        with open("/proc/self/schedstat") as file:
            queued_ns = int(file.read().split()[1])
    except OSError:
        queued_ns = 0
    return time.process_time(), queued_ns / 1e9


def _percentile(histogram: list[int]) -> float:
    """Return the upper edge of the bucket that holds the 99.9th percentile."""
    rank, seen = 0.999 * sum(histogram), 0
    for exponent, count in enumerate(histogram, start=_FINEST):
        seen += count
        if seen >= rank:
            return math.ldexp(1.0, exponent) if seen else 0.0
    return 0.0
