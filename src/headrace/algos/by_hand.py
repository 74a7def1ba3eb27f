"""PPO's loss with its gradient written out, for small networks on the CPU.

The equations are those of `ppo.py`, which is the reference (`tests/test_by_hand.py`): this gives
the same within rounding, in a third of the operations, most of them NumPy's, which have less around
them than torch's and autograd's. Left out: the clipped value loss, and what `models/by_hand.py`
leaves out; those are the page's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.algos.ppo import PPO
from headrace.batch import Minibatch
from headrace.models import by_hand
from headrace.models.policy import Network, Policy

LossFunction = Callable[[Policy, Minibatch, Any], tuple[Tensor, dict[str, Tensor]]]

_METRICS = "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"


def loss_for(policy: Policy, network: Network, cfg: Any, plain: LossFunction) -> LossFunction:
    """What computes the loss of an algorithm: `plain`, its page's, unless there is a faster way."""
    if isinstance(cfg, PPO) and not cfg.clip_value_loss and by_hand.can(policy, network):
        return _ByHand(policy)
    return plain


class _ByHand:
    def __init__(self, policy: Policy) -> None:
        self._net = by_hand.Net(policy.model)  # type: ignore[arg-type]
        self._parameters = [*self._net.parameters, *policy.head.parameters()]

    def __call__(
        self, policy: Policy, minibatch: Minibatch, cfg: PPO
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `ppo.loss`."""
        total, metrics = _Function.apply(  # type: ignore[no-untyped-call]
            self._net, policy, minibatch, cfg, *self._parameters
        )
        return total, dict(zip(_METRICS, metrics.unbind(), strict=True))


class _Function(torch.autograd.Function):
    """Computes gradients together with the loss: nothing of the forward pass is kept."""

    @staticmethod
    @np.errstate(all="ignore")  # as torch does: what is not finite is found in the gradient's norm
    def forward(
        ctx: Any, net: by_hand.Net, policy: Policy, minibatch: Minibatch, cfg: PPO, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        columns = {name: column.numpy() for name, column in minibatch.items()}
        weight, clip = columns["weight"], float(columns["clip_coef"])
        params, value = net.forward(policy.normalized(minibatch["obs"]))
        log_prob, entropy, pull = by_hand.evaluate(policy.head, params, columns["action"])  # type: ignore[arg-type]

        log_ratio = log_prob - columns["log_prob"]
        ratio = np.exp(log_ratio)
        away = ratio - 1
        advantage = columns["advantage"]
        gain = ratio * advantage
        clipped = ratio.clip(1 - clip, 1 + clip) * advantage
        policy_loss = -(np.minimum(gain, clipped) @ weight)
        error = value - columns["target"]
        value_loss = 0.5 * ((error * error) @ weight)
        mean_entropy = entropy @ weight
        total = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
        kl, far = (away - log_ratio) @ weight, (np.abs(away) > clip) @ weight
        metrics = [total, policy_loss, value_loss, mean_entropy, kl, far]

        # Where clipping decides, the ratio moves nothing. (NaN is no such place: it comes through.)
        of_log_prob = -weight * np.where(gain > clipped, 0, gain)
        of_params, of_own = pull(of_log_prob, -cfg.ent_coef * weight)
        gradients = net.gradients(of_params, cfg.vf_coef * error * weight)
        ctx.gradients = [*gradients, *map(torch.from_numpy, of_own)]
        found = torch.from_numpy(np.array(metrics, params.dtype))
        ctx.mark_non_differentiable(found)
        return found[0].clone(), found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients if float(scale) == 1.0 else [g * scale for g in ctx.gradients]
        ctx.gradients = None  # so that autograd may keep them as they are
        return None, None, None, None, *gradients
