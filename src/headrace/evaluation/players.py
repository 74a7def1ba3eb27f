"""Trained policies at play: each acts for its agents, some steps at a time.

Left out: which episodes count (`evaluate.py`), and what is kept of one (`watch.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment, Obs
from headrace.collectors.api import ShouldStop
from headrace.collectors.rollout import Pinned, at_once, rollout
from headrace.config.policies import DEFAULT
from headrace.envs.api import VectorEnv
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.meter import Meter
from headrace.models.policy import Act, Policy, PolicyActor
from headrace.seeding import action_noise
from headrace.spec import Agents


class Players:
    """Policies, and what they remember of the environments of one vector.

    Args:
        policy: acts; or several, by name.
        shares: the agents of each of several.
        num_envs: of the vector.
        num_steps: that are played at a time.
        seed: of sampled actions.
        stochastic: sample them, as in training; else take the likeliest.

    Attributes:
        names: of the policies.
        parts: the agents of each.
        spec: of the first policy; all of them have the environment's roles.
        steps: that each environment has taken.
    """

    def __init__(
        self,
        policy: TrainedPolicy | Mapping[str, TrainedPolicy],
        shares: Mapping[str, Agents] | None,
        num_envs: int,
        num_steps: int,
        *,
        seed: int,
        stochastic: bool,
    ) -> None:
        policies = {DEFAULT: policy} if isinstance(policy, TrainedPolicy) else dict(policy)
        self.names, self.steps = list(policies), 0
        self.spec = next(iter(policies.values())).spec
        self.parts = list((shares or {DEFAULT: Agents(0, self.spec.num_agents)}).values())
        self._modules = [of.module for of in policies.values()]
        actors = [PolicyActor(_act(module, stochastic=stochastic)) for module in self._modules]
        self._weights, self._meter, self._seed = Pinned(actors, version=0), Meter(), seed
        self._num_steps = num_steps
        self._fragments = [
            self._fragment(of, num_envs * part.size)
            for of, part in zip(policies.values(), self.parts, strict=True)
        ]

    def _fragment(self, policy: TrainedPolicy, num_rows: int) -> Fragment:
        state_size = policy.module.state_size
        columns = batch.columns(policy.spec, {}, self._num_steps, num_rows, state_size)
        fragment = batch.allocate(columns)
        fragment.core_state.zero_()
        return fragment

    @torch.no_grad()
    def play(self, vector: VectorEnv, stop: ShouldStop = lambda: False) -> bool:
        """Play `num_steps`; False if told to stop."""
        noise = []
        for module, part in zip(self._modules, self.parts, strict=True):
            ids = part.ids(vector.env_id, self.spec.num_agents)
            drawn = action_noise(self._seed, ids, self.steps, self._num_steps, module.num_draws)
            noise.append(torch.from_numpy(drawn))
        steps = rollout(vector, self._fragments, self._weights, noise, self._meter, stop)
        taken = at_once(steps)
        for fragment in self._fragments:
            fragment.core_state[0] = fragment.core_state[1]
        self.steps += taken
        return taken == self._num_steps


def _act(module: Policy, *, stochastic: bool) -> Act:
    def greedily(obs: Obs, noise: Tensor, *memory: Tensor) -> dict[str, Tensor]:
        return module.act_greedily(obs, *memory)

    return module.act if stochastic else greedily
