"""Sampling in worker processes, batch by batch.

A batch is a fragment of every vector, collected with the same weights. At lag 1 the next batch is
collected while the learner updates.
"""

from collections.abc import Mapping, Sequence

from headrace.collectors.api import Collected
from headrace.collectors.backends.api import WorkOrder
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.worker_pool import WorkerPool
from headrace.models.policy import Policy
from headrace.spec import Array


class SynchronousCollector(WorkerPool):
    """A pool of workers whose batches are those of `InlineCollector`. Args: see `WorkerPool`."""

    repeats_steps = True
    _version = 0
    _held: Sequence[RolloutResult] = ()  # of the batch that was collected last

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
        fragments = {v: self.fragment(v, 0) for v in self._plan.vectors}
        self._snapshots.stage(fragments, results)
        self._held = results
        episodes = [episode for result in results for episode in result.episodes]
        env_steps = sum(result.kept for result in results)
        metrics = self._metrics(results, depth=0)
        return Collected(list(fragments.values()), env_steps, episodes, metrics)

    def release_batch(self, *, more: bool) -> None:
        self._snapshots.accept()
        if self._plan.lag and more:
            self._order()

    def discard_batch(self) -> None:
        self._snapshots.drop()
        self._lose_batch(self._held)

    def halt(self) -> None:
        super().halt()
        self._lose_batch(self._take() or [])

    def state(self) -> dict[str, Array]:
        self._snapshots.accept()
        return super().state()

    def _order(self) -> None:
        """Have the next batch made, with the weights that were published last."""
        steps = self._snapshots.steps()
        self.submit(
            WorkOrder(tuple((v, 0, steps) for v in worker.vectors), self._version)
            for worker in self.workers
        )

    def _lose_batch(self, results: Sequence[RolloutResult]) -> None:
        self.ledger.lost += sum(result.kept for result in results)

    def _take(self) -> list[RolloutResult] | None:
        """Count what the workers have done. Return the batch; None: it is lost."""
        results = [result for _, result in self._done]
        self._done.clear()
        is_whole = len(results) == len(self.workers) and all(result.whole for result in results)
        for result in results:
            self.ledger.count(result.taken, result.lost, whole=is_whole)
            self.ledger.drop(result.dropped, self._say)
        return results if is_whole else None
