"""Sampling in the learner's own process. Left out: everything that makes it faster."""

from collections.abc import Mapping

from headrace import batch
from headrace.collect.api import Collected, Ledger, Plan, Say, ShouldStop
from headrace.collect.journal import Journals, missing, unwritten
from headrace.collect.rollout import Sampler
from headrace.collect.watchdog import Watchdog
from headrace.envs.api import Restored
from headrace.meter import Meter
from headrace.models.policy import Policy
from headrace.spec import Array


class InlineCollector:
    """A `Collector` that steps all vectors here, one after the other.

    Args:
        plan: what to sample.
        meter: of this process.
        stop: asked between two steps whether to give up.
        state: what to go on from; {}: begin.
        say: told of episodes that were dropped.
    """

    def __init__(
        self,
        plan: Plan,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        self._fragments = [batch.allocate(plan.layout) for _ in range(plan.num_vectors)]
        self._sampler = Sampler(plan, list(plan.vectors), self._fragments, meter, name="inline")
        self._stop, self._say, self._version = stop, say, 0
        self.ledger, self.restored = Ledger(), Restored()
        self._journals = Journals(plan, state or {})
        self._of_vector = dict(zip(plan.vectors, self._fragments, strict=True))
        if steps := self._journals.steps:
            self.restored = self._sampler.restore(dict(state or {}), steps)
            self._journals.begin(self._sampler.states())
        self._watchdog = Watchdog(
            meter,
            plan.guards,
            lambda: sum(map(missing, self._fragments)),
            lambda: self._journals.whereabouts(self._of_vector, "inline"),
        )

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._sampler.policy.load_state_dict(policy.state_dict())
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        self._journals.enter()
        unwritten(self._fragments)
        with self._watchdog:
            filled = self._sampler.collect(self._journals.steps, self._version, self._stop)
        self.ledger.drop(filled.dropped, self._say)
        self.ledger.collected += filled.taken
        if not filled.whole:
            self.ledger.lost += filled.taken
            return None
        self.ledger.lost += filled.lost
        self._journals.hold(self._of_vector, [filled])
        return Collected(self._fragments, filled.episodes)

    def give_up(self) -> None:
        """See `Collector`."""
        self._journals.drop()

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._journals.enter()
        return self._journals.state()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`: the only meter is this process's."""
        return {}

    def close(self) -> None:
        """See `Collector`."""
        self._watchdog.close()
        self._sampler.close()
