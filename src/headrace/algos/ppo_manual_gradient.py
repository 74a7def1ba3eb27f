"""PPO's loss with an explicit gradient, for small networks on the CPU.

`ppo.loss` is the reference: results agree within rounding (`tests/models/test_manual_gradient.py`).
This needs fewer operations, most of them NumPy's, whose overhead is lower than torch's.
"""

import numpy as np
import torch
from torch import Tensor

from headrace.algos.ppo import PPO
from headrace.batch import Minibatch
from headrace.models import manual_gradient
from headrace.models.policy import Network, Policy

_METRICS = "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"


def unsupported(policy: Policy, network: Network, cfg: PPO) -> str:
    """Return the reason why `Gradient` cannot replace autograd, or ""."""
    if cfg.clip_value_loss:
        return "--clip-value-loss"
    return manual_gradient.unsupported(policy, network)


class Gradient:
    """A `ManualGradient` of `ppo.loss`."""

    def __init__(self, policy: Policy, network: Network, cfg: PPO) -> None:
        self._policy, self._cfg = policy, cfg
        self._net = manual_gradient.ManualNetwork(policy.model, list(policy.head.parameters()))  # type: ignore[arg-type]
        self.flat, self.parameters = self._net.gradient, self._net.parameters
        self.parts = self._net.parts

    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Fill `flat`. `ppo.loss` documents the minibatch and the metrics."""
        net, cfg = self._net, self._cfg
        columns = {name: column.numpy() for name, column in minibatch.items()}
        weight, clip = columns["weight"], float(columns["clip_coef"])
        ent_coef = float(columns["ent_coef"])
        params, value = net.forward(self._policy.normalized(minibatch["obs"]))
        log_prob, entropy, pull = manual_gradient.evaluate(
            self._policy.head,  # type: ignore[arg-type]
            params,
            columns["action"],
        )

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
        total = policy_loss + cfg.vf_coef * value_loss - ent_coef * mean_entropy
        kl, far = (away - log_ratio) @ weight, (np.abs(away) > clip) @ weight
        metrics = [total, policy_loss, value_loss, mean_entropy, kl, far]

        # Where the loss is clipped, the gradient is 0. NaN passes through the comparison.
        d_log_prob = -weight * np.where(gain > clipped, 0, gain)
        d_params, d_head = pull(d_log_prob, -ent_coef * weight)
        net.fill_gradient(d_params, cfg.vf_coef * error * weight, d_head)
        values = torch.from_numpy(np.array(metrics, params.dtype))
        return dict(zip(_METRICS, values.unbind(), strict=True))
