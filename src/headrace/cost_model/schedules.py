"""Simulated schedules of workers and learners, one class for each kind of collector.

Learners of all ranks update together: no update ends before the slowest.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from headrace.cost_model.events import Callback, EventQueue, Machine


@dataclass
class WorkTimes:
    """Seconds that the simulated work takes.

    Attributes:
        fragments: idle and computing seconds of the next fragment, without end.
        learn_s: one update on each rank.
        hand_over_s: the learner's time for an order and its answer.
        latency_s: idle time of an order and its answer.
    """

    fragments: Iterator[tuple[float, float]]
    learn_s: float
    hand_over_s: float
    latency_s: float

    def sum_fragments(self, count: int) -> tuple[float, float]:
        """Return idle and computing seconds of `count` fragments in sequence."""
        parts = [next(self.fragments) for _ in range(count)]
        return sum(idle for idle, _ in parts), sum(computing for _, computing in parts)


@dataclass
class SimulatedWorker:
    """A worker that fills the fragments of its vectors in sequence; `orders` wait for it."""

    machine: Machine
    vectors: list[int]
    orders: deque[int] = field(default_factory=deque)
    is_busy: bool = False


@dataclass
class SimulatedRank:
    """A learner and its workers.

    Attributes:
        workers: empty if the learner steps the environments.
        free_at: when the learner will have received all answers sent so far.
        queue: vectors whose filled fragments wait.
    """

    machine: Machine
    workers: list[SimulatedWorker]
    num_vectors: int
    free_at: float = 0.0
    queue: deque[int] = field(default_factory=deque)


class Schedule(ABC):
    """The order of the work of all ranks; `updates` has the time at which each update ended."""

    def __init__(
        self, events: EventQueue, ranks: list[SimulatedRank], times: WorkTimes, lag: int
    ) -> None:
        self._events, self._ranks, self._times, self._lag = events, ranks, times, lag
        self._is_free, self._is_collected = True, False
        self._num_collecting = self._num_learning = 0
        self.updates: list[float] = []

    @abstractmethod
    def begin(self) -> None:
        """Schedule the first events."""

    def _learn(self, callback: Callback) -> None:
        """Begin an update; call `callback` when all ranks have finished it."""
        self._num_learning = len(self._ranks)
        for rank in self._ranks:
            rank.machine.begin(0.0, self._times.learn_s, partial(self._learned, callback))

    def _learned(self, callback: Callback) -> None:
        self._num_learning -= 1
        if not self._num_learning:
            self.updates.append(self._events.now)
            callback()


class InlineSchedule(Schedule):
    """Learners step the environments themselves."""

    def begin(self) -> None:
        self._num_collecting = len(self._ranks)
        for rank in self._ranks:
            seconds = self._times.sum_fragments(rank.num_vectors)
            rank.machine.begin(*seconds, self._count_collected)

    def _count_collected(self) -> None:
        self._num_collecting -= 1
        if not self._num_collecting:
            self._learn(self.begin)


class SynchronousSchedule(Schedule):
    """Workers fill one batch at a time: at lag 1 during the update, else after it."""

    def begin(self) -> None:
        self._is_collected = False
        self._num_collecting = sum(len(rank.workers) for rank in self._ranks)
        for rank in self._ranks:
            rank.free_at = self._events.now
            for worker in rank.workers:
                rank.free_at += self._times.hand_over_s / 2
                time = rank.free_at + self._times.latency_s / 2
                self._events.schedule(time, partial(self._fill, rank, worker))

    def _fill(self, rank: SimulatedRank, worker: SimulatedWorker) -> None:
        seconds = self._times.sum_fragments(len(worker.vectors))
        worker.machine.begin(*seconds, partial(self._filled, rank))

    def _filled(self, rank: SimulatedRank) -> None:
        received = max(rank.free_at, self._events.now + self._times.latency_s / 2)
        rank.free_at = received + self._times.hand_over_s / 2
        self._num_collecting -= 1
        if not self._num_collecting:
            self._events.schedule(max(each.free_at for each in self._ranks), self._collected)

    def _collected(self) -> None:
        self._is_collected = True
        self._learn_if_ready()

    def _updated(self) -> None:
        self._is_free = True
        if self._lag:
            self._learn_if_ready()
        else:
            self.begin()

    def _learn_if_ready(self) -> None:
        if self._is_free and self._is_collected:
            self._is_free = False
            if self._lag:
                self.begin()
            self._learn(self._updated)


class AsynchronousSchedule(Schedule):
    """The first fragments that are ready make a batch; each vector has 1 + lag buffers."""

    def begin(self) -> None:
        for rank in self._ranks:
            for _ in range(1 + self._lag):
                self._order(rank, list(range(rank.num_vectors)))

    def _order(self, rank: SimulatedRank, vectors: list[int]) -> None:
        for v in vectors:
            worker = rank.workers[v % len(rank.workers)]
            worker.orders.append(v)
            if not worker.is_busy:
                worker.is_busy = True
                time = self._events.now + self._times.latency_s / 2
                self._events.schedule(time, partial(self._fill, rank, worker))

    def _fill(self, rank: SimulatedRank, worker: SimulatedWorker) -> None:
        filled = partial(self._filled, rank, worker, worker.orders.popleft())
        worker.machine.begin(*next(self._times.fragments), filled)

    def _filled(self, rank: SimulatedRank, worker: SimulatedWorker, vector: int) -> None:
        rank.queue.append(vector)
        if worker.orders:
            self._fill(rank, worker)
        else:
            worker.is_busy = False
        self._learn_if_ready()

    def _learn_if_ready(self) -> None:
        if not self._is_free or any(len(r.queue) < r.num_vectors for r in self._ranks):
            return
        self._is_free = False
        for rank in self._ranks:
            # The learner copies what it takes, so the buffers return to the workers at once.
            self._order(rank, [rank.queue.popleft() for _ in range(rank.num_vectors)])
        self._learn(self._updated)

    def _updated(self) -> None:
        self._is_free = True
        self._learn_if_ready()
