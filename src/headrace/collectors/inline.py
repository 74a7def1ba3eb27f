"""A collector in the learner's process, without workers."""

from collections.abc import Mapping

from headrace import batch
from headrace.collectors.api import Collected, Ledger, SamplingPlan, Say, ShouldStop
from headrace.collectors.rollout import (
    FixedActors,
    RolloutResult,
    RolloutTask,
    RolloutWorker,
    lag_metrics,
)
from headrace.collectors.snapshots import EpisodeSnapshots, count_unwritten, mark_unwritten
from headrace.collectors.watchdog import Watchdog
from headrace.envs.api import Restored
from headrace.meter import Laps, Meter
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.weights import Published


class InlineCollector:
    """A `Collector` that steps all vectors one after the other in this process.

    Args:
        stop: called between two steps.
        state: state of a saved run; {}: none.
        say: receives messages on dropped episodes.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self._fragments = [batch.allocate(plan.layout) for _ in range(plan.num_vectors)]
        self._plan, self._stop, self._say = plan, stop, say
        self._worker = RolloutWorker(plan, list(plan.vectors), meter, name="inline")
        self._published = Published(self._worker.policies)
        self._version: int | None = None  # of the weights for the next batch
        self._held: RolloutResult | None = None  # the last batch
        self.ledger, self.restored = Ledger(), Restored()
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
        """See `Collector`."""
        self._published.publish(policies, version)

    def collect(self) -> Collected | None:
        """See `Collector`."""
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
        metrics = lag_metrics(self._plan, [filled], 0, {})
        return Collected(self._fragments, filled.kept, filled.episodes, metrics)

    def release_batch(self, *, more: bool) -> None:
        """See `Collector`. With lag, the next batch uses the weights of now, as with workers."""
        self._snapshots.accept()
        if self._plan.lag and more:
            self._version = self._published.newest

    def discard_batch(self) -> None:
        """See `Collector`."""
        self._snapshots.drop()
        if self._held is not None:
            self.ledger.lost += self._held.kept

    def halt(self) -> None:
        """Do nothing: there are no workers."""

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._snapshots.accept()
        return self._snapshots.state()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`: there are no workers."""
        return {}

    def laps(self) -> dict[str, Laps]:
        """See `Collector`."""
        return {}

    def close(self) -> None:
        """See `Collector`."""
        self._watchdog.close()
        self._worker.close()
