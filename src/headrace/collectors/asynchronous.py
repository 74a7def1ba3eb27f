"""Sampling in worker processes that never stop: the first finished fragments make a batch.

Workers take the newest weights before each step, and stamp the step with their version. Only a
worker that is too far ahead waits. A finished fragment is never collected again: a new process, or
a resumed run, continues after it.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from headrace.collectors.api import Collected, SamplingPlan
from headrace.collectors.backends.api import WorkOrder
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.vector_collector import kept
from headrace.collectors.worker_pool import WorkerPool

Buffer = tuple[int, int]
"""A vector, and which of its buffers."""


class Queue:
    """The fragments of one rank. Nothing is dropped: a worker without a free buffer waits.

    Each vector has 1 + lag *buffers*, pieces of memory for a fragment. A buffer goes to its worker,
    into the queue, to the learner, and back. So at most `lag` batches are in the queue.

    Args:
        vectors: all vectors; a batch has one fragment for each.
    """

    def __init__(self, vectors: Iterable[int], lag: int) -> None:
        self._vectors = list(vectors)
        # The buffers of a vector come in turns: each vector has one before any has two.
        self._idle = deque((v, b) for b in range(1 + lag) for v in self._vectors)
        self._sampling: set[Buffer] = set()
        self._queued: deque[Buffer] = deque()
        self._learning: list[Buffer] = []

    def to_order(self) -> list[Buffer]:
        """Return the buffers that workers are to fill now, in this order."""
        buffers = list(self._idle)
        self._sampling |= set(buffers)
        self._idle.clear()
        return buffers

    def deliver(self, buffer: Buffer) -> None:
        """Queue a buffer that a worker has filled."""
        self._sampling.remove(buffer)
        self._queued.append(buffer)

    @property
    def has_batch(self) -> bool:
        """Return True if the queue holds a batch."""
        return len(self._queued) >= len(self._vectors)

    @property
    def depth(self) -> float:
        """Length of the queue, in batches."""
        return len(self._queued) / len(self._vectors)

    def take(self) -> list[Buffer]:
        """Give the learner the first buffers that make a batch."""
        assert self.has_batch and not self._learning, self._learning
        self._learning = [self._queued.popleft() for _ in self._vectors]
        return list(self._learning)

    def release(self) -> None:
        """Free the buffers that the learner took."""
        self._idle += self._learning
        self._learning = []


class AsynchronousCollector(WorkerPool):
    """A pool of workers that never stop, for algorithms that correct for old weights (lag >= 1)."""

    repeats_steps = False

    def __init__(self, plan: SamplingPlan, *arguments: Any, **keywords: Any) -> None:
        super().__init__(plan, *arguments, **keywords)
        self._queue = Queue(plan.vectors, plan.lag)
        self._steps = {v: self._snapshots.steps([v]) for v in plan.vectors}  # ordered so far
        self._queued: dict[Buffer, RolloutResult] = {}

    def collect(self) -> Collected | None:
        if self._stop():
            return None
        self.release_batch(more=True)
        self.poll()  # in any case: lost workers are replaced while others fill the queue
        self.run_until(lambda: self._has_batch() or not self.pending)
        if self.is_stopping or not self._has_batch():
            return None
        # Sorting is stable: of one vector, the earlier fragment stays before the later.
        batch = sorted(self._queue.take(), key=lambda buffer: buffer[0])
        results = [self._queued.pop(buffer) for buffer in batch]
        return self._batch(
            [self.fragments(*buffer) for buffer in batch], results, self._queue.depth
        )

    def release_batch(self, *, more: bool) -> None:
        """Free the batch's buffers and order them filled; `more` is ignored: workers never stop."""
        self._queue.release()
        orders = []
        for v, buffer in self._queue.to_order():
            fragment = v, buffer, self._steps[v]
            orders.append(WorkOrder((fragment,), None, self._env_changes, self._pool))
            self._steps[v] += self._plan.num_steps
        self.submit(orders)

    def halt(self) -> None:
        super().halt()
        self._enqueue()
        self.ledger.lost += kept(list(self._queued.values()))
        self._queued = {}

    def _has_batch(self) -> bool:
        self._enqueue()
        return self._queue.has_batch

    def _enqueue(self) -> None:
        """Put filled fragments into the queue. Those of a worker that was stopped are lost."""
        for order, result in self._done:
            ((v, buffer, _),) = order.fragments
            self._count(result, whole=result.whole)
            if result.whole:
                self._queue.deliver((v, buffer))
                self._queued[v, buffer] = result
                self._snapshots.stage({v: self.fragments(v, buffer)}, [result])
                self._snapshots.accept()
        self._done.clear()
