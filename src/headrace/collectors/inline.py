"""A collector in the learner's process, without workers."""

from collections.abc import Mapping

from headrace import batch
from headrace.collectors.api import Collected, SamplingPlan, Say, ShouldStop
from headrace.collectors.rollout import FixedActors, RolloutResult, RolloutTask, RolloutWorker
from headrace.collectors.snapshots import count_unwritten, mark_unwritten
from headrace.collectors.vector_collector import VectorCollector
from headrace.collectors.watchdog import Watchdog
from headrace.envs.changes import Changes
from headrace.envs.games.seats import Pool
from headrace.meter import Meter
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.weights import Published


class InlineCollector(VectorCollector):
    """Steps all vectors one after the other in this process. Args: see `VectorCollector`."""

    def __init__(
        self,
        plan: SamplingPlan,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        super().__init__(plan, stop, state, say)
        self._fragments = {v: batch.allocate_all(plan.layouts) for v in plan.vectors}
        self._worker = RolloutWorker(plan, list(plan.vectors), meter, name="inline")
        self._published = Published(self._worker.policies)
        # Of the weights for the next batch, the changes before it, and the pool; None: the newest
        self._ordered: tuple[int, Changes, Pool | None] | None = None
        if steps := self._snapshots.steps():
            saved, changes = dict(state or {}), plan.env_changes
            self.restored = self._worker.restore(saved, steps, changes, self._pool)
            self._snapshots.begin(self._worker.states())
        self._watchdog = Watchdog(
            meter,
            plan.guards,
            lambda: sum(count_unwritten(plan, of) for of in self._fragments.values()),
            lambda: self._snapshots.describe_position(self._fragments, "inline"),
        )

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._published.publish(policies, version)

    def collect(self) -> Collected | None:
        self._snapshots.accept()
        if self._stop():
            return None
        ordered, changes, pool = self._ordered or (None, self._env_changes, self._pool)
        version = self._published.pull(self._worker.policies, ordered)
        steps, self._ordered = self._snapshots.steps(), None
        mark_unwritten(self._fragments.values())
        tasks = [RolloutTask(v, of, steps, changes, pool) for v, of in self._fragments.items()]
        result = RolloutResult()
        with self._watchdog:
            weights = FixedActors(self._worker.actors(), version)
            self._worker.collect(tasks, weights, self._stop, result)
        self._count(result, whole=result.whole)
        if not result.whole:
            return None
        self._snapshots.stage(self._fragments, [result])
        result.lag_max = self._published.newest - version
        result.lag_sum = result.lag_max * self._plan.num_steps * self._plan.num_vectors
        return self._batch(list(self._fragments.values()), [result])

    def release_batch(self, *, more: bool) -> None:
        """Count the last batch. With lag, the next one is made as of now, as with workers."""
        self._snapshots.accept()
        if self._plan.lag and more:
            self._ordered = self._published.newest, self._env_changes, self._pool

    def close(self) -> None:
        self._watchdog.close()
        self._worker.close()
