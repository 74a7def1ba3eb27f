"""A collector in the learner's process, without workers."""

from collections.abc import Mapping

from headrace import batch
from headrace.collectors.api import Collected, Collector, SamplingPlan, Say, ShouldStop
from headrace.collectors.rollout import (
    FixedActors,
    RolloutResult,
    RolloutTask,
    RolloutWorker,
    lag_metrics,
)
from headrace.collectors.snapshots import EpisodeSnapshots, count_unwritten, mark_unwritten
from headrace.collectors.watchdog import Watchdog
from headrace.meter import Meter
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.weights import Published


class InlineCollector(Collector):
    """A collector that steps all vectors one after the other in this process.

    Args:
        state: state of a saved run; {}: none.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        super().__init__(plan, stop, say)
        self._fragments = [batch.allocate(plan.layout) for _ in range(plan.num_vectors)]
        self._worker = RolloutWorker(plan, list(plan.vectors), meter, name="inline")
        self._published = Published(self._worker.policies)
        self._version: int | None = None  # of the weights for the next batch
        self._held: RolloutResult | None = None  # the last batch
        self._snapshots = EpisodeSnapshots(plan, state or {})
        self._of_vector = dict(zip(plan.vectors, self._fragments, strict=True))
        if steps := self._snapshots.steps():
            self.restored = self._worker.restore(dict(state or {}), steps)
            self._snapshots.begin(self._worker.states())
        self._watchdog = Watchdog(
            meter,
            plan.guards,
            lambda: sum(map(count_unwritten, self._fragments)),
            lambda: self._snapshots.describe_position(self._of_vector, "inline"),
        )

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._published.publish(policies, version)

    def collect(self) -> Collected | None:
        self._snapshots.accept()
        if self._stop():
            return None
        version = self._published.pull(self._worker.policies, self._version)
        steps, self._version = self._snapshots.steps(), None
        mark_unwritten(self._fragments)
        wanted = [RolloutTask(v, fragment, steps) for v, fragment in self._of_vector.items()]
        with self._watchdog:
            weights = FixedActors(self._worker.actors(), version)
            filled = self._worker.collect(wanted, weights, self._stop)
        self.ledger.drop(filled.dropped, self._say)
        self.ledger.count(filled.taken, filled.lost, whole=filled.whole)
        if not filled.whole:
            return None
        self._snapshots.stage(self._of_vector, [filled])
        self._held = filled
        filled.lag_max = self._published.newest - version
        filled.lag_sum = filled.lag_max * self._plan.num_steps * self._plan.num_vectors
        metrics = lag_metrics(self._plan, [filled], depth=0, wait_s=0.0)
        return Collected(self._fragments, filled.kept, filled.episodes, metrics)

    def release_batch(self, *, more: bool) -> None:
        """With lag, the next batch uses the weights of now, as with workers."""
        self._snapshots.accept()
        if self._plan.lag and more:
            self._version = self._published.newest

    def discard_batch(self) -> None:
        self._snapshots.drop()
        if self._held is not None:
            self.ledger.lost += self._held.kept

    def state(self) -> dict[str, Array]:
        self._snapshots.accept()
        return self._snapshots.state()

    def close(self) -> None:
        self._watchdog.close()
        self._worker.close()
