"""Sampling on the learner's own device: environments and policy are there, and nothing leaves it.

The policy that acts is the learner's own, and a batch is learned from where it was written. On a
CUDA device it is made by replaying one graph. Left out: what steps there (`envs/device.py`).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace import batch
from headrace.collect.api import Collected, Ledger, Plan, ShouldStop
from headrace.collect.rollout import Pinned, at_once, remembered, rollout
from headrace.collect.watchdog import Watchdog
from headrace.envs.api import Restored
from headrace.envs.device import device_vector
from headrace.meter import Meter
from headrace.models.numpy_actor import actor_for
from headrace.models.policy import Policy
from headrace.seeding import action_noise
from headrace.spec import Array


class DeviceCollector:
    """A `Collector` whose environments are one vector on a device.

    Args:
        plan: what to sample.
        device: the learner's.
        meter: of this process.
        stop: asked before each batch whether to give up.
        state: what to go on from; {}: begin.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
    ) -> None:
        self._plan, self._device, self._meter, self._stop = plan, device, meter, stop
        self._vector = device_vector(
            plan.maker,
            plan.spec,
            plan.first_env + np.arange(plan.num_envs),
            plan.seed,
            meter,
            device=device,
            num_threads=plan.threads_per_sampler,
            guards=plan.guards,
        )
        rows = plan.num_envs * self._vector.num_agents
        layout = batch.columns(
            plan.spec,
            plan.policy_out,
            plan.num_steps,
            rows,
            plan.network.state_size,
            capacity=self._vector.finals_per_row(plan.num_steps) * rows,
        )
        self._fragment = batch.allocate(layout, device=device)
        self._memory = torch.zeros_like(self._fragment.core_state[0])
        self._row_id = self._vector.row_id(self._vector.num_agents)
        self._noise = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._policy: Policy | None = None
        self._version = self._steps = 0
        self._before: list[Tensor] = []
        self.ledger, self.restored = Ledger(), Restored()
        self._name = f"vector{plan.vectors.start}."
        if state:
            self._restore(state)
        where = f"while a batch was made of {plan.spec.id} on {device}"
        self._watchdog = Watchdog(meter, plan.guards, lambda: 0, lambda: where)

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`: it acts itself."""
        self._policy, self._version = policy, version

    @torch.no_grad()
    def collect(self) -> Collected | None:
        """See `Collector`."""
        if self._stop():
            return None
        plan, fragment = self._plan, self._fragment
        assert self._policy is not None
        self._before = [tensor.clone() for tensor in self._moving()]
        draws = self._policy.num_draws
        noise = action_noise(plan.seed, self._row_id, self._steps, plan.num_steps, draws)
        self._noise = torch.from_numpy(noise)
        with self._watchdog:
            self._roll_out()
            episodes = self._vector.finish()
        self._memory.copy_(fragment.core_state[1])
        self._steps += plan.num_steps
        taken = plan.num_steps * plan.num_envs
        self.ledger.count(taken, 0, whole=True)
        self._meter.lap("rollout")
        return Collected([fragment], taken, episodes)

    def _roll_out(self) -> None:
        plan, fragment = self._plan, self._fragment
        assert self._policy is not None
        fragment.core_state[0] = self._memory
        actor = actor_for(self._policy, plan.spec, plan.network)
        weights = Pinned([actor], self._version)
        at_once(
            rollout(self._vector, [fragment], weights, [self._noise], self._meter, lambda: False)
        )

    def go_ahead(self, *, more: bool) -> None:
        """See `Collector`: nothing goes on by itself."""

    def give_up(self) -> None:
        """See `Collector`."""
        for tensor, before in zip(self._moving(), self._before, strict=True):
            tensor.copy_(before)
        self._steps -= self._plan.num_steps
        self.ledger.lost += self._plan.num_steps * self._plan.num_envs

    def halt(self) -> None:
        """See `Collector`: nothing is under way."""

    def state(self) -> dict[str, Array]:
        """See `Collector`."""
        own = self._vector.state() | self._vector.obs() | remembered(self._memory.cpu())
        named = {self._name + name: array for name, array in own.items()}
        return {"steps": np.array(self._steps)} | named

    def _restore(self, state: Mapping[str, Array]) -> None:
        self._steps = int(state["steps"])
        own = {
            name.removeprefix(self._name): array
            for name, array in state.items()
            if name.startswith(self._name)
        }
        if own:
            self.restored = self._vector.restore(own)
            if "core_state" in own:
                self._memory.copy_(torch.from_numpy(own["core_state"]))
        else:
            self.restored = self._vector.start_after(self._steps)

    def _moving(self) -> list[Tensor]:
        """All that a batch changes, but for the batch."""
        return [*self._vector.tensors(), self._memory]

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`: the only meter is this process's."""
        return {}

    def close(self) -> None:
        """See `Collector`."""
        self._watchdog.close()
        self._vector.close()
