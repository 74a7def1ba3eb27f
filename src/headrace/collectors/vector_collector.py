"""The base class of collectors that step vectors of environments, here or in workers."""

from collections.abc import Mapping, Sequence

from headrace.batch import Fragments
from headrace.collectors.api import Collected, Collector, SamplingPlan, Say, ShouldStop
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.spec import Array


class VectorCollector(Collector):
    """A collector whose batches are fragments of vectors, with a snapshot of each.

    Args:
        state: saved state to resume from; {}: begin.
    """

    _held: Sequence[RolloutResult] = ()  # of the batch that was collected last

    def __init__(
        self,
        plan: SamplingPlan,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        super().__init__(plan, stop, say)
        self._snapshots = EpisodeSnapshots(plan, state or {})

    def discard_batch(self) -> None:
        self._snapshots.drop()
        self.ledger.lost += kept(self._held)

    def state(self) -> dict[str, Array]:
        self._snapshots.accept()
        return self._snapshots.state()

    def _count(self, result: RolloutResult, *, whole: bool) -> None:
        self.ledger.count(result.taken, result.lost, whole=whole)
        self.ledger.drop(result.dropped, self._say)

    def _batch(
        self, of_vectors: Sequence[Fragments], results: Sequence[RolloutResult], depth: float = 0.0
    ) -> Collected:
        """Return the batch that workers report on; `depth` batches are left in the queue."""
        fragments = [fragment for fragments in of_vectors for fragment in fragments]
        self._held = results
        episodes = [episode for result in results for episode in result.episodes]
        agent_steps = sum(result.agent_steps for result in results)
        metrics = self._metrics(results, depth)
        return Collected(fragments, kept(results), episodes, metrics, agent_steps)

    def _metrics(self, results: Sequence[RolloutResult], depth: float) -> dict[str, float]:
        """Return a batch's metrics of lag and waiting; none at lag 0."""
        if not self._plan.lag:
            return {}
        num_acts = self._plan.num_steps * sum(len(result.states) for result in results)
        return {
            "lag_acting": sum(result.lag_sum for result in results) / num_acts,
            "lag_acting_max": float(max(result.lag_max for result in results)),
            "queue_depth": depth,
            "workers_wait_s": 0.0,
        }


def kept(results: Sequence[RolloutResult]) -> int:
    """Return the env steps with valid rows."""
    return sum(result.kept for result in results)
