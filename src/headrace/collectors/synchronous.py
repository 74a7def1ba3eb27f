"""Sampling in worker processes, batch by batch: the hybrid of processes and vectors.

Each worker steps its own vectors for T steps with its own copy of the policy; nobody waits for
anybody inside a fragment, and a batch is a fragment of every vector, made with the same weights. At
lag 1 the next batch is made while this one is learned from.

Left out: processes (`worker_pool.py`), and sampling that never stops (`asynchronous.py`).
"""

import time
from collections.abc import Mapping

from headrace.collectors.api import Collected, Ledger, SamplingPlan, Say, ShouldStop
from headrace.collectors.backends.api import BackendFactory, WorkOrder
from headrace.collectors.backends.processes import ProcessBackend
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.collectors.worker_pool import WorkerPool
from headrace.meter import Laps
from headrace.models.policy import Policy
from headrace.spec import Array


class SynchronousCollector:
    """A `Collector` over worker processes; all batches are those of `InlineCollector`.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors.
        stop: asked while waiting whether to give up.
        state: what to go on from; {}: begin.
        say: told of workers that were lost, and of episodes that were dropped.
        make_seats: where the workers are: processes of this machine, or Ray actors.

    Raises:
        ConfigError, EnvError, WorkerError: see `WorkerPool`.
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
            plan, num_workers, self._snapshots, stop, say, remakes=True, make_seats=make_seats
        )
        self.restored, self._version = self._crew.restored, 0
        self._held: list[RolloutResult] = []  # of the batch that was collected last

    @property
    def ledger(self) -> Ledger:
        """See `Collector`."""
        return self._crew.ledger

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._crew.publish(policy, version)
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        self._snapshots.accept()
        if self._stop():
            return None
        if not self._crew.owing:
            self._order()
        self._crew.serve(lambda: self._crew.owing)
        all_filled = self._take()
        if all_filled is None:
            return None
        fragments = {v: self._crew.fragment(v, 0) for v in self._plan.vectors}
        self._snapshots.stage(fragments, all_filled)
        self._held = all_filled
        episodes = [episode for filled in all_filled for episode in filled.episodes]
        metrics = self._crew.metrics(all_filled, depth=0)
        env_steps = sum(filled.kept for filled in all_filled)
        return Collected(list(fragments.values()), env_steps, episodes, metrics)

    def release_batch(self, *, more: bool) -> None:
        """See `Collector`."""
        self._snapshots.accept()
        if self._plan.lag and more:
            self._order()
            self._crew.send(time.monotonic())

    def discard_batch(self) -> None:
        """See `Collector`."""
        self._snapshots.drop()
        self._lose(self._held)

    def halt(self) -> None:
        """See `Collector`."""
        self._crew.halt()
        self._lose(self._take() or [])

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._snapshots.accept()
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

    def _order(self) -> None:
        """Have the next batch made, with the weights that were published last."""
        steps = self._snapshots.steps()
        for share in self._crew.shares:
            self._crew.order(WorkOrder(tuple((v, 0, steps) for v in share), self._version))

    def _lose(self, all_filled: list[RolloutResult]) -> None:
        self.ledger.lost += sum(filled.kept for filled in all_filled)

    def _take(self) -> list[RolloutResult] | None:
        """Count what was delivered: it is a batch, or (None) lost."""
        all_filled = [filled for _, filled in self._crew.delivered]
        self._crew.delivered.clear()
        whole = len(all_filled) == len(self._crew.shares) and all(f.whole for f in all_filled)
        for filled in all_filled:
            self.ledger.count(filled.taken, filled.lost, whole=whole)
            self.ledger.drop(filled.dropped, self._say)
        return all_filled if whole else None
