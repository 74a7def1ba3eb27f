"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, its synchronous form), on one page.

From top to bottom: the settings, the loss, and the algorithm: what the policy must store with each
step, and the update: one step down the gradient of the whole batch. Details and metrics are in
docs/a2c.md.
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
    """Return the loss of a batch, and what to report of it.

    Args:
        policy: the policy that is learned.
        minibatch: rows of `obs, action, advantage, target`, and each row's `weight` (they add up to
            1 over all valid rows of all ranks, times the number of ranks). With a recurrent core
            the rows are sequences, with `reset` for each row and `state` for each env.
        cfg: settings.
    """
    weight = minibatch["weight"]
    memory = (minibatch["state"], minibatch["reset"]) if "state" in minibatch else ()
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"], *memory)

    # L = -E[log π_θ(a|s) A]  (section 4 of the paper)
    policy_loss = -(log_prob * minibatch["advantage"] * weight).sum()
    value_loss = 0.5 * ((value - minibatch["target"]).square() * weight).sum()
    mean_entropy = (entropy * weight).sum()

    total = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
    metrics = {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": mean_entropy,
    }
    return total, {name: value.detach() for name, value in metrics.items()}


class A2CAlgorithm(Algorithm[A2C]):
    """A2C: one step down the gradient of each batch."""

    name, Config = "a2c", A2C
    stored_outputs: ClassVar[StoredOutputs] = {"value": ((), torch.float32)}

    def losses(self, modules: Modules, config: A2C) -> dict[str, LossSpec]:
        """Return the one loss."""
        return policy_loss(loss, modules, config)

    def update(self, source: Fragment, ctx: UpdateContext[A2C]) -> Metrics:
        """Learn from one batch."""
        rows = advantages(ctx.policy, source, ctx.config.gamma, ctx.config.gae_lambda)
        return one_step(rows, ctx)


def one_step(rows: Minibatch, ctx: UpdateContext[ActorCriticConfig]) -> Metrics:
    """Take one step on all rows, which have `valid` and all that `loss` needs."""
    normalize = ctx.config.normalize_advantage
    whole = minibatches(rows, None, ctx.ranks, normalize_advantage=normalize)[0]
    metrics = ctx.step("policy", whole, ctx.lr)
    return metrics | value_metrics(rows, ctx.ranks) | {"lr": torch.tensor(ctx.lr)}
