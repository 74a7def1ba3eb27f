"""Sampling in worker processes that never stop: whichever fragments are there first make a batch.

Before each step a worker takes newer weights, if there are any, and each step is stamped with their
version: at a step the weights are as new as can be, and how old they are when they are learned from
is measured. So nobody waits for the slowest; only who is too far ahead waits (`queue.py`).

A fragment that is delivered is behind its environments, whether it will be learned from or not: a
worker that takes over, or a run that is resumed, goes on after it.

Left out: processes (`worker_pool.py`), and sampling batch by batch (`synchronous.py`).
"""

import time
from collections.abc import Mapping

from headrace.collectors.api import Collected, Ledger, Plan, Say, ShouldStop
from headrace.collectors.backends.api import MakeSeats
from headrace.collectors.backends.orders import Order
from headrace.collectors.backends.processes import Processes
from headrace.collectors.queue import Buffer, Queue
from headrace.collectors.rollout import Filled
from headrace.collectors.snapshots import Journals
from headrace.collectors.worker_pool import Crew
from headrace.meter import Laps
from headrace.models.policy import Policy
from headrace.spec import Array


class NonstopCollector:
    """A `Collector` over worker processes, for algorithms that correct for the age of weights.

    Args: see `WorkersCollector`; `plan.lag` is 1 or more.
    """

    def __init__(
        self,
        plan: Plan,
        num_workers: int,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
        make_seats: MakeSeats = Processes,
    ) -> None:
        self._plan, self._stop, self._say = plan, stop, say
        self._journals = Journals(plan, state or {})
        self._crew = Crew(
            plan, num_workers, self._journals, stop, say, remakes=False, make_seats=make_seats
        )
        self.restored = self._crew.restored
        self._queue = Queue(plan.vectors, plan.lag)
        self._ordered = {v: self._journals.steps([v]) for v in plan.vectors}
        self._filled: dict[Buffer, Filled] = {}  # what is in the queue
        self._held: list[Filled] = []  # of the batch that was collected last

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
        self.go_ahead(more=True)
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

    def go_ahead(self, *, more: bool) -> None:
        """See `Collector`: samplers go on in any case."""
        self._queue.release()
        for v, buffer in self._queue.to_order():
            self._crew.order(Order(((v, buffer, self._ordered[v]),), None))
            self._ordered[v] += self._plan.num_steps
        self._crew.send(time.monotonic())

    def give_up(self) -> None:
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
        return self._journals.state()

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
                self._journals.hold({v: self._crew.fragment(v, buffer)}, [filled])
                self._journals.enter()
        self._crew.delivered.clear()
