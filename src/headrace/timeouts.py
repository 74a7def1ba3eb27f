"""How long something may be silent, and how often it may be begun again.

The clock is given with each call (seconds, monotonic), so that tests can bring their own. Left out:
what is done about it (`collectors/supervisor.py`, `collectors/watchdog.py`,
`envs/gym/python_vector.py`).
"""

from collections import deque
from typing import Any

WINDOW_S = 600.0
"""Restarts are counted over so many seconds."""
LEAST_LIMIT_S = 60.0
TIMES_USUAL = 20


class RestartRate:
    """At most `most` restarts in `WINDOW_S`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._at: deque[float] = deque()

    def again(self, now: float) -> bool:
        """Count one more; whether it is still within the limit."""
        while self._at and now - self._at[0] > WINDOW_S:
            self._at.popleft()
        self._at.append(now)
        return len(self._at) <= self._most


class StallTimer:
    """How long something has shown no progress, in time that was seen to pass.

    Whoever watches may itself have been stopped for a while (a suspended laptop, Ctrl-Z): a gap
    between two looks counts as `_LONGEST_GAP_S` at most.
    """

    _LONGEST_GAP_S = 1.0

    def __init__(self) -> None:
        self._progress: Any = None
        self._seen_at = self._lasted = 0.0

    def begin(self, now: float) -> None:
        """It is expected to make progress from now on."""
        self._progress, self._seen_at, self._lasted = None, now, 0.0

    def lasts(self, now: float, progress: Any) -> float:
        """Seconds without a change of `progress`, whatever that is."""
        if progress != self._progress:
            self.begin(now)
            self._progress = progress
        self._lasted += min(now - self._seen_at, self._LONGEST_GAP_S)
        self._seen_at = now
        return self._lasted


def step_timeout(given_s: float, usual_s: float) -> float:
    """How long a step or reset of an environment may take, in seconds.

    Args:
        given_s: by the user; 0: to be found.
        usual_s: the 99.9th percentile of what was seen (0: nothing yet).
    """
    return given_s or max(LEAST_LIMIT_S, TIMES_USUAL * usual_s)
