"""Sampling in the learner's own process. Left out: everything that makes it faster."""

from headrace import batch
from headrace.collect.api import Collected, Plan, ShouldStop
from headrace.collect.rollout import Sampler
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
    """

    def __init__(self, plan: Plan, meter: Meter, stop: ShouldStop) -> None:
        layout = batch.columns(plan.spec, plan.policy_out, plan.num_steps, plan.envs_per_vector)
        self._fragments = [batch.allocate(layout) for _ in range(plan.num_vectors)]
        self._sampler = Sampler(plan, list(plan.vectors), self._fragments, meter, name="inline")
        self._stop, self._version = stop, 0
        self.lost_env_steps = self.restarts = 0

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._sampler.policy.load_state_dict(policy.state_dict())
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        episodes, taken = self._sampler.collect(self._version, self._stop)
        if episodes is None:
            self.lost_env_steps += taken
            return None
        return Collected(self._fragments, episodes)

    def give_up(self) -> None:
        """See `Collector`."""
        self._sampler.give_up()

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        self._sampler.commit()
        return self._sampler.state()

    def restore(self, state: dict[str, Array]) -> Restored:
        """See `Collector`."""
        return self._sampler.restore(state)

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`: the only meter is this process's."""
        return {}

    def close(self) -> None:
        """See `Collector`."""
        self._sampler.close()
