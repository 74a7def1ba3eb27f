"""PPO's loss with its gradient written out, for small networks on the CPU.

The equations are those of `ppo.py`, which is the reference
(`tests/models/test_manual_gradient.py`): this gives the same within rounding, in fewer operations,
most of them NumPy's, which have less around them than torch's and autograd's. Left out: the clipped
value loss, and what `models/manual_gradient.py` leaves out; those are the page's own.
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
    """Return why `Gradient` cannot replace autograd; "" if it can."""
    if cfg.clip_value_loss:
        return "--clip-value-loss"
    return manual_gradient.unsupported(policy, network)


class Gradient:
    """The gradient of `ppo.loss`.

    Attributes:
        flat: the last one, of all parameters.
        parameters: all of them, in the same order.
        parts: see `ManualNetwork`.
    """

    def __init__(self, policy: Policy, network: Network, cfg: PPO) -> None:
        self._policy, self._cfg = policy, cfg
        self._net = manual_gradient.ManualNetwork(policy.model, list(policy.head.parameters()))  # type: ignore[arg-type]
        self.flat, self.parameters = self._net.gradient, self._net.parameters
        self.parts = self._net.parts

    @np.errstate(all="ignore")  # as torch does: what is not finite is found in the gradient's norm
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Compute it for a minibatch; see `ppo.loss` for that, and for the metrics."""
        net, cfg = self._net, self._cfg
        columns = {name: column.numpy() for name, column in minibatch.items()}
        weight, clip = columns["weight"], float(columns["clip_coef"])
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
        total = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
        kl, far = (away - log_ratio) @ weight, (np.abs(away) > clip) @ weight
        metrics = [total, policy_loss, value_loss, mean_entropy, kl, far]

        # Where clipping decides, the ratio moves nothing. (NaN is no such place: it comes through.)
        of_log_prob = -weight * np.where(gain > clipped, 0, gain)
        of_params, of_own = pull(of_log_prob, -cfg.ent_coef * weight)
        net.fill_gradient(of_params, cfg.vf_coef * error * weight, of_own)
        found = torch.from_numpy(np.array(metrics, params.dtype))
        return dict(zip(_METRICS, found.unbind(), strict=True))
