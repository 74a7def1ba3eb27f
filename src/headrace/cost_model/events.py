"""Events in their order, and machines whose cores are shared: what a simulation is made of.

Left out: what happens on them (`schedules.py`).
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

_INSTANT_S = 1e-9  # less is lost in rounding

Then = Callable[[], None]
"""What follows."""


class Events:
    """What happens when.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Then]] = []
        self._number = itertools.count()  # of two at a time, the first that was known of

    def at(self, time: float, then: Then) -> None:
        """Something will happen."""
        heapq.heappush(self._heap, (time, next(self._number), then))

    def run(self, until: Callable[[], bool]) -> None:
        """Let it happen, until something is true."""
        while not until():
            self.now, _, then = heapq.heappop(self._heap)
            then()


@dataclass
class _Job:
    """Something that sleeps and computes in fixed proportion; `left` falls from 1 to 0."""

    sleep: float
    cpu: float
    then: Then
    left: float = 1.0


class Machine:
    """Jobs that share cores: where more want to compute than there are, all take longer alike.

    Args:
        events: are told when a job ends.
        cores: 0: one for each job.
        speed: of each core.

    Attributes:
        cpu_s: core seconds of all jobs that have begun.
    """

    def __init__(self, events: Events, cores: float, speed: float = 1.0) -> None:
        self._events, self._cores, self._speed = events, cores, speed
        self._jobs: list[_Job] = []
        self._stretch, self._since, self._plan = 1.0, 0.0, 0
        self.cpu_s = 0.0

    def begin(self, sleep: float, cpu: float, then: Then) -> None:
        """A job of so many seconds asleep, and of computing; what follows when it is done."""
        cpu /= self._speed
        self.cpu_s += cpu
        if not self._cores:
            self._events.at(self._events.now + sleep + cpu, then)
            return
        self._advance()
        self._jobs.append(_Job(sleep, max(cpu, _INSTANT_S), then))
        self._reckon()

    def _advance(self) -> None:
        passed, self._since = self._events.now - self._since, self._events.now
        for job in self._jobs:
            job.left -= passed / (job.sleep + job.cpu * self._stretch)

    def _reckon(self) -> None:
        """How slow computing is now, and who is done first."""
        self._plan += 1
        if not self._jobs:
            return
        self._stretch = self._stretched()
        mine, left_s = self._plan, min(map(self._left_s, self._jobs))
        self._events.at(self._events.now + max(0.0, left_s), lambda: self._finish(mine))

    def _left_s(self, job: _Job) -> float:
        return job.left * (job.sleep + job.cpu * self._stretch)

    def _stretched(self) -> float:
        """The factor at which all cores are just busy; 1 if they are not."""
        stretch = 1.0
        for _ in range(20):  # Newton's method, from below: what is summed is convex, and falls
            busy = slope = 0.0
            for job in self._jobs:
                share = job.cpu / (job.sleep + job.cpu * stretch)
                busy, slope = busy + share, slope + share * share
            if busy <= self._cores * 1.001:
                break
            stretch += (busy - self._cores) / slope
        return stretch

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return  # something else began or ended meanwhile
        self._advance()
        ended = [job for job in self._jobs if self._left_s(job) <= _INSTANT_S]
        self._jobs = [job for job in self._jobs if self._left_s(job) > _INSTANT_S]
        self._reckon()
        for job in ended:
            job.then()
