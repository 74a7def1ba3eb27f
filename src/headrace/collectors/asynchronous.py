"""Sampling in worker processes that never stop: whichever fragments are there first make a batch.

Before each step a worker takes newer weights, if there are any, and each step is stamped with their
version: at a step the weights are as new as can be, and how old they are when they are learned from
is measured. So nobody waits for the slowest; only who is too far ahead waits (`asynchronous.py`).

A fragment that is delivered is behind its environments, whether it will be learned from or not: a
worker that takes over, or a run that is resumed, goes on after it.

Left out: processes (`worker_pool.py`), and sampling batch by batch (`synchronous.py`).
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping

from headrace.collectors.api import Collected, Ledger, SamplingPlan, Say, ShouldStop
from headrace.collectors.backends.api import BackendFactory, WorkOrder
from headrace.collectors.backends.processes import ProcessBackend
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.collectors.worker_pool import WorkerPool
from headrace.meter import Laps
from headrace.models.policy import Policy
from headrace.spec import Array

# Which fragments make a batch where nobody waits for anybody: the first that are there.
#
# Each vector has 1 + lag *buffers*: pieces of memory for a fragment. A buffer goes
#
#     with its sampler -> in the queue -> with the learner -> with its sampler -> ...
#
# and a sampler that has none left waits: nothing is dropped. So beside the batch that is learned
# from at most `lag` others can be in the queue.


Buffer = tuple[int, int]
"""A vector, and which of its buffers."""


class Queue:
    """Of the fragments of one rank.

    Args:
        vectors: all of them; a batch has as many fragments.
        lag: L.
    """

    def __init__(self, vectors: Iterable[int], lag: int) -> None:
        self._vectors = list(vectors)
        self._lag = lag
        # A vector's own in turns, so that each vector has one before any has two.
        self._idle = deque((v, b) for b in range(1 + lag) for v in self._vectors)
        self._sampling: set[Buffer] = set()
        self._queued: deque[Buffer] = deque()
        self._learning: list[Buffer] = []

    def to_order(self) -> list[Buffer]:
        """What samplers are to fill now, in this order: theirs from here on."""
        found = list(self._idle)
        self._sampling |= set(found)
        self._idle.clear()
        return found

    def deliver(self, buffer: Buffer) -> None:
        """A sampler has filled it."""
        self._sampling.remove(buffer)
        self._queued.append(buffer)

    @property
    def has_batch(self) -> bool:
        """Whether there is enough for a batch."""
        return len(self._queued) >= len(self._vectors)

    @property
    def depth(self) -> float:
        """What is in the queue, in batches."""
        return len(self._queued) / len(self._vectors)

    def take(self) -> list[Buffer]:
        """The first that make a batch: the learner's from here on."""
        assert self.has_batch and not self._learning, self._learning
        self._learning = [self._queued.popleft() for _ in self._vectors]
        return list(self._learning)

    def release(self) -> None:
        """The learner has read what it took."""
        self._idle += self._learning
        self._learning = []


class AsynchronousCollector:
    """A `Collector` over worker processes, for algorithms that correct for the age of weights.

    Args: see `WorkersCollector`; `plan.lag` is 1 or more.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        num_workers: int,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
        make_seats: BackendFactory = ProcessBackend,
    ) -> None:
        self._plan, self._stop, self._say = plan, stop, say
        self._snapshots = EpisodeSnapshots(plan, state or {})
        self._crew = WorkerPool(
            plan, num_workers, self._snapshots, stop, say, remakes=False, make_seats=make_seats
        )
        self.restored = self._crew.restored
        self._queue = Queue(plan.vectors, plan.lag)
        self._ordered = {v: self._snapshots.steps([v]) for v in plan.vectors}
        self._filled: dict[Buffer, RolloutResult] = {}  # what is in the queue
        self._held: list[RolloutResult] = []  # of the batch that was collected last

    @property
    def ledger(self) -> Ledger:
        """See `Collector`."""
        return self._crew.ledger

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._crew.publish(policy, version)

    def collect(self) -> Collected | None:
        """See `Collector`."""
        if self._stop():
            return None
        self.release_batch(more=True)
        self._crew.look()  # in any case: whoever is lost is replaced while others fill the queue
        self._crew.serve(lambda: [] if self._has_batch() else self._crew.owing)
        if self._crew.told_to_stop or not self._has_batch():
            return None
        # Sorting is stable: of one vector, the earlier fragment stays before the later.
        batch = sorted(self._queue.take(), key=lambda buffer: buffer[0])
        self._held = [self._filled.pop(buffer) for buffer in batch]
        metrics = self._crew.metrics(self._held, self._queue.depth)
        fragments = [self._crew.fragment(*buffer) for buffer in batch]
        episodes = [episode for filled in self._held for episode in filled.episodes]
        env_steps = sum(filled.kept for filled in self._held)
        return Collected(fragments, env_steps, episodes, metrics)

    def release_batch(self, *, more: bool) -> None:
        """See `Collector`: samplers go on in any case."""
        self._queue.release()
        for v, buffer in self._queue.to_order():
            self._crew.order(WorkOrder(((v, buffer, self._ordered[v]),), None))
            self._ordered[v] += self._plan.num_steps
        self._crew.send(time.monotonic())

    def discard_batch(self) -> None:
        """See `Collector`."""
        self.ledger.lost += sum(filled.kept for filled in self._held)

    def halt(self) -> None:
        """See `Collector`."""
        self._crew.halt()
        self._hear()
        self.ledger.lost += sum(filled.kept for filled in self._filled.values())
        self._filled = {}

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        return self._snapshots.state()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        return self._crew.meters()

    def laps(self) -> dict[str, Laps]:
        """See `Collector`."""
        return self._crew.laps()

    def close(self) -> None:
        """See `Collector`."""
        self._crew.close()

    def _has_batch(self) -> bool:
        self._hear()
        return self._queue.has_batch

    def _hear(self) -> None:
        """Put what was delivered into the queue; a worker that was told to stop gives it up."""
        for order, filled in self._crew.delivered:
            ((v, buffer, _),) = order.fragments
            self.ledger.count(filled.taken, filled.lost, whole=filled.whole)
            self.ledger.drop(filled.dropped, self._say)
            if filled.whole:
                self._queue.deliver((v, buffer))
                self._filled[v, buffer] = filled
                self._snapshots.stage({v: self._crew.fragment(v, buffer)}, [filled])
                self._snapshots.accept()
        self._crew.delivered.clear()
