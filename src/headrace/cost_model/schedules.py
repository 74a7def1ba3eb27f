"""Who waits for whom, as a model: the three ways in which batches come about.

    Inline        learners step the environments themselves, in turns with learning
    InTurns       batch by batch, by workers: `collectors/synchronous.py`, at lag 0 and 1
    FirstReady    workers never stop: `collectors/asynchronous.py`

Learners of all ranks update in step: none is done before the last. Left out: what takes how long
(`Work`, from `model.py`), and machines (`events.py`).
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headrace.cost_model.events import Events, Machine, Then


class Work(Protocol):
    """What things take, in seconds.

    Attributes:
        learn_s: of one update, on each rank.
        hand_over_s: at the learner, for an order and its answer.
        latency_s: of an order and its answer, while nobody computes.
    """

    learn_s: float
    hand_over_s: float
    latency_s: float

    def fragment(self) -> tuple[float, float]:
        """Of the next fragment: asleep, and computing."""


@dataclass
class Worker:
    """Fills fragments of its vectors, one after the other.

    Attributes:
        machine: where.
        vectors: by their index in the rank.
        busy_s: time in which it did.
        orders: vectors that it is to fill a fragment of.
        is_busy: whether it has one under way.
    """

    machine: Machine
    vectors: list[int]
    busy_s: float = 0.0
    orders: deque[int] = field(default_factory=deque)
    is_busy: bool = False


@dataclass
class Rank:
    """A learner and its workers.

    Attributes:
        machine: of the learner.
        workers: none: the learner steps the environments.
        num_vectors: that a batch has a fragment of, each.
        busy_s: time in which the learner learned.
        free_at: when it will have heard all that was said so far.
        queue: vectors whose fragments wait.
    """

    machine: Machine
    workers: list[Worker]
    num_vectors: int
    busy_s: float = 0.0
    free_at: float = 0.0
    queue: deque[int] = field(default_factory=deque)


class Schedule(Protocol):
    """One of the three."""

    def begin(self) -> None:
        """The first things that happen."""


class Learning:
    """Updates of all ranks, in step.

    Args:
        events: what happens when.
        ranks: that learn.
        learn_s: of one update, on each rank.

    Attributes:
        updates: when each ended.
    """

    def __init__(self, events: Events, ranks: list[Rank], learn_s: float) -> None:
        self._events, self._ranks, self._learn_s = events, ranks, learn_s
        self._num_learning = 0
        self.updates: list[float] = []

    def begin(self, then: Then) -> None:
        """An update; what follows it."""
        self._num_learning = len(self._ranks)
        for rank in self._ranks:
            done = partial(self._done, rank, self._events.now, then)
            rank.machine.begin(0.0, self._learn_s, done)

    def _done(self, rank: Rank, began: float, then: Then) -> None:
        rank.busy_s += self._events.now - began
        self._num_learning -= 1
        if not self._num_learning:
            self.updates.append(self._events.now)
            then()


def fragments(work: Work, count: int) -> tuple[float, float]:
    """Several, one after the other: seconds asleep, and computing."""
    parts = [work.fragment() for _ in range(count)]
    return sum(asleep for asleep, _ in parts), sum(computing for _, computing in parts)


class Inline:
    """Learners step the environments themselves."""

    def __init__(self, learning: Learning, ranks: list[Rank], work: Work) -> None:
        self._learning, self._ranks, self._work = learning, ranks, work
        self._num_collecting = 0

    def begin(self) -> None:
        """Collect."""
        self._num_collecting = len(self._ranks)
        for rank in self._ranks:
            rank.machine.begin(*fragments(self._work, rank.num_vectors), self._collected)

    def _collected(self) -> None:
        self._num_collecting -= 1
        if not self._num_collecting:
            self._learning.begin(self.begin)


class InTurns:
    """All workers fill the fragments of one batch; at lag 1 beside the update, else after it."""

    def __init__(
        self, events: Events, learning: Learning, ranks: list[Rank], work: Work, *, beside: bool
    ) -> None:
        self._events, self._learning, self._ranks, self._work = events, learning, ranks, work
        self._beside = beside
        self._is_free, self._is_collected, self._num_collecting = True, False, 0

    def begin(self) -> None:
        """Order a batch."""
        self._is_collected = False
        self._num_collecting = sum(len(rank.workers) for rank in self._ranks)
        for rank in self._ranks:
            rank.free_at = self._events.now
            for worker in rank.workers:
                rank.free_at += self._work.hand_over_s / 2
                at = rank.free_at + self._work.latency_s / 2
                self._events.at(at, partial(self._fill, rank, worker))

    def _fill(self, rank: Rank, worker: Worker) -> None:
        seconds = fragments(self._work, len(worker.vectors))
        worker.machine.begin(*seconds, partial(self._filled, rank, worker, self._events.now))

    def _filled(self, rank: Rank, worker: Worker, began: float) -> None:
        worker.busy_s += self._events.now - began
        heard = max(rank.free_at, self._events.now + self._work.latency_s / 2)
        rank.free_at = heard + self._work.hand_over_s / 2
        self._num_collecting -= 1
        if not self._num_collecting:
            self._events.at(max(of.free_at for of in self._ranks), self._collected)

    def _collected(self) -> None:
        self._is_collected = True
        self._learn_if_both()

    def _updated(self) -> None:
        self._is_free = True
        if self._beside:
            self._learn_if_both()
        else:
            self.begin()

    def _learn_if_both(self) -> None:
        if self._is_free and self._is_collected:
            self._is_free = False
            if self._beside:
                self.begin()
            self._learning.begin(self._updated)


class FirstReady:
    """The fragments that are there first make a batch; each vector has 1 + lag of them."""

    def __init__(
        self, events: Events, learning: Learning, ranks: list[Rank], work: Work, *, lag: int
    ) -> None:
        self._events, self._learning, self._ranks, self._work = events, learning, ranks, work
        self._lag, self._is_free = lag, True

    def begin(self) -> None:
        """All fragments are to be filled."""
        for rank in self._ranks:
            for _ in range(1 + self._lag):
                self._order(rank, list(range(rank.num_vectors)))

    def _order(self, rank: Rank, vectors: list[int]) -> None:
        for v in vectors:
            worker = rank.workers[v % len(rank.workers)]
            worker.orders.append(v)
            if not worker.is_busy:
                worker.is_busy = True
                at = self._events.now + self._work.latency_s / 2
                self._events.at(at, partial(self._fill, rank, worker))

    def _fill(self, rank: Rank, worker: Worker) -> None:
        vector, began = worker.orders.popleft(), self._events.now
        then = partial(self._filled, rank, worker, vector, began)
        worker.machine.begin(*self._work.fragment(), then)

    def _filled(self, rank: Rank, worker: Worker, vector: int, began: float) -> None:
        worker.busy_s += self._events.now - began
        rank.queue.append(vector)
        if worker.orders:
            self._fill(rank, worker)
        else:
            worker.is_busy = False
        self._take()

    def _take(self) -> None:
        if not self._is_free or any(len(r.queue) < r.num_vectors for r in self._ranks):
            return
        self._is_free = False
        for rank in self._ranks:
            # The learner copies what it takes: the buffers are samplers' again at once.
            self._order(rank, [rank.queue.popleft() for _ in range(rank.num_vectors)])
        self._learning.begin(self._updated)

    def _updated(self) -> None:
        self._is_free = True
        self._take()
