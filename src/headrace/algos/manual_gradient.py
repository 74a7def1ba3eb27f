"""The losses of PPO and A2C with explicit gradients, for small networks on the CPU.

`ppo.loss` (also APPO's) and `a2c.loss` (also IMPALA's) are the references: results agree within
rounding (`tests/models/test_manual_gradient.py`). These need fewer operations, most of them
NumPy's, whose overhead is lower than torch's.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.algos.base import ActorCriticConfig
from headrace.algos.ppo import PPO
from headrace.batch import Minibatch, Obs
from headrace.models.manual import actor_critic
from headrace.models.manual.actor_critic import ManualActorCritic
from headrace.models.manual.heads import Floats, evaluate
from headrace.models.policy import Network, Policy

Columns = dict[str, NDArray[Any]]


def unsupported(policy: Policy, network: Network, cfg: ActorCriticConfig) -> str:
    """Return the reason why a gradient here cannot replace autograd's, or ""."""
    return actor_critic.unsupported(policy, network)


class Gradient(ManualActorCritic):
    """A `ManualGradient` of a policy's loss, the value's error, and an entropy bonus."""

    _metrics: ClassVar[tuple[str, ...]] = "loss", "policy_loss", "value_loss", "entropy"

    def __init__(self, policy: Policy, network: Network, cfg: Any) -> None:
        super().__init__(policy, network.activation)
        self._cfg = cfg

    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> dict[str, float]:
        """Fill `flat`. The reference documents the minibatch and the metrics."""
        columns = {name: column.numpy() for name, column in minibatch.items() if name != "obs"}
        weight, vf_coef, ent_coef = columns["weight"], self._cfg.vf_coef, float(columns["ent_coef"])
        head, blocked = self._policy.head, self._blocked(minibatch["obs"], len(weight))
        params, value = self.forward(minibatch["obs"])
        if blocked is not None:
            np.copyto(params, np.finfo(params.dtype).min, where=blocked)
        log_prob, entropy, pull = evaluate(head, params, columns["action"])

        policy_loss, of_log_prob, more = self._policy_loss(columns, log_prob)
        value_loss, of_value = self._value_loss(columns, value)
        mean_entropy = entropy @ weight
        total = policy_loss + vf_coef * value_loss - ent_coef * mean_entropy
        metrics = total, policy_loss, value_loss, mean_entropy, *more

        of_params, of_head = pull(of_log_prob, -ent_coef * weight)
        if blocked is not None:
            of_params[blocked] = 0
        of_value *= vf_coef
        self.fill_gradient(of_params, of_value, of_head)
        return dict(zip(self._metrics, map(float, metrics), strict=True))

    def _blocked(self, obs: Obs, rows: int) -> NDArray[np.bool_] | None:
        """Return which params belong to choices that are not allowed, `[num_params, rows]`."""
        allowed = self._policy.allowed(obs, (rows,))
        if allowed is None:
            return None
        params = torch.zeros(rows, self._policy.head.num_params)
        return (self._policy.head.masked(params, allowed) != 0).numpy().T

    @abstractmethod
    def _policy_loss(self, columns: Columns, log_prob: Floats) -> tuple[Any, Floats, list[Any]]:
        """Return the loss, its gradient with respect to log-probs `[rows]`, and more metrics."""

    def _value_loss(self, columns: Columns, value: Floats) -> tuple[Any, Floats]:
        """Return the loss, and its gradient with respect to values `[rows]`."""
        error = value - columns["target"]
        of_value = error * columns["weight"]
        return 0.5 * (error @ of_value), of_value


class A2CGradient(Gradient):
    """A `ManualGradient` of `a2c.loss`."""

    def _policy_loss(self, columns: Columns, log_prob: Floats) -> tuple[Any, Floats, list[Any]]:
        of_log_prob = -columns["weight"] * columns["advantage"]
        return log_prob @ of_log_prob, of_log_prob, []


class PPOGradient(Gradient):
    """A `ManualGradient` of `ppo.loss`."""

    _metrics = *Gradient._metrics, "approx_kl", "clip_fraction"
    _cfg: PPO

    def _policy_loss(self, columns: Columns, log_prob: Floats) -> tuple[Any, Floats, list[Any]]:
        weight, clip = columns["weight"], float(columns["clip_coef"])
        log_ratio = log_prob - columns["log_prob"]
        ratio = np.exp(log_ratio)
        away = ratio - 1
        gain = ratio * columns["advantage"]
        clipped = np.minimum(np.maximum(ratio, 1 - clip), 1 + clip)
        clipped *= columns["advantage"]
        metrics = [(away - log_ratio) @ weight, (np.abs(away) > clip) @ weight]
        # Where the loss is clipped, the gradient is 0. NaN passes through the comparison.
        of_log_prob = np.where(gain > clipped, 0, gain)
        of_log_prob *= -weight
        return -(np.minimum(gain, clipped) @ weight), of_log_prob, metrics

    def _value_loss(self, columns: Columns, value: Floats) -> tuple[Any, Floats]:
        if not self._cfg.clip_value_loss:
            return super()._value_loss(columns, value)
        target, clip = columns["target"], float(columns["clip_coef"])
        error, change = value - target, value - columns["value"]
        square, near = error * error, columns["value"] + change.clip(-clip, clip) - target
        far = near * near
        # Where the error of a value that is clipped is the larger one, the gradient is 0.
        of_value = np.where((far > square) & (np.abs(change) > clip), 0, error)
        of_value *= columns["weight"]
        return 0.5 * (np.maximum(square, far) @ columns["weight"]), of_value
