"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347).

The settings, the loss of a minibatch, and the algorithm. docs/ppo.md numbers all details, with
sources.
"""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.algos.base import (
    ActorCriticConfig,
    Algorithm,
    Divides,
    EpochsConfig,
    LossSpec,
    Metrics,
    Modules,
    Sizes,
    UpdateContext,
    epoch_divides,
    mean_of,
    policy_loss,
)
from headrace.algos.schedules import Schedule
from headrace.algos.targets import advantages, cuts, minibatches, value_metrics
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import NonNegative, configclass
from headrace.models.policy import Network, Policy


@configclass
class PPO(EpochsConfig, ActorCriticConfig):
    """Settings of PPO."""

    clip_coef: NonNegative = 0.2
    """Distance from 1 at which the probability ratio is clipped."""
    clip_schedule: Schedule = "constant"
    """Schedule of clip_coef, as lr_schedule."""
    clip_value_loss: bool = False
    """Clip the value's change by clip_coef as well."""
    normalize_advantage: bool = True
    target_kl: NonNegative = 0.0
    """Stop the epochs of an update once the mean KL of one exceeds this (nats; 0: never)."""


def loss(policy: Policy, minibatch: Minibatch, cfg: PPO) -> tuple[Tensor, Metrics]:
    """Return the loss of a minibatch, and its metrics.

    Args:
        minibatch: rows of `obs, action, log_prob, value, advantage, target, weight`, and scalars
            `clip_coef` and `ent_coef` of this update. The weights of all ranks add up to the number
            of ranks. A recurrent core adds `reset` for each row and `state` for each env
            (`Policy.forward`); rows are sequences then.
    """
    weight, clip = minibatch["weight"], minibatch["clip_coef"]
    memory = (minibatch["state"], minibatch["reset"]) if "state" in minibatch else ()
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"], *memory)

    # r_t(θ) = π_θ(a|s) / π_old(a|s);  L = E[min(r A, clip(r, 1-ε, 1+ε) A)]  (eq. 7)
    log_ratio = log_prob - minibatch["log_prob"]
    ratio = log_ratio.exp()
    advantage = minibatch["advantage"]
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    policy_loss = -(surrogate * weight).sum()

    squared_error = (value - minibatch["target"]).square()
    if cfg.clip_value_loss:
        near = minibatch["value"] + (value - minibatch["value"]).clamp(-clip, clip)
        squared_error = torch.max(squared_error, (near - minibatch["target"]).square())
    value_loss = 0.5 * (squared_error * weight).sum()
    mean_entropy = (entropy * weight).sum()

    total = policy_loss + cfg.vf_coef * value_loss - minibatch["ent_coef"] * mean_entropy
    with torch.no_grad():
        metrics = {
            "loss": total,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": mean_entropy,
            # An estimator of KL(old || new) that is never negative: http://joschu.net/blog/kl-approx
            "approx_kl": ((ratio - 1 - log_ratio) * weight).sum(),
            "clip_fraction": (((ratio - 1).abs() > clip) * weight).sum(),
        }
    return total, {name: value.detach() for name, value in metrics.items()}


class PPOAlgorithm(Algorithm[PPO]):
    """PPO: `num_epochs` passes over each batch, in minibatches."""

    name, Config, asynchronous_form = "ppo", PPO, "appo"
    recurrent = True
    stored_outputs: ClassVar[StoredOutputs] = {
        "log_prob": ((), torch.float32),
        "value": ((), torch.float32),
    }

    def losses(self, modules: Modules, config: PPO) -> dict[str, LossSpec]:
        return policy_loss(loss, modules, config)

    def divides(self, run: Sizes, network: Network, config: PPO) -> list[Divides]:
        return epoch_divides(run, network, config)

    def minibatch_rows(self, run: Sizes, config: PPO) -> int:
        return run.num_envs * run.num_steps // config.num_minibatches

    def update(self, source: Fragment, ctx: UpdateContext[PPO]) -> Metrics:
        rows = advantages(ctx.policy, source, ctx.config.gamma, ctx.config.gae_lambda)
        rows["log_prob"] = source.stored_outputs["log_prob"].flatten()
        return epochs(rows, ctx)


def epochs(rows: Minibatch, ctx: UpdateContext[PPO]) -> Metrics:
    """Train `num_epochs` times on rows that hold the inputs of `loss`, and `valid`.

    Returns:
        Metrics: means over the update's minibatches.
    """
    cfg = ctx.config
    scalars = ctx.scalars(rows["advantage"], "clip_coef", "ent_coef")
    cut = cuts(rows, ctx.minibatch_order(cfg.num_epochs), cfg.num_minibatches, ctx.ranks)
    picked = minibatches(rows, cut, ctx.ranks, normalize_advantage=cfg.normalize_advantage)
    seen: list[Metrics] = []

    for epoch in range(cfg.num_epochs):
        first = epoch * cfg.num_minibatches
        numbers = range(first, first + cfg.num_minibatches)
        seen += [ctx.step("policy", picked[i] | scalars, cfg.lr) for i in numbers]
        if cfg.target_kl and (made := mean_of(seen[first:])):
            kl = ctx.ranks.gather(made["approx_kl"]).mean()
            if kl > cfg.target_kl:
                break

    return (
        mean_of(seen)
        | value_metrics(rows, ctx.ranks)
        | {
            "lr": torch.tensor(cfg.lr),
            "clip_coef": scalars["clip_coef"],
            "num_epochs": torch.tensor(float(epoch + 1)),
        }
    )
