"""What algorithms share whose policy learns from critics and a replay.

Left out: their targets and losses (`sac.py`, `td3.py`).
"""

import copy
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from headrace.algos.base import (
    Algorithm,
    AlgorithmConfig,
    Metrics,
    Modules,
    Share,
    UpdateContext,
    mean_over_rows,
)
from headrace.algos.off_policy import ReplayConfig
from headrace.algos.sequences import replay_for
from headrace.batch import Minibatch
from headrace.configclass import NonNegative, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.errors import ConfigError
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.dropout import key_of
from headrace.models.critics.estimates import Estimate, LeastValue
from headrace.models.critics.temperature import Temperature
from headrace.models.policy import Network, Policy
from headrace.spec import ActionCodec, EnvSpec


@configclass
class CriticsConfig(ReplayConfig, AlgorithmConfig):
    """Settings of algorithms whose policy learns from critics and a replay."""

    batch_size: PositiveInt = 256
    max_grad_norm: NonNegative = 0.0
    adam_eps: NonNegative = 1e-8
    num_critics: PositiveInt = 2
    """Networks that learn the value of an action. Targets take the least of theirs, but for TQC and
    REDQ."""
    layer_norm: bool = False
    """Apply layer normalization in the critics, before each activation."""
    tau: Share = 0.005
    """Share of the critics' weights in each update of their targets."""
    policy_delay: PositiveInt = 1
    """Gradient steps of the critics for each one of the policy."""


ConfigT = TypeVar("ConfigT", bound=CriticsConfig)


class WithCritics(Algorithm[ConfigT]):
    """The base class of algorithms with a policy, critics, and target critics.

    Attributes:
        takes_choices: whether actions may be choices, besides continuous ones.
        has_targets: whether there are target critics.
    """

    data, several_learners = "replay", True
    takes_choices: ClassVar[bool] = False
    has_targets: ClassVar[bool] = True

    def check(self, spec: EnvSpec) -> None:
        is_choice = spec.action.kind == "discrete"
        if ActionCodec(spec.action).is_bounded or (is_choice and self.takes_choices):
            return
        unbounded = " without finite bounds" if spec.action.kind == "box" else ""
        raise ConfigError(
            f"algo={self.name!r} expects a Box action space with finite bounds"
            f"{' or a Discrete one' if self.takes_choices else ''}, but that of {spec.id} is "
            f"{spec.action.describe()}{unbounded}.\n"
            f"Use --algo {'sac' if is_choice else 'ppo'}, for example."
        )

    def estimate(self, config: ConfigT) -> Estimate:
        """Return what the critics say of the return."""
        return LeastValue()

    def build_critics(self, spec: EnvSpec, network: Network, config: ConfigT) -> Critics:
        """Build the critics; their targets begin as a copy. ConfigError: they cannot be so."""
        return Critics(
            spec, network, config.num_critics, self.estimate(config), layer_norm=config.layer_norm
        )

    def minibatch_rows(self, run: object, config: ConfigT) -> int:
        return config.batch_size

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: ConfigT,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        critics = self.build_critics(spec, network, config)
        modules: Modules = {"policy": policy, "critics": critics}
        if self.has_targets:
            modules["target"] = copy.deepcopy(critics).requires_grad_(False)
        return modules | {"replay": replay_for(policy, spec, config, num_rows, ranks)}


def critics_loss(critics: Critics, minibatch: Minibatch, cfg: Any) -> tuple[Tensor, Metrics]:
    """Return the loss of critics, the sum of those of each, and its metrics.

    Args:
        minibatch: rows of `seen` (normalized observations), `action`, `target` `[B, K']`, `weight`.

    Returns:
        The metric `error` is of each row, `[B]`: the mean of the critics.
    """
    outputs = critics.of_action(minibatch["seen"], minibatch["action"], key_of(minibatch, 1))
    return loss_of_outputs(critics.estimate, outputs, minibatch["target"], minibatch)


def loss_of_outputs(
    of: Estimate, outputs: Tensor, target: Tensor, minibatch: Minibatch
) -> tuple[Tensor, Metrics]:
    """Return `critics_loss` from the critics' outputs `[E, B, K]`."""
    return loss_of_rows(of.loss(outputs, target), of, outputs, target, minibatch)


def loss_of_rows(
    loss: Tensor, of: Estimate, outputs: Tensor, target: Tensor, minibatch: Minibatch
) -> tuple[Tensor, Metrics]:
    """Return `critics_loss`, given the loss of each row, `[B]`."""
    total = (loss * minibatch["weight"]).sum()
    with torch.no_grad():
        values = of.mean(outputs)
        error = values - target.mean(-1)
        of_rows = {"td_error": error.abs().mean(0), "mean_value": values.mean(0)}
        metrics = mean_over_rows(of_rows, minibatch)
    return total, metrics | {"loss": total.detach(), "error": of_rows["td_error"]}


def soft_loss(
    temperature: Temperature, log_prob: Tensor, value: Tensor, minibatch: Minibatch, target: float
) -> tuple[Tensor, Metrics]:
    """Return SAC's loss of the policy, Σ weight (α log π(a | s) - Q(s, a)), and its metrics.

    Args:
        log_prob, value: of actions that the policy drew, `[B]`.
        target: the entropy to aim at.
    """
    total = ((temperature() * log_prob - value) * minibatch["weight"]).sum()
    log_prob = log_prob.detach()
    return total, {
        "actor_loss": total.detach(),
        **mean_over_rows({"entropy": -log_prob}, minibatch),
        "missing_entropy": log_prob + target,
    }


def step_policy(ctx: UpdateContext[Any], rows: Minibatch) -> Metrics:
    """Take a gradient step of the policy. Return its metrics, apart from those of the critics."""
    metrics = ctx.step("policy", rows, ctx.config.lr)
    metrics["actor_grad_norm"] = metrics.pop("grad_norm")
    return metrics


def explore(ctx: UpdateContext[Any]) -> None:
    """Let actions be random until the first gradient step is due, from the next weights on."""
    assert isinstance(ctx.policy, ActorPolicy)
    starts = ctx.config.learning_starts
    ctx.policy.head.is_random.fill_(float(ctx.env_steps + ctx.new_env_steps < starts))
