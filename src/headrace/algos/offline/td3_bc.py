"""TD3 with behaviour cloning (Fujimoto & Gu 2021, arXiv:2106.06860).

Left out: TD3 (`algos/critics/td3.py`), of which this changes the policy's loss.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headrace.algos.base import LossSpec, Metrics, Modules, mean_over_rows
from headrace.algos.critics.td3 import TD3, TD3Algorithm
from headrace.batch import Minibatch
from headrace.configclass import NonNegative, configclass
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics


@configclass
class TD3BC(TD3):
    """Settings of TD3 with behaviour cloning."""

    value_scale: NonNegative = 2.5
    """Weight of the critic's value, relative to its mean size, beside the squared distance to the
    recorded action; 0: cloning alone."""


def actor_loss(
    policy: ActorPolicy, minibatch: Minibatch, cfg: TD3BC, *, critics: Critics
) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy (eq. 3).

    Args:
        minibatch: rows of `obs`, `action` and `weight`.
    """
    obs, weight = minibatch["obs"], minibatch["weight"]
    action = policy.head.mode(policy(obs)[0])
    outputs = critics(policy.normalized(obs), action, frozen=True, first=1)
    value = critics.estimate.to_improve(outputs)
    # Weights need not add up to 1: a minibatch may be learned from in parts.
    scale = cfg.value_scale * weight.sum() / (value.detach().abs() * weight).sum()
    distance = (action - minibatch["action"]).square().mean(-1)
    total = ((distance - scale * value) * weight).sum()
    distances = mean_over_rows({"distance": distance.detach()}, minibatch)
    return total, {"actor_loss": total.detach(), **distances}


class TD3BCAlgorithm(TD3Algorithm):
    """TD3 whose policy stays near recorded actions."""

    name, Config = "td3bc", TD3BC
    several_learners = False  # the mean size of values is of all rows of a minibatch

    def losses(self, modules: Modules, config: TD3) -> dict[str, LossSpec]:
        critics: Any = modules["critics"]
        losses = super().losses(modules, config)
        of_actor = partial(actor_loss, critics=critics)
        return losses | {"policy": replace(losses["policy"], function=of_actor)}
