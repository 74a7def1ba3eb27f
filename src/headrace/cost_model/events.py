"""Discrete events, and machines whose cores are shared: what a simulation is made of."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

_INSTANT_S = 1e-9  # rounding loses less

Callback = Callable[[], None]


class EventQueue:
    """Callbacks in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._number = itertools.count()  # orders events of the same time

    def schedule(self, time: float, callback: Callback) -> None:
        """Call `callback` at a simulated time."""
        heapq.heappush(self._heap, (time, next(self._number), callback))

    def run(self, until: Callable[[], bool]) -> None:
        """Process events until a condition holds."""
        while not until():
            self.now, _, callback = heapq.heappop(self._heap)
            callback()


@dataclass
class _Activity:
    """Work that sleeps and computes in fixed proportion; `left` falls from 1 to 0."""

    sleep: float
    cpu: float
    callback: Callback
    left: float = 1.0


class Machine:
    """A machine whose activities share its cores.

    If more activities compute than there are cores, all of them slow down by one factor.

    Args:
        cores: number of cores; 0: one for each activity.
    """

    def __init__(self, events: EventQueue, cores: float) -> None:
        self._events, self._cores = events, cores
        self._activities: list[_Activity] = []
        self._stretch, self._since, self._version = 1.0, 0.0, 0

    def begin(self, sleep: float, cpu: float, callback: Callback) -> None:
        """Begin an activity of `sleep` idle and `cpu` computing seconds; then call `callback`."""
        if not self._cores:
            self._events.schedule(self._events.now + sleep + cpu, callback)
            return
        self._advance()
        self._activities.append(_Activity(sleep, max(cpu, _INSTANT_S), callback))
        self._reschedule()

    def _advance(self) -> None:
        passed, self._since = self._events.now - self._since, self._events.now
        for activity in self._activities:
            activity.left -= passed / (activity.sleep + activity.cpu * self._stretch)

    def _reschedule(self) -> None:
        """Compute the slowdown and schedule the end of the activity that finishes first."""
        self._version += 1
        if not self._activities:
            return
        self._stretch = self._compute_stretch()
        version, left_s = self._version, min(map(self._left_s, self._activities))
        self._events.schedule(self._events.now + max(0.0, left_s), lambda: self._finish(version))

    def _left_s(self, activity: _Activity) -> float:
        return activity.left * (activity.sleep + activity.cpu * self._stretch)

    def _compute_stretch(self) -> float:
        """Return the slowdown at which all cores are just busy; 1 if some are free."""
        stretch = 1.0
        for _ in range(20):  # Newton's method from below: the sum is convex and falls
            busy = slope = 0.0
            for activity in self._activities:
                share = activity.cpu / (activity.sleep + activity.cpu * stretch)
                busy, slope = busy + share, slope + share * share
            if busy <= self._cores * 1.001:
                break
            stretch += (busy - self._cores) / slope
        return stretch

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # another activity began or ended meanwhile
        self._advance()
        ended = [each for each in self._activities if self._left_s(each) <= _INSTANT_S]
        self._activities = [each for each in self._activities if self._left_s(each) > _INSTANT_S]
        self._reschedule()
        for activity in ended:
            activity.callback()
