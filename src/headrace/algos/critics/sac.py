"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1801.01290 and arXiv:1812.05905).

The settings, the losses of a minibatch, and the algorithm. docs/sac.md explains details and
metrics.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from headrace.algos.base import LossSpec, Metrics, Modules, Share, UpdateContext, mean_of
from headrace.algos.critics import recurrent_sac, sac_of_choices
from headrace.algos.critics.shared import (
    CriticsConfig,
    WithCritics,
    critics_loss,
    explore,
    soft_loss,
    step_policy,
)
from headrace.algos.off_policy import (
    replay_of,
    store,
    update_priorities,
    update_target,
)
from headrace.algos.sequences import SequenceConfig, due_draws
from headrace.batch import Fragment, Minibatch, Obs
from headrace.configclass import Between, NonNegative, NonNegativeInt, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.errors import ConfigError
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.dropout import USES, key_of, row_keys
from headrace.models.critics.estimates import Estimate, LeastValue, estimate
from headrace.models.critics.heads import ExploringChoice, SquashedGaussian
from headrace.models.critics.temperature import Temperature
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


@configclass
class SAC(SequenceConfig, CriticsConfig):
    """Settings of SAC."""

    ent_coef: NonNegative = 0.0
    """Weight of the entropy (the temperature); 0: learned, so that the entropy nears
    target_entropy."""
    initial_ent_coef: Annotated[float, Between(1e-6)] = 1.0
    """The weight of the entropy at first, where it is learned."""
    target_entropy: float = -1.0
    """Entropy to aim at (nats), for each component of a continuous action; its range is 2."""
    target_entropy_share: Share = 0.5
    """Entropy to aim at where actions are choices, as a share of the largest one: the logarithm of
    how many actions are allowed."""
    critics_in_target: NonNegativeInt = 0
    """Critics, drawn for each transition, whose least value a target takes; the policy then
    improves the mean of all critics. 0: all, and the policy improves their least value."""
    num_quantiles: PositiveInt = 1
    """Quantiles of the return that each critic learns; 1: its mean."""
    dropped_quantiles: NonNegativeInt = 0
    """Largest quantiles that targets leave out, for each critic."""
    dropout: Share = 0.0
    """Share of the units of the critics' hidden layers that each pass drops."""


@configclass
class TQC(SAC):
    """Settings of SAC with truncated quantiles (Kuznetsov et al. 2020, arXiv:2005.04269)."""

    num_quantiles: PositiveInt = 25
    dropped_quantiles: NonNegativeInt = 2


@configclass
class REDQ(SAC):
    """Settings of SAC with a randomized ensemble (Chen et al. 2021, arXiv:2101.05982)."""

    num_critics: PositiveInt = 10
    critics_in_target: NonNegativeInt = 2
    replay_ratio: NonNegative = 20.0
    policy_delay: PositiveInt = 20


@configclass
class DROQ(REDQ):
    """Settings of SAC with dropout (Hiraoka et al. 2022, arXiv:2110.02034)."""

    num_critics: PositiveInt = 2
    layer_norm: bool = True
    dropout: Share = 0.01


