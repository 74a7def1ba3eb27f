"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169).

The settings, the losses of a minibatch, and the algorithm. docs/offline.md explains details.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.algos.base import (
    LossSpec,
    Metrics,
    Modules,
    Share,
    UpdateContext,
    mean_of,
)
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
from headrace.batch import Fragment, Minibatch, Obs
from headrace.configclass import NonNegative, configclass
from headrace.distributed.ranks import Ranks
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.heads import NoisyAction
from headrace.models.custom import ModelFactory
from headrace.models.networks import Mlp, encoder_for
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec

_MOST_WEIGHT = 100.0  # of a recorded action, as in the authors' code


@configclass
class IQL(CriticsConfig):
    """Settings of IQL."""

    expectile: Share = 0.7
    """Expectile of the value of recorded actions that a state's value is: 0.5 is their mean, 1
    their largest."""
    advantage_scale: NonNegative = 3.0
    """Recorded actions weigh exp(this times their advantage); 0: all alike, as in cloning."""
    exploration_noise: NonNegative = 0.1
    """Deviation of the noise that is added to actions; the range of an action is 2."""


class StateValue(nn.Module):
    """A network V(s)."""

    def __init__(self, spec: EnvSpec, network: Network) -> None:
        super().__init__()
        self.encoder = encoder_for(spec.seen, network.image_net)
        features, sizes = self.encoder.num_features, network.hidden_sizes
        self.trunk = Mlp(features, sizes, network.activation, make=nn.Linear)
        self.value = nn.Linear((features, *sizes)[-1], 1)

    def forward(self, obs: Obs) -> Tensor:
        """Return the values `[B]` of normalized observations."""
        features: Tensor = self.encoder(obs).to(self.value.weight.dtype)
        value: Tensor = self.value(self.trunk(features)).squeeze(-1)
        return value


def value_loss(value: StateValue, minibatch: Minibatch, cfg: IQL) -> tuple[Tensor, Metrics]:
    """Return the loss of V, the expectile of the recorded actions' values (eq. 5).

    Args:
        minibatch: rows of `seen`, `best` (the least value of the target critics) and `weight`.
    """
    above = minibatch["best"] - value(minibatch["seen"])
    share = torch.where(above > 0, cfg.expectile, 1 - cfg.expectile)
    return (share * above.square() * minibatch["weight"]).sum(), {}


def actor_loss(policy: ActorPolicy, minibatch: Minibatch, cfg: IQL) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy: the squared distance to recorded actions, weighted (eq. 7).

    Args:
        minibatch: rows of `obs`, `action`, `importance` and `weight`.
    """
    action = policy.head.mode(policy(minibatch["obs"])[0])
    distance = (action - minibatch["action"]).square().sum(-1)
    total = (minibatch["importance"] * distance * minibatch["weight"]).sum()
    return total, {"actor_loss": total.detach()}


class IQLAlgorithm(WithCritics[IQL]):
    """IQL: learns from recorded actions alone, and never asks for the value of others."""

    name, Config = "iql", IQL

    def build_policy(
        self, spec: EnvSpec, network: Network, config: IQL, model: ModelFactory | None = None
    ) -> ActorPolicy:
        is_random = config.learning_starts > 0
        head = NoisyAction(spec.action.size, config.exploration_noise, is_random=is_random)
        return ActorPolicy(spec, network, head, model)

    def build(
        self,
        policy: Policy,
        spec: EnvSpec,
        network: Network,
        config: IQL,
        num_rows: int,
        ranks: Ranks,
    ) -> Modules:
        modules = super().build(policy, spec, network, config, num_rows, ranks)
        return modules | {"value": StateValue(spec, network)}

    def losses(self, modules: Modules, config: IQL) -> dict[str, LossSpec]:
        named: dict[str, Any] = dict(modules)
        policy, critics, target, value = (
            named[name] for name in ("policy", "critics", "target", "value")
        )

        def of_actions(rows: Minibatch) -> Minibatch:
            """Return the values of recorded actions."""
            seen = policy.normalized(rows["obs"])
            best = target.estimate.to_improve(target(seen, rows["action"]))
            return {"seen": seen, "best": best}

        def of_critics(rows: Minibatch) -> Minibatch:
            """Return y = r + γ V(s')."""
            after = value(policy.normalized(rows["next_obs"]))
            goal = torch.addcmul(rows["reward"], rows["discount"], after)
            return {"seen": policy.normalized(rows["obs"]), "target": goal.unsqueeze(-1)}

        def of_policy(rows: Minibatch) -> Minibatch:
            """Return the weights of recorded actions, exp(β (Q(s, a) - V(s)))."""
            found = of_actions(rows)
            advantage = found["best"] - value(found["seen"])
            importance = (config.advantage_scale * advantage).exp().clamp(max=_MOST_WEIGHT)
            return {"importance": importance}

        spec = partial(LossSpec, max_grad_norm=config.max_grad_norm, adam_eps=config.adam_eps)
        return {
            "critics": spec(critics_loss, critics, prepare=of_critics),
            "value": spec(value_loss, value, prepare=of_actions),
            "policy": spec(actor_loss, policy, prepare=of_policy),
        }

    def update(self, source: Fragment, ctx: UpdateContext[IQL]) -> Metrics:
        cfg, modules = ctx.config, ctx.modules
        store(ctx, source)
        seen: list[Metrics] = []
        drawn = None
        for step, drawn, rows in due_steps(ctx):
            ctx.step("value", rows, ctx.config.lr)
            metrics = ctx.step("critics", rows, ctx.config.lr)
            update_priorities(ctx, drawn, metrics.pop("error"))
            seen.append(metrics)
            if (step + 1) % cfg.policy_delay == 0:
                seen.append(step_policy(ctx, rows))
            update_target(modules["target"], modules["critics"], cfg.tau)
        explore(ctx)
        return mean_of(seen) | replay_of(ctx).metrics(drawn) | {"lr": torch.tensor(ctx.config.lr)}
