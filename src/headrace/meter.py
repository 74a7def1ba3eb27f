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
counted. Left out: adding up over processes and printing (`run/log.py`).
"""

import math
import time

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


_EXPONENTS = 64
_FINEST = -40  # 2^-40 s: the first bucket's upper edge


class Meter:
    """Seconds by span since `started`.

    Args:
        started: a reading of `time.perf_counter`; default: now.
        beats: its first element counts laps; default: memory of its own.
    """

    def __init__(
        self, started: float | None = None, beats: "memoryview[int] | list[int] | None" = None
    ) -> None:
        self.started = time.perf_counter() if started is None else started
        self.beats = [0] if beats is None else beats
        self._last = self.started
        self._seconds = dict.fromkeys(SPANS, 0.0)
        self._histograms = {span: [0] * _EXPONENTS for span in ("env_step", "env_reset")}

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

    def usual_s(self) -> float:
        """What 99.9 % of laps of environments stay below (s), within a factor of 2; 0: none yet."""
        return max(map(_percentile, self._histograms.values()))

    def seconds(self) -> dict[str, float]:
        """Seconds so far by span, without the empty ones; the time since the last lap is `other`.

        They add up to the time since `started`.
        """
        self.lap("other")
        return {span: s for span, s in self._seconds.items() if s > 0.0}


def _percentile(histogram: list[int]) -> float:
    """The upper edge of the bucket in which the 99.9th percentile lies."""
    wanted, seen = 0.999 * sum(histogram), 0
    for exponent, count in enumerate(histogram, start=_FINEST):
        seen += count
        if seen >= wanted:
            return math.ldexp(1.0, exponent) if seen else 0.0
    return 0.0