def actor_loss(
    policy: ActorPolicy,
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
        The metric `missing_entropy` is of each row, `[B]`: the target's less the entropy.
    """
    obs, size = minibatch["obs"], policy.num_draws
    action, log_prob = draw(policy, obs, minibatch["noise"][:, size : 2 * size])
    key = key_of(minibatch, 2)
    outputs = critics(policy.normalized(obs), action, frozen=True, key=key)
    value = critics.estimate.to_improve(outputs)
    return soft_loss(temperature, log_prob, value, minibatch, cfg.target_entropy * size)


def temperature_loss(
    temperature: Temperature, minibatch: Minibatch, cfg: SAC
) -> tuple[Tensor, Metrics]:
    """Return the loss of log α: α rises where entropy is missing."""
    missing = minibatch["missing_entropy"]
    return -(temperature.log_alpha * missing * minibatch["weight"]).sum(), {}


@torch.no_grad()
def targets(
    rows: Minibatch, *, policy: ActorPolicy, target: Critics, temperature: Temperature
) -> Minibatch:
    """Return the targets of transitions, and normalized observations."""
    # y = r + γ (min_i Q_target_i(s', a') - α log π(a' | s')),  a' ~ π(. | s');  TQC: a y for each
    # quantile that is left, in place of the least value
    next_obs = rows["next_obs"]
    action, log_prob = draw(policy, next_obs, rows["noise"][:, : policy.num_draws])
    outputs = target(policy.normalized(next_obs), action, key=key_of(rows, 0))
    normal = rows["noise"][:, 2 * policy.num_draws :][:, : target.estimate.num_normal]
    value = target.estimate.of_next(outputs, normal)
    value = value - (temperature() * log_prob).unsqueeze(-1)
    reward, discount = rows["reward"].unsqueeze(-1), rows["discount"].unsqueeze(-1)
    return {
        "target": torch.addcmul(reward, discount, value),
        "seen": policy.normalized(rows["obs"]),
    }


def draw(policy: ActorPolicy, obs: Obs, normal: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions of the policy, from normal noise, and their log-probabilities."""
    assert isinstance(policy.head, SquashedGaussian)
    return policy.head.draw(policy(obs)[0], normal)


class SACAlgorithm(WithCritics[SAC]):
    """SAC: a stochastic policy that learns from replay."""

    name, Config, takes_choices, recurrent = "sac", SAC, True, True

    def build_policy(
        self, spec: EnvSpec, network: Network, config: SAC, model: ModelFactory | None = None
    ) -> ActorPolicy:
        is_random = config.learning_starts > 0
        if spec.action.kind == "discrete":
            choice = ExploringChoice(spec.action.nvec[0], is_random=is_random)
            return ActorPolicy(spec, network, choice, model)
        head = SquashedGaussian(spec.action.size, is_random=is_random)
        return ActorPolicy(spec, network, head, model)

    def estimate(self, config: SAC) -> Estimate:
        return estimate(
            config.num_critics,
            config.critics_in_target,
            config.num_quantiles,
            config.dropped_quantiles,
        )

    def build_critics(self, spec: EnvSpec, network: Network, config: SAC) -> Critics:
        return Critics(
            spec, network, config.num_critics, self.estimate(config),
            layer_norm=config.layer_norm,
            dropout=config.dropout,
        )  # fmt: skip

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: SAC,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        is_plain = type(self.estimate(config)) is LeastValue and not config.dropout
        if spec.action.kind == "discrete" and not is_plain:
            raise ConfigError(
                f"num_quantiles={config.num_quantiles}, critics_in_target="
                f"{config.critics_in_target} and dropout={config.dropout}, but the actions of "
                f"{spec.id} are choices: expected 1, 0 and 0.\nLeave them out."
            )
        if spec.action.kind == "discrete" and policy.state_size:
            raise ConfigError(
                f"core={network.core!r}, but the actions of {spec.id} are choices: with a core SAC "
                "has continuous ones.\nUse --algo dqn, or --core none."
            )
        modules = super().build(policy, spec, network, config, num_rows, ranks)
        temperature = Temperature(config.ent_coef or config.initial_ent_coef)
        return modules | {"temperature": temperature}

    def losses(self, modules: Modules, config: SAC) -> dict[str, LossSpec]:
        named: dict[str, Any] = dict(modules)
        policy, critics, temperature = named["policy"], named["critics"], named["temperature"]
        of: Any = {"critics": critics, "temperature": temperature}
        of_actor, of_rows = partial(actor_loss, **of), targets
        if isinstance(policy.head, ExploringChoice):
            share = config.target_entropy_share
            of_actor = partial(sac_of_choices.actor_loss, **of, target_share=share)
            of_rows = sac_of_choices.targets
        of_target = {"policy": policy, "target": named["target"], "temperature": temperature}
        of_rows = partial(of_rows, **of_target)
        of_critics = critics_loss
        if policy.state_size:
            of_actor = partial(recurrent_sac.actor_loss, **of)
            of_critics = partial(recurrent_sac.critics_loss, policy=policy)
            of_rows = partial(recurrent_sac.targets, **of_target, cfg=config)
        spec = partial(LossSpec, max_grad_norm=config.max_grad_norm, adam_eps=config.adam_eps)
        return {
            "critics": spec(of_critics, critics, prepare=of_rows),
            "policy": spec(of_actor, policy),
            "temperature": spec(temperature_loss, temperature),
        }

    def num_normal(self, policy: Policy, config: SAC) -> int:
        """Return the normal numbers for each row: of two actions, the estimate, and dropout."""
        if isinstance(policy.head, ExploringChoice):
            return 0
        of_dropout = USES * (config.dropout > 0)
        return 2 * policy.num_draws + self.estimate(config).num_normal + of_dropout

    def update(self, source: Fragment, ctx: UpdateContext[SAC]) -> Metrics:
        cfg, modules = ctx.config, ctx.modules
        store(ctx, source)
        seen: list[Metrics] = []
        drawn = None
        before_keys = 2 * ctx.policy.num_draws + self.estimate(cfg).num_normal
        for step, drawn, rows in due_draws(ctx, self.num_normal(ctx.policy, cfg)):
            if cfg.dropout:
                rows["row_keys"] = row_keys(rows["noise"][:, before_keys : before_keys + USES])
            metrics = ctx.step("critics", rows, ctx.config.lr)
            update_priorities(ctx, drawn, metrics.pop("error"))
            seen.append(metrics)
            if (step + 1) % cfg.policy_delay == 0:
                metrics = step_policy(ctx, rows)
                missing = {"missing_entropy": metrics.pop("missing_entropy")}
                if not cfg.ent_coef:
                    ctx.step("temperature", missing | {"weight": rows["weight"]}, ctx.config.lr)
                seen.append(metrics)
            if self.has_targets:
                update_target(modules["target"], modules["critics"], cfg.tau)
        explore(ctx)
        return (
            mean_of(seen)
            | replay_of(ctx).metrics(drawn)
            | {"lr": torch.tensor(ctx.config.lr), "ent_coef": modules["temperature"]()}
        )


class TQCAlgorithm(SACAlgorithm):
    """SAC whose settings begin with those of TQC."""

    name, Config, takes_choices = "tqc", TQC, False


class REDQAlgorithm(SACAlgorithm):
    """SAC whose settings begin with those of REDQ."""

    name, Config, takes_choices = "redq", REDQ, False


class DROQAlgorithm(SACAlgorithm):
    """SAC whose settings begin with those of DroQ."""

    name, Config, takes_choices = "droq", DROQ, False
