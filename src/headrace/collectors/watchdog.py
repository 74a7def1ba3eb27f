"""Ends a process whose own environment hangs, by a thread that watches its progress.

An extension that hangs with Python's lock held stops this thread as well; only another process (a
worker's learner) can detect that.
"""

import threading
import time
from collections.abc import Callable

from headrace import timeouts
from headrace.distributed.stuck import end_stuck
from headrace.envs.api import Guards
from headrace.meter import Meter

_CHECK_EVERY_S = 0.5


class Watchdog:
    """A watchdog, active within the `with`.

    Args:
        meter: this process's meter; its laps are progress.
        count_left: returns the number of env steps still to take; any change is progress.
    """

    def __init__(
        self,
        meter: Meter,
        guards: Guards,
        count_left: Callable[[], int],
        position: Callable[[], str],
    ) -> None:
        self._meter, self._guards = meter, guards
        self._count_left, self._position = count_left, position
        self._entered, self._closed = False, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._stall = timeouts.StallTimer()

    def __enter__(self) -> None:
        if self._guards.enabled and self._thread.ident is None:
            self._thread.start()
        self._stall.begin(time.monotonic())
        self._entered = True

    def __exit__(self, *_: object) -> None:
        self._entered = False

    def close(self) -> None:
        """Stop watching for good."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(_CHECK_EVERY_S, self._limit_s() / 4)):
            if self._entered:
                progress = self._meter.beats[0], self._count_left()
                limit_s = self._limit_s()
                if self._stall.lasts(time.monotonic(), progress) > limit_s and self._entered:
                    self._end(limit_s)

    def _limit_s(self) -> float:
        return timeouts.step_timeout(self._guards.env_timeout_s, self._meter.usual_s())

    def _end(self, limit_s: float) -> None:
        end_stuck(
            f"\nheadrace: the environment has not answered for {limit_s:g} s (--env-timeout-s), "
            f"{self._position()}. It is stuck here, in this process, which ends:"
        )
