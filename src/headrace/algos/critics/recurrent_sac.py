"""The losses of SAC with recurrent cores, of sequences.

Policy and critics have a core each, as in Ni et al. 2022, arXiv:2110.05038. The policy's state at
the beginning of a sequence is the stored one. That of the critics, which do not act, is zero, and
the burn-in makes up for it. Left out: settings and algorithm (`sac.py`).
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import Metrics
from headrace.algos.critics.shared import loss_of_outputs, soft_loss
from headrace.algos.sequences import sequence_of
from headrace.batch import Minibatch
from headrace.models.critics.actor import ActorPolicy
from headrace.models.critics.critics import Critics
from headrace.models.critics.dropout import key_of
from headrace.models.critics.heads import SquashedGaussian
from headrace.models.critics.temperature import Temperature


def actor_loss(
    policy: ActorPolicy,
    minibatch: Minibatch,
    cfg: Any,
    *,
    critics: Critics,
    temperature: Temperature,
) -> tuple[Tensor, Metrics]:
    """Return the loss of the policy, and its metrics, as `sac.actor_loss`."""
    size, learned = policy.num_draws, slice(cfg.sequence_length)
    params = policy.params_of_sequence(*sequence_of(minibatch), cfg.burn_in)
    normal = minibatch["noise"][:, size : 2 * size]
    action, log_prob = _draw(policy, params[learned].flatten(0, 1), normal)
    with torch.no_grad():
        features = _features(critics, policy, minibatch, cfg)[learned].flatten(0, 1)
    outputs = critics.outputs(features, action, frozen=True, key=key_of(minibatch, 2))
    value = critics.estimate.to_improve(outputs)
    target = cfg.target_entropy * size
    return soft_loss(temperature, log_prob, value, minibatch, target)


def critics_loss(
    critics: Critics, minibatch: Minibatch, cfg: Any, *, policy: ActorPolicy
) -> tuple[Tensor, Metrics]:
    """Return the loss of critics, and its metrics, as `shared.critics_loss`."""
    features = _features(critics, policy, minibatch, cfg)[: cfg.sequence_length].flatten(0, 1)
    action = minibatch["action"].flatten(0, 1)
    outputs = critics.outputs(features, action, key=key_of(minibatch, 1))
    return loss_of_outputs(critics.estimate, outputs, minibatch["target"], minibatch)


@torch.no_grad()
def targets(
    rows: Minibatch, *, policy: ActorPolicy, target: Critics, temperature: Temperature, cfg: Any
) -> Minibatch:
    """Return the targets of the rows of sequences, as `sac.targets`."""
    size = policy.num_draws
    at = rows["next_row"], torch.arange(len(rows["state"]), device=rows["state"].device)
    params = policy.params_of_sequence(*sequence_of(rows), cfg.burn_in)[at].flatten(0, 1)
    features = _features(target, policy, rows, cfg)[at].flatten(0, 1)
    action, log_prob = _draw(policy, params, rows["noise"][:, :size])
    outputs = target.outputs(features, action, key=key_of(rows, 0))
    normal = rows["noise"][:, 2 * size :][:, : target.estimate.num_normal]
    value = target.estimate.of_next(outputs, normal)
    value = value - (temperature() * log_prob).unsqueeze(-1)
    reward, discount = (rows[name].flatten().unsqueeze(-1) for name in ("reward", "discount"))
    return {"target": torch.addcmul(reward, discount, value)}


def _draw(policy: ActorPolicy, params: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(policy.head, SquashedGaussian)
    return policy.head.draw(params, normal)


def _features(critics: Critics, policy: ActorPolicy, minibatch: Minibatch, cfg: Any) -> Tensor:
    seen = policy.normalized(minibatch["obs"])
    return critics.after_core(seen, minibatch["reset"], cfg.burn_in)
