"""Advantage actor-critic: the synchronous form of A3C (Mnih et al. 2016, arXiv:1602.01783).

The settings, the loss, and the algorithm. docs/a2c.md explains details and metrics.
"""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.algos.base import (
    ActorCriticConfig,
    Algorithm,
    LossSpec,
    Metrics,
    Modules,
    Share,
    UpdateContext,
    policy_loss,
)
from headrace.algos.targets import advantages, minibatches, value_metrics
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import NonNegative, configclass
from headrace.models.policy import Policy


@configclass
class A2C(ActorCriticConfig):
    """Settings of A2C."""

    lr: NonNegative = 7e-4
    gae_lambda: Share = 1.0
    """Decay of the advantage trace; 1: the n-step returns of the paper."""


def loss(policy: Policy, minibatch: Minibatch, cfg: ActorCriticConfig) -> tuple[Tensor, Metrics]:
    """Return the loss of a batch, and its metrics.

    Args:
        minibatch: rows of `obs, action, advantage, target, weight`, and the scalar `ent_coef` of
            this update. The weights of all ranks add up to the number of ranks. A recurrent core
            adds `reset` for each row and `state` for each env; rows are sequences then.
    """
    weight = minibatch["weight"]
    memory = (minibatch["state"], minibatch["reset"]) if "state" in minibatch else ()
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"], *memory)

    # L = -E[log π_θ(a|s) A]  (section 4 of the paper)
    policy_loss = -(log_prob * minibatch["advantage"] * weight).sum()
    value_loss = 0.5 * ((value - minibatch["target"]).square() * weight).sum()
    mean_entropy = (entropy * weight).sum()

    total = policy_loss + cfg.vf_coef * value_loss - minibatch["ent_coef"] * mean_entropy
    metrics = {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": mean_entropy,
    }
    return total, {name: value.detach() for name, value in metrics.items()}


class A2CAlgorithm(Algorithm[A2C]):
    """A2C: one optimizer step per batch."""

    name, Config = "a2c", A2C
    recurrent = True
    stored_outputs: ClassVar[StoredOutputs] = {"value": ((), torch.float32)}

    def losses(self, modules: Modules, config: A2C) -> dict[str, LossSpec]:
        return policy_loss(loss, modules, config)

    def update(self, source: Fragment, ctx: UpdateContext[A2C]) -> Metrics:
        rows = advantages(ctx.policy, source, ctx.config.gamma, ctx.config.gae_lambda)
        return one_step(rows, ctx)


def one_step(rows: Minibatch, ctx: UpdateContext[ActorCriticConfig]) -> Metrics:
    """Take one optimizer step on all rows. They hold the inputs of `loss`, and `valid`."""
    normalize = ctx.config.normalize_advantage
    whole = minibatches(rows, None, ctx.ranks, normalize_advantage=normalize)[0]
    whole |= ctx.scalars(rows["advantage"], "ent_coef")
    metrics = ctx.step("policy", whole, ctx.config.lr)
    return metrics | value_metrics(rows, ctx.ranks) | {"lr": torch.tensor(ctx.config.lr)}
