"""The losses of SAC where actions are choices (Christodoulou 2019, arXiv:1910.07207).

Expectations over actions are sums, and no action is drawn. Left out: settings and algorithm
(`sac.py`).
"""

import torch
from torch import Tensor

from headrace.algos.base import Metrics, mean_over_rows
from headrace.batch import Minibatch
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.heads import ExploringChoice
from headrace.models.critics.temperature import Temperature


def actor_loss(
    policy: ActorPolicy,
    minibatch: Minibatch,
    cfg: object,
    *,
    critics: Critics,
    temperature: Temperature,
    target_share: float,
) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy, Σ_a π(a | s) (α log π(a | s) - min_i Q_i(s, a)).

    Args:
        minibatch: rows of `obs` and `weight`.
        target_share: of the largest entropy, log(number of allowed actions), the one to aim at.

    Returns:
        The metric `missing_entropy` is of each row, `[B]`.
    """
    obs = minibatch["obs"]
    params, _ = policy(obs)
    assert isinstance(policy.head, ExploringChoice)
    num_allowed = policy.head.allowed(params).sum(-1)
    probability, log_p = params.softmax(-1), params.log_softmax(-1)
    entropy = -(probability * log_p).sum(-1)
    with torch.no_grad():
        best = critics(policy.normalized(obs)).amin(0).squeeze(-1)
    value = temperature() * entropy + (probability * best).sum(-1)
    total = -(value * minibatch["weight"]).sum()
    entropy = entropy.detach()
    return total, {
        "actor_loss": total.detach(),
        **mean_over_rows({"entropy": entropy}, minibatch),
        "missing_entropy": target_share * num_allowed.to(entropy.dtype).log() - entropy,
    }


@torch.no_grad()
def targets(
    rows: Minibatch, *, policy: ActorPolicy, target: Critics, temperature: Temperature
) -> Minibatch:
    """Return the targets of transitions, and normalized observations."""
    # y = r + γ Σ_a π(a | s') (min_i Q_target_i(s', a) - α log π(a | s'))
    next_obs = rows["next_obs"]
    params, _ = policy(next_obs)
    least = target(policy.normalized(next_obs)).amin(0).squeeze(-1)
    probability, log_p = params.softmax(-1), params.log_softmax(-1)
    # Before α: it may make the least finite number, which forbidden actions have, infinite.
    entropy = -(probability * log_p).sum(-1)
    value = (probability * least).sum(-1) + temperature() * entropy
    assert isinstance(policy.head, ExploringChoice)
    value = value.where(policy.head.allowed(params).any(-1), 0.0)
    return {
        "target": torch.addcmul(rows["reward"], rows["discount"], value).unsqueeze(-1),
        "seen": policy.normalized(rows["obs"]),
    }
