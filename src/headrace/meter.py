"""Where the time of one process goes: every second belongs to exactly one span.

A lap gives the time since the last lap to a span, so that the spans of a process always add up to
its life, and a step of the loop costs one reading of the clock, not two. The spans:

    start        imports, building environments and models, waiting for workers to come up
    env_step     environments' own step
    env_reset    environments' own reset
    infer        the policy's forward pass, sampling, writing its outputs
    rollout      the rest of a sampler's inner loop: noise table, bookkeeping of episodes
    wait         learner: for samplers; sampler: for the next command
    transport    joining fragments into a batch, moving it to the learner's device
    learn        targets, loss, backward, optimizer, normalizers
    allreduce    summing gradients over ranks, waiting for them (CPU ranks of one host)
    ranks        what ranks tell each other besides: counts, moments, states of samplers
    publish      handing weights to samplers
    eval         evaluating the policy during training
    log          metrics files and display
    checkpoint   saving and restoring
    other        whatever is left

Each lap is also a heartbeat, which another process can see, and how long environments take is
counted. Where a timeline is wanted, each lap is kept. Left out: adding up over processes and
printing (`training/log.py`), and files (`storage/timeline.py`).
"""

import math
import time
from array import array
from typing import NamedTuple

SPANS = (
    "start",
    "env_step",
    "env_reset",
    "infer",
    "rollout",
    "wait",
    "transport",
    "learn",
    "allreduce",
    "ranks",
    "publish",
    "eval",
    "log",
    "checkpoint",
    "other",
)

MOST_LAPS = 500_000
"""That are kept of each process, at least; half an hour, where each lap takes 4 ms."""

_INDEX = {span: i for i, span in enumerate(SPANS)}
_EXPONENTS = 64
_FINEST = -40  # 2^-40 s: the first bucket's upper edge


class Laps:
    """What one process did when: laps that follow each other, the newest of them.

    Args:
        begin: when the first one begins (seconds, of one clock for all).

    Attributes:
        begin: likewise; later, where the oldest were dropped.
        spans: index in `SPANS` of each.
        ends: when each ended.
        cpu_s: seconds that the process computed meanwhile, dropped laps included.
        queued_s: seconds that it waited for a core, likewise (0 where the system does not say).
    """

    def __init__(self, begin: float, cpu_s: float = 0.0, queued_s: float = 0.0) -> None:
        self.begin, self.spans, self.ends = begin, bytearray(), array("d")
        self.cpu_s, self.queued_s = cpu_s, queued_s

    def add(self, span: int, end: float) -> None:
        """A lap ended; of the same span as the one before, it is part of that."""
        if self.spans and self.spans[-1] == span:
            self.ends[-1] = end
            return
        self.spans.append(span)
        self.ends.append(end)
        if len(self.spans) > 2 * MOST_LAPS:
            self._drop(MOST_LAPS)

    def join(self, later: "Laps") -> None:
        """Go on with those of the same process, or of the one in its place."""
        if self.spans and later.begin > self.ends[-1]:
            self.add(SPANS.index("other"), later.begin)
        elif not self.spans:
            self.begin = later.begin
        self.cpu_s += later.cpu_s
        self.queued_s += later.queued_s
        self.spans += later.spans
        self.ends += later.ends
        self._drop(len(self.spans) - 2 * MOST_LAPS)

    def shifted(self, by: float) -> "Laps":
        """The same on another clock."""
        moved = Laps(self.begin + by, self.cpu_s, self.queued_s)
        moved.spans, moved.ends = self.spans[:], array("d", [end + by for end in self.ends])
        return moved

    def _drop(self, oldest: int) -> None:
        if oldest > 0:
            self.begin = self.ends[oldest - 1]
            del self.spans[:oldest], self.ends[:oldest]


class Readings(NamedTuple):
    """Of a meter, as it is told to another process.

    Attributes:
        seconds: see `Meter.seconds`.
        usual_s: see `Meter.usual_s`.
        laps: since the last reading; None: they are not kept.
    """

    seconds: dict[str, float]
    usual_s: float
    laps: Laps | None


class Meter:
    """Seconds by span since `started`.

    Args:
        started: a reading of `time.perf_counter`; default: now.
        beats: its first element counts laps; default: memory of its own.
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
        self.keep_laps(wanted=keeps_laps)

    def keep_laps(self, *, wanted: bool = True) -> None:
        """Keep what was done when, from here on; or do not."""
        self._laps = Laps(self._last) if wanted else None
        self._of_cores = _of_cores() if wanted else (0.0, 0.0)

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
        """What 99.9 % of laps of environments stay below (s), within a factor of 2; 0: none yet."""
        return max(map(_percentile, self._histograms.values()))

    def seconds(self) -> dict[str, float]:
        """Seconds so far by span, without the empty ones; the time since the last lap is `other`.

        They add up to the time since `started`.
        """
        self.lap("other")
        return {span: s for span, s in self._seconds.items() if s > 0.0}

    def readings(self) -> Readings:
        """What there is to tell."""
        return Readings(self.seconds(), self.usual_s(), self.take_laps())

    def take_laps(self) -> Laps | None:
        """Since the last time, in seconds since 1970 (what other machines have, too)."""
        if (laps := self._laps) is None:
            return None
        before = self._of_cores
        self._laps, self._of_cores = Laps(self._last), _of_cores()
        laps.cpu_s, laps.queued_s = (now - b for now, b in zip(self._of_cores, before, strict=True))
        return laps.shifted(time.time() - time.perf_counter())


def _of_cores() -> tuple[float, float]:
    """Seconds that this process has computed; and that it has waited for a core, if Linux says."""
    try:
        with open("/proc/self/schedstat") as file:
            queued_ns = int(file.read().split()[1])
    except OSError:
        queued_ns = 0
    return time.process_time(), queued_ns / 1e9


def _percentile(histogram: list[int]) -> float:
    """The upper edge of the bucket in which the 99.9th percentile lies."""
    wanted, seen = 0.999 * sum(histogram), 0
    for exponent, count in enumerate(histogram, start=_FINEST):
        seen += count
        if seen >= wanted:
            return math.ldexp(1.0, exponent) if seen else 0.0
    return 0.0
