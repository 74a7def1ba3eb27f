"""Behaviour cloning: the policy learns to take the recorded actions.

The settings, the loss of a minibatch, and the algorithm. docs/offline.md explains details.
"""

import torch
from torch import Tensor

from headrace.algos.base import (
    Algorithm,
    AlgorithmConfig,
    LossSpec,
    Metrics,
    Modules,
    UpdateContext,
    mean_of,
)
from headrace.algos.off_policy import ReplayConfig, due_steps, replay_buffer, replay_of, store
from headrace.batch import Fragment, Minibatch
from headrace.configclass import NonNegativeInt, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec

WITHOUT_EFFECT = ("gamma", "n_step", "priority_alpha", "priority_beta")
"""Settings of replay that have no effect where no value is learned."""


@configclass
class BC(ReplayConfig, AlgorithmConfig):
    """Settings of behaviour cloning."""

    batch_size: PositiveInt = 256
    learning_starts: NonNegativeInt = 0
    """Env steps before the first gradient step."""


def loss(policy: Policy, minibatch: Minibatch, cfg: BC) -> tuple[Tensor, Metrics]:
    """Return minus the log-probability of the recorded actions, and the metrics of a minibatch."""
    log_prob, entropy, _ = policy.evaluate(minibatch["obs"], minibatch["action"])
    total = -(log_prob * minibatch["weight"]).sum()
    with torch.no_grad():
        entropy = (entropy * minibatch["weight"]).sum()
    return total, {"loss": total.detach(), "entropy": entropy}


class BCAlgorithm(Algorithm[BC]):
    """Behaviour cloning, of any action space."""

    name, Config, data, several_learners = "bc", BC, "replay", True

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: BC,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        return {"policy": policy, "replay": replay_buffer(spec, config, num_rows, ranks)}

    def losses(self, modules: Modules, config: BC) -> dict[str, LossSpec]:
        return {
            "policy": LossSpec(
                loss, modules["policy"], config.max_grad_norm, config.adam_eps, may_skip=True
            )
        }

    def minibatch_rows(self, run: object, config: BC) -> int:
        return config.batch_size

    def update(self, source: Fragment, ctx: UpdateContext[BC]) -> Metrics:
        store(ctx, source)
        seen = [ctx.step("policy", rows, ctx.config.lr) for _, _, rows in due_steps(ctx)]
        return mean_of(seen) | replay_of(ctx).metrics(None) | {"lr": torch.tensor(ctx.config.lr)}
