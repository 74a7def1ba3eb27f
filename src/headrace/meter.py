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

Left out: adding up over processes and printing (`run/log.py`).
"""

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


class Meter:
    """Seconds by span since `started` (a reading of `time.perf_counter`; default: now)."""

    def __init__(self, started: float | None = None) -> None:
        self.started = time.perf_counter() if started is None else started
        self._last = self.started
        self._seconds = dict.fromkeys(SPANS, 0.0)

    def lap(self, span: str) -> None:
        """Give the time since the last lap to `span` (KeyError if there is no such span)."""
        now = time.perf_counter()
        self._seconds[span] += now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds so far by span, without the empty ones; the time since the last lap is `other`.

        They add up to the time since `started`.
        """
        self.lap("other")
        return {span: s for span, s in self._seconds.items() if s > 0.0}
