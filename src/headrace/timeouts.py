"""Limits: seconds without progress, and restarts in a window of time.

Each call gets the time (seconds, monotonic), so that tests can use a clock of their own.
"""

from collections import deque
from typing import Any

WINDOW_S = 600.0
"""Seconds over which restarts are counted."""
LEAST_LIMIT_S = 60.0
TIMES_USUAL = 20


class RestartRate:
    """At most `most` restarts in `WINDOW_S`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: deque[float] = deque()

    def again(self, now: float) -> bool:
        """Count one more restart. Return whether it is within the limit."""
        while self._at and now - self._at[0] > WINDOW_S:
            self._at.popleft()
        self._at.append(now)
        return len(self._at) <= self._most


class StallTimer:
    """Seconds without progress, of time that the watcher saw pass.

    The watcher may have been stopped itself (a suspended laptop, Ctrl-Z). So a gap between two
    calls counts as `_LONGEST_GAP_S` at most.
    """

    _LONGEST_GAP_S = 1.0

    def __init__(self) -> None:
        self._progress: Any = None
        self._seen_at = self._lasted = 0.0

    def begin(self, now: float) -> None:
        """Expect progress from now on."""
        self._progress, self._seen_at, self._lasted = None, now, 0.0

    def lasts(self, now: float, progress: Any) -> float:
        """Return the seconds without a change of `progress`, any value."""
        if progress != self._progress:
            self.begin(now)
            self._progress = progress
        self._lasted += min(now - self._seen_at, self._LONGEST_GAP_S)
        self._seen_at = now
        return self._lasted


def step_timeout(explicit_s: float, usual_s: float) -> float:
    """Return the seconds that a step or reset of an environment may take.

    Args:
        explicit_s: set by the user; 0: derive the limit from `usual_s`.
        usual_s: the 99.9th percentile so far (0: none yet).
    """
    return explicit_s or max(LEAST_LIMIT_S, TIMES_USUAL * usual_s)
