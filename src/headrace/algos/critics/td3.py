"""Twin Delayed DDPG (Fujimoto et al. 2018, arXiv:1802.09477), and DDPG.

The settings, the loss of the policy, and the algorithm. docs/td3.md explains details and metrics.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import LossSpec, Metrics, Modules, UpdateContext, mean_of
from headrace.algos.critics.shared import (
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
from headrace.batch import Fragment, Minibatch
from headrace.configclass import NonNegative, PositiveInt, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.heads import NoisyAction
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


@configclass
class TD3(CriticsConfig):
    """Settings of TD3."""

    policy_delay: PositiveInt = 2
    """Gradient steps of the critics for each one of the policy and of the targets."""
    exploration_noise: NonNegative = 0.1
    """Deviation of the noise that is added to actions; the range of an action is 2."""
    target_noise: NonNegative = 0.2
    """Deviation of the noise that is added to the next action of a target."""
    target_noise_clip: NonNegative = 0.5
    """Largest noise that is added to the next action of a target."""


@configclass
class DDPG(TD3):
    """Settings of DDPG (Lillicrap et al. 2016, arXiv:1509.02971): TD3 without its additions."""

    num_critics: PositiveInt = 1
    policy_delay: PositiveInt = 1
    target_noise: NonNegative = 0.0


def actor_loss(
    policy: ActorPolicy, minibatch: Minibatch, cfg: TD3, *, critics: Critics
) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy, minus the first critic's value of its actions.

    Args:
        minibatch: rows of `obs` and `weight`.
    """
    obs = minibatch["obs"]
    action = policy.head.mode(policy(obs)[0])
    outputs = critics(policy.normalized(obs), action, frozen=True, first=1)
    value = critics.estimate.to_improve(outputs)
    total = -(value * minibatch["weight"]).sum()
    return total, {"actor_loss": total.detach()}


@torch.no_grad()
def targets(
    rows: Minibatch,
    *,
    policy: ActorPolicy,
    target_policy: ActorPolicy,
    target: Critics,
    cfg: TD3,
) -> Minibatch:
    """Return the targets of transitions, and normalized observations."""
    # y = r + γ min_i Q_target_i(s', a'),  a' = clip(π_target(s') + clip(noise))
    next_obs = rows["next_obs"]
    action = noisy(target_policy.head.mode(target_policy(next_obs)[0]), rows, cfg)
    value = target(policy.normalized(next_obs), action).amin(0)
    reward, discount = rows["reward"].unsqueeze(-1), rows["discount"].unsqueeze(-1)
    return {
        "target": torch.addcmul(reward, discount, value),
        "seen": policy.normalized(rows["obs"]),
    }


def noisy(action: Tensor, rows: Minibatch, cfg: TD3) -> Tensor:
    """Return actions with the noise of targets, in [-1, 1]."""
    if not cfg.target_noise:
        return action
    most = cfg.target_noise_clip
    noise: Tensor = (cfg.target_noise * rows["noise"]).clamp(-most, most)
    return (action + noise).clamp(-1, 1)


class TD3Algorithm(WithCritics[TD3]):
    """TD3: a deterministic policy of continuous actions that learns from replay."""

    name, Config = "td3", TD3

    def build_policy(
        self, spec: EnvSpec, network: Network, config: TD3, model: ModelFactory | None = None
    ) -> ActorPolicy:
        is_random = config.learning_starts > 0
        head = NoisyAction(spec.action.size, config.exploration_noise, is_random=is_random)
        return ActorPolicy(spec, network, head, model)

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: TD3,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        modules = super().build(policy, spec, network, config, num_rows, ranks)
        target_policy = copy.deepcopy(policy).requires_grad_(False)
        target_policy.normalize_obs = policy.normalize_obs  # the same input for both
        return modules | {"target_policy": target_policy}

    def losses(self, modules: Modules, config: TD3) -> dict[str, LossSpec]:
        named: dict[str, Any] = dict(modules)
        policy, critics = named["policy"], named["critics"]
        of_rows = partial(
            targets,
            policy=policy,
            target_policy=named["target_policy"],
            target=named["target"],
            cfg=config,
        )
        of_actor = partial(actor_loss, critics=critics)
        most, eps = config.max_grad_norm, config.adam_eps
        return {
            "critics": LossSpec(critics_loss, critics, most, eps, prepare=of_rows),
            "policy": LossSpec(of_actor, policy, most, eps),
        }

    def update(self, source: Fragment, ctx: UpdateContext[TD3]) -> Metrics:
        cfg, modules = ctx.config, ctx.modules
        store(ctx, source)
        seen: list[Metrics] = []
        drawn = None
        num_normal = ctx.policy.num_draws if cfg.target_noise else 0
        for step, drawn, rows in due_steps(ctx, num_normal=num_normal):
            metrics = ctx.step("critics", rows, ctx.config.lr)
            update_priorities(ctx, drawn, metrics.pop("error"))
            seen.append(metrics)
            if (step + 1) % cfg.policy_delay == 0:
                seen.append(step_policy(ctx, rows))
                update_target(modules["target"], modules["critics"], cfg.tau)
                update_target(modules["target_policy"], modules["policy"], cfg.tau)
        explore(ctx)
        return mean_of(seen) | replay_of(ctx).metrics(drawn) | {"lr": torch.tensor(ctx.config.lr)}


class DDPGAlgorithm(TD3Algorithm):
    """DDPG: TD3 whose settings begin without its additions."""

    name, Config = "ddpg", DDPG
