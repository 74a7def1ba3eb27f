"""A collector on the learner's device, for environments that step there.

It acts with the learner's policy and writes batches in place. On CUDA it replays one graph.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headrace import batch, device_seeding
from headrace.batch import Fragment
from headrace.collectors.api import (
    LEAGUE_WINDOW,
    WINDOW,
    Collected,
    Collector,
    PolicyPlan,
    SamplingPlan,
    ShouldStop,
)
from headrace.collectors.rollout import FixedActors, at_once, recall, remembered, rollout
from headrace.collectors.watchdog import Watchdog
from headrace.envs.api import VectorContext
from headrace.envs.games.opponents import Opponents
from headrace.envs.vectors import device_vector
from headrace.meter import Meter
from headrace.models.cuda_graph import CudaGraph
from headrace.models.fast_paths import actor_for
from headrace.models.policy import Policy
from headrace.spec import Array


class DeviceCollector(Collector):
    """A collector whose environments are one vector on the learner's device.

    Its batch is one fragment of each policy, in the order of their agents' ids.

    Args:
        state: state of a saved run; {}: none.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        device: torch.device,
        meter: Meter,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
    ) -> None:
        super().__init__(plan, stop)
        self._acting, self._meter = list(plan.policies.values()), meter
        context = VectorContext(
            plan.spec,
            plan.first_env + np.arange(plan.num_envs),
            plan.seed,
            meter,
            guards=plan.guards,
            reseed=plan.reseed_episodes,
            parts=plan.parts,
            owners=plan.owners,
            league_size=plan.league_size,
            num_threads=plan.threads_per_worker,
            last_episodes=LEAGUE_WINDOW if plan.league else WINDOW,
        )
        self._vector = device_vector(plan.maker, context, device)
        self._fragments = [self._allocate(policy, device) for policy in self._acting]
        self._memory = [fragment.recurrent_state[0].clone().zero_() for fragment in self._fragments]
        self._noise: list[Tensor] = []
        self._policies: list[Policy] = []
        self._opponents: Opponents | None = None
        if plan.league is not None:
            self._opponents = Opponents(plan.league.load, list(plan.policies), device)
        # Which rows a member plays is known to the host alone.
        can_be_recorded = self._vector.can_be_recorded and self._opponents is None
        self._is_recorded = device.type == "cuda" and can_be_recorded
        self._roll_out = CudaGraph(self._act, device) if self._is_recorded else self._act
        self._version = self._steps = self._taken = 0
        self._before: list[Tensor] = []
        self._name = f"vector{plan.vectors.start}."
        if state and "steps" in state:  # a run that has read recorded steps has none
            self._restore(state)
        where = f"while a batch was made of {plan.spec.id} on {device}"
        self._watchdog = Watchdog(meter, plan.guards, lambda: 0, lambda: where)

    def _allocate(self, policy: PolicyPlan, device: torch.device) -> Fragment:
        plan = self._plan
        rows = plan.num_envs * policy.agents.size
        layout = batch.columns(
            policy.spec,
            policy.stored_outputs,
            plan.num_steps,
            rows,
            policy.network.state_size,
            capacity=self._vector.finals_per_row(plan.num_steps) * rows,
        )
        return batch.allocate(layout, device=device)

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        """Keep references: the learner's policies act."""
        self._policies = [policies[name] for name in self._plan.acting]
        self._version = version

    @torch.no_grad()
    def collect(self) -> Collected | None:
        if self._stop():
            return None
        plan, fragments = self._plan, self._fragments
        self._take_pool()
        self._before = [tensor.clone() for tensor in self._moving()]
        self._make_noise()
        with self._watchdog:
            self._roll_out()
            whole = self._taken == plan.num_steps
            episodes = self._vector.finish() if whole else []
        self.ledger.count(self._taken * plan.num_envs, 0, whole=whole)
        if not whole:
            self._go_back()
            return None
        for fragment in fragments:
            fragment.policy_version.fill_(self._version)
        self._steps += plan.num_steps
        taken = plan.num_steps * plan.num_envs
        agent_steps = sum(int(fragment.valid.sum()) for fragment in fragments)
        self._meter.lap("rollout")
        ended = self._vector.num_ended
        return Collected(fragments, taken, episodes, agent_steps=agent_steps, num_episodes=ended)

    def _act(self) -> None:
        """Fill the fragments. If a graph records this, all work is on the device."""
        for fragment, memory in zip(self._fragments, self._memory, strict=True):
            fragment.recurrent_state[0] = memory
        actors = [
            actor_for(policy, of.spec, of.network)
            for policy, of in zip(self._policies, self._acting, strict=True)
        ]
        weights = FixedActors(actors, self._version)
        stop = (lambda: False) if self._is_recorded else self._stop
        filled = rollout(
            self._vector, self._fragments, weights, self._noise, self._meter, stop, self._opponents
        )
        self._taken = at_once(filled)
        for fragment, memory in zip(self._fragments, self._memory, strict=True):
            memory.copy_(fragment.recurrent_state[1])

    def _take_pool(self) -> None:
        if self._opponents is not None and self._pool is not None:
            self._vector.set_pool(self._pool)
            self._opponents.forget(self._pool, [self._vector])

    def _make_noise(self) -> None:
        """Draw the noise of the next batch, always into the same memory."""
        plan, device = self._plan, self._fragments[0].reward.device
        draws = [policy.num_draws for policy in self._policies]
        if device.type == "cuda":
            noise = [
                device_seeding.action_noise(
                    plan.seed,
                    torch.from_numpy(part.ids(self._vector.env_id, plan.spec.num_agents)).to(
                        device
                    ),
                    self._steps,
                    plan.num_steps,
                    count,
                )
                for part, count in zip(plan.parts, draws, strict=True)
            ]
        else:
            drawn = plan.action_noise(self._vector.env_id, self._steps, draws)
            noise = list(map(torch.from_numpy, drawn))
        self._noise = self._noise or [tensor.clone() for tensor in noise]
        for memory, fresh in zip(self._noise, noise, strict=True):
            memory.copy_(fresh)

    def discard_batch(self) -> None:
        self._go_back()
        self._steps -= self._plan.num_steps
        self.ledger.lost += self._plan.num_steps * self._plan.num_envs

    def _go_back(self) -> None:
        for tensor, before in zip(self._moving(), self._before, strict=True):
            tensor.copy_(before)

    def state(self) -> dict[str, Array]:
        state = self._vector.state() | self._vector.obs()
        state |= remembered(self._memory, self._plan.num_envs)
        named = {self._name + name: array for name, array in state.items()}
        return {"steps": np.array(self._steps)} | named

    def _restore(self, state: Mapping[str, Array]) -> None:
        self._take_pool()
        self._steps = int(state["steps"])
        saved = batch.select(state, self._name)
        if not saved:
            self.restored = self._vector.start_after(self._steps)
            return
        self.restored = self._vector.restore(saved)
        if not self.restored.new_episode:
            recall(saved, self._memory, torch.zeros(self._plan.num_envs, dtype=torch.bool))

    def _moving(self) -> list[Tensor]:
        """Return the tensors that a batch changes beside the batch, for `_go_back`."""
        return [*self._vector.tensors(), *self._memory]

    def close(self) -> None:
        self._watchdog.close()
        self._vector.close()
