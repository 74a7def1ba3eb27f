"""Sampling in worker processes, batch by batch.

A batch is a fragment of every vector, collected with the same weights. At lag 1 the next batch is
collected while the learner updates.
"""

from collections.abc import Mapping

from headrace.collectors.api import Collected
from headrace.collectors.backends.api import WorkOrder
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.vector_collector import kept
from headrace.collectors.worker_pool import WorkerPool
from headrace.models.policy import Policy


class SynchronousCollector(WorkerPool):
    """A pool of workers whose batches are those of `InlineCollector`. Args: see `WorkerPool`."""

    repeats_steps = True
    _version = 0

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        super().publish(policies, version)
        self._version = version

    def collect(self) -> Collected | None:
        self._snapshots.accept()
        if self._stop():
            return None
        if not self.pending:
            self._order()
        self.run_until(lambda: not self.pending)
        results = self._take()
        if results is None:
            return None
        fragments = {v: self.fragments(v, 0) for v in self._plan.vectors}
        self._snapshots.stage(fragments, results)
        return self._batch(list(fragments.values()), results)

    def release_batch(self, *, more: bool) -> None:
        self._snapshots.accept()
        if self._plan.lag and more:
            self._order()

    def halt(self) -> None:
        super().halt()
        self.ledger.lost += kept(self._take() or [])

    def _order(self) -> None:
        """Have the next batch made, with the weights that were published last."""
        steps = self._snapshots.steps()
        self.submit(
            WorkOrder(
                tuple((v, 0, steps) for v in worker.vectors),
                self._version,
                self._env_changes,
                self._pool,
            )
            for worker in self.workers
        )

    def _take(self) -> list[RolloutResult] | None:
        """Count what the workers have done. Return the batch; None: it is lost."""
        results = [result for _, result in self._done]
        self._done.clear()
        is_whole = len(results) == len(self.workers) and all(result.whole for result in results)
        for result in results:
            self._count(result, whole=is_whole)
        return results if is_whole else None
