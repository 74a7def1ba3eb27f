"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779): CQL(H) on SAC.

Left out: SAC (`algos/critics/sac.py`), of which this changes the loss of the critics.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import LossSpec, Metrics, Modules, mean_over_rows
from headrace.algos.critics.sac import SAC, SACAlgorithm
from headrace.algos.critics.shared import critics_loss
from headrace.batch import Minibatch, each
from headrace.configclass import NonNegative, PositiveInt, configclass
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.dropout import key_of
from headrace.models.critics.heads import SquashedGaussian
from headrace.models.policy import Policy


@configclass
class CQL(SAC):
    """Settings of CQL."""

    conservative_weight: NonNegative = 5.0
    """Weight of the values of actions that were not recorded, which the loss lowers."""
    num_sampled_actions: PositiveInt = 4
    """Such actions for each transition: as many uniform ones, as many of the policy, and as many of
    the policy at the next observation."""


def conservative_loss(critics: Critics, minibatch: Minibatch, cfg: CQL) -> tuple[Tensor, Metrics]:
    """Return the loss of the critics (eq. 4, with importance sampling as in appendix F).

    Args:
        minibatch: those of `critics_loss`, and `others` `[B, K, size]`, K actions, with the
            logarithms of their densities, `density` `[B, K]`.
    """
    total, metrics = critics_loss(critics, minibatch, cfg)
    others, weight = minibatch["others"], minibatch["weight"]
    num_others = others.shape[1]
    seen = each(lambda obs: obs.repeat_interleave(num_others, 0), minibatch["seen"])
    of, key = critics.estimate, key_of(minibatch, 1)
    keys = None if key is None else key.repeat_interleave(num_others)
    values = of.mean(critics(seen, others.flatten(0, 1), key=keys)).reshape(-1, *others.shape[:2])
    soft_most = (values - minibatch["density"]).logsumexp(-1) - math.log(num_others)
    recorded = of.mean(critics(minibatch["seen"], minibatch["action"], key=key))
    gap = (soft_most - recorded).sum(0)
    metrics |= mean_over_rows({"conservative_gap": gap.detach()}, minibatch)
    return total + cfg.conservative_weight * (gap * weight).sum(), metrics


@torch.no_grad()
def other_actions(policy: ActorPolicy, rows: Minibatch, cfg: CQL) -> Minibatch:
    """Return actions that were not recorded, and the logarithms of their densities."""
    head, count = policy.head, cfg.num_sampled_actions
    assert isinstance(head, SquashedGaussian)
    size = head.num_draws
    normal: Tensor = rows["noise"][:, -3 * count * size :].reshape(-1, 3, count, size)
    uniform = 2 * torch.special.ndtr(normal[:, 0]) - 1
    actions, densities = [uniform], [torch.full_like(uniform[..., 0], -size * math.log(2))]
    for part, name in enumerate(("obs", "next_obs"), start=1):
        params = policy(rows[name])[0].unsqueeze(1).expand(-1, count, -1)
        action, log_prob = head.draw(params, normal[:, part])
        actions.append(action)
        densities.append(log_prob)
    return {"others": torch.cat(actions, 1), "density": torch.cat(densities, 1)}


class CQLAlgorithm(SACAlgorithm):
    """SAC whose critics give low values to actions that were not recorded."""

    name, Config, takes_choices, recurrent = "cql", CQL, False, False

    def losses(self, modules: Modules, config: SAC) -> dict[str, LossSpec]:
        assert isinstance(config, CQL)
        policy: Any = modules["policy"]
        losses = super().losses(modules, config)
        of_sac = losses["critics"].prepare
        assert of_sac is not None

        def of_rows(rows: Minibatch) -> Minibatch:
            return of_sac(rows) | other_actions(policy, rows, config)

        critics = replace(losses["critics"], function=conservative_loss, prepare=of_rows)
        return losses | {"critics": critics}

    def num_normal(self, policy: Policy, config: SAC) -> int:
        assert isinstance(config, CQL)
        more = 3 * config.num_sampled_actions * policy.num_draws
        return super().num_normal(policy, config) + more
