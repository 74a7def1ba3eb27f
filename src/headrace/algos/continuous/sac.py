"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905).

The settings, the losses of a minibatch, and the algorithm. docs/sac.md explains details and
metrics.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import LossSpec, Metrics, Modules, UpdateContext, mean_of
from headrace.algos.continuous.shared import (
    CriticsConfig,
    WithCritics,
    critics_loss,
    explore,
    step_policy,
)
from headrace.algos.off_policy import (
    due_steps,
    replay_of,
    store,
    update_priorities,
    update_target,
)
from headrace.batch import Fragment, Minibatch, Obs
from headrace.configclass import NonNegative, NonNegativeInt, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.continuous.actor import ContinuousPolicy
from headrace.models.continuous.critics import Critics
from headrace.models.continuous.estimates import Estimate, estimate
from headrace.models.continuous.heads import SquashedGaussian
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


@configclass
class SAC(CriticsConfig):
    """Settings of SAC."""

    ent_coef: NonNegative = 0.0
    """Weight of the entropy (the temperature); 0: learned, so that it nears target_entropy."""
    initial_ent_coef: NonNegative = 1.0
    """The weight of the entropy at first, where it is learned."""
    target_entropy: float = -1.0
    """Entropy to aim at (nats), for each component of an action; its range is 2."""
    num_quantiles: PositiveInt = 1
    """Quantiles of the return that each critic learns; 1: its mean, by the least of the critics."""
    dropped_quantiles: NonNegativeInt = 0
    """Largest quantiles that targets leave out, for each critic."""


@configclass
class TQC(SAC):
    """Settings of SAC with truncated quantiles (Kuznetsov et al. 2020, arXiv:2005.04269)."""

    num_quantiles: PositiveInt = 25
    dropped_quantiles: NonNegativeInt = 2


class Temperature(nn.Module):
    """The weight α of the entropy; its logarithm is learned."""

    def __init__(self, initial: float, target_entropy: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))
        self.target_entropy = target_entropy

    def forward(self) -> Tensor:
        """Return α."""
        return self.log_alpha.detach().exp()


def actor_loss(
    policy: ContinuousPolicy,
    minibatch: Minibatch,
    cfg: SAC,
    *,
    critics: Critics,
    temperature: Temperature,
) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy, and its metrics.

    Args:
        minibatch: rows of `obs`, `noise` and `weight`.

    Returns:
        The metric `log_prob` is of each row, `[B]`.
    """
    obs, weight = minibatch["obs"], minibatch["weight"]
    size = policy.num_draws
    action, log_prob = _draw(policy, obs, minibatch["noise"][:, size : 2 * size])
    value = critics.estimate.to_improve(critics(policy.normalized(obs), action, frozen=True))
    total = ((temperature() * log_prob - value) * weight).sum()
    return total, {
        "actor_loss": total.detach(),
        "entropy": -(log_prob.detach() * weight).sum(),
        "log_prob": log_prob.detach(),
    }


def temperature_loss(
    temperature: Temperature, minibatch: Minibatch, cfg: SAC
) -> tuple[Tensor, Metrics]:
    """Return the loss of log α: α falls where the entropy is above its target."""
    above = minibatch["log_prob"] + temperature.target_entropy
    return -(temperature.log_alpha * above * minibatch["weight"]).sum(), {}


@torch.no_grad()
def targets(
    policy: ContinuousPolicy, target: Critics, temperature: Temperature, rows: Minibatch
) -> Minibatch:
    """Return the targets of transitions, and normalized observations."""
    # y = r + γ (min_i Q_target_i(s', a') - α log π(a' | s')),  a' ~ π(. | s');  TQC: a y for each
    # quantile that is left, in place of the least value
    next_obs = rows["next_obs"]
    action, log_prob = _draw(policy, next_obs, rows["noise"][:, : policy.num_draws])
    outputs = target(policy.normalized(next_obs), action)
    value = target.estimate.of_next(outputs) - (temperature() * log_prob).unsqueeze(-1)
    reward, discount = rows["reward"].unsqueeze(-1), rows["discount"].unsqueeze(-1)
    return {
        "target": torch.addcmul(reward, discount, value),
        "seen": policy.normalized(rows["obs"]),
    }


def _draw(policy: ContinuousPolicy, obs: Obs, normal: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(policy.head, SquashedGaussian)
    return policy.head.draw(policy(obs)[0], normal)


class SACAlgorithm(WithCritics[SAC]):
    """SAC: a stochastic policy of continuous actions that learns from replay."""

    name, Config = "sac", SAC

    def build_policy(
        self, spec: EnvSpec, network: Network, config: SAC, model: ModelFactory | None = None
    ) -> ContinuousPolicy:
        head = SquashedGaussian(spec.action.size, is_random=config.learning_starts > 0)
        return ContinuousPolicy(spec, network, head, model)

    def estimate(self, config: SAC) -> Estimate:
        return estimate(config.num_quantiles, config.dropped_quantiles)

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: SAC,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        modules = super().build(policy, spec, network, config, num_rows, ranks)
        initial = config.ent_coef or config.initial_ent_coef
        target_entropy = config.target_entropy * spec.action.size
        return modules | {"temperature": Temperature(initial, target_entropy)}

    def losses(self, modules: Modules, config: SAC) -> dict[str, LossSpec]:
        named: dict[str, Any] = dict(modules)
        policy, critics, temperature = named["policy"], named["critics"], named["temperature"]
        of_rows = partial(targets, policy, named["target"], temperature)
        of_actor = partial(actor_loss, critics=critics, temperature=temperature)
        most, eps = config.max_grad_norm, config.adam_eps
        return {
            "critics": LossSpec(critics_loss, critics, most, eps, prepare=of_rows),
            "policy": LossSpec(of_actor, policy, most, eps),
            "temperature": LossSpec(temperature_loss, temperature, most, eps),
        }

    def num_normal(self, size: int, config: SAC) -> int:
        """Return the normal numbers for each row of a minibatch: those of two actions."""
        return 2 * size

    def update(self, source: Fragment, ctx: UpdateContext[SAC]) -> Metrics:
        cfg, modules = ctx.config, ctx.modules
        store(ctx, source)
        seen: list[Metrics] = []
        drawn = None
        for step, drawn, rows in due_steps(ctx, self.num_normal(ctx.policy.num_draws, cfg)):
            metrics = ctx.step("critics", rows, ctx.lr)
            update_priorities(ctx, drawn, metrics.pop("error"))
            seen.append(metrics)
            if (step + 1) % cfg.policy_delay == 0:
                metrics = step_policy(ctx, rows)
                drawn_anew = {"log_prob": metrics.pop("log_prob"), "weight": rows["weight"]}
                if not cfg.ent_coef:
                    ctx.step("temperature", drawn_anew, ctx.lr)
                seen.append(metrics)
            update_target(modules["target"], modules["critics"], cfg.tau)
        explore(ctx)
        return (
            mean_of(seen)
            | replay_of(ctx).metrics(drawn)
            | {"lr": torch.tensor(ctx.lr), "ent_coef": modules["temperature"]()}
        )


class TQCAlgorithm(SACAlgorithm):
    """SAC whose settings begin with those of TQC."""

    name, Config = "tqc", TQC
