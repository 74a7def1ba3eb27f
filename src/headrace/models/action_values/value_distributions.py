"""What a network's outputs say of the return of an action: its mean alone, or its distribution.

Each kind gives the mean, the target of a transition, and the loss towards it. Left out: the network
(`q_policy.py`), and which transitions are learned from (`algos/action_values/dqn.py`).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headrace.batch import Minibatch
from headrace.errors import ConfigError


class ValueDistribution(nn.Module, ABC):
    """A kind of outputs, `[..., K]` for an action.

    Attributes:
        num_atoms: K, the outputs of an action.
    """

    num_atoms: int

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Return the expected returns `[...]` of outputs `[..., K]`."""

    @abstractmethod
    def target(self, outputs: Tensor, reward: Tensor, discount: Tensor) -> Minibatch:
        """Return the targets of transitions.

        Args:
            outputs: of the next action, `[B, K]`.
            reward: `[B]`; discount: `[B]`, of what follows.

        Returns:
            `target`, of a shape that `loss` takes; `target_mean`, its mean, `[B]`.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the losses `[B]` of outputs `[B, K]`."""

    def error(self, outputs: Tensor, rows: Minibatch) -> Tensor:
        """Return how wrong the outputs are, `[B]`, for the rows' `target` and `target_mean`."""
        mean_error: Tensor = self.mean(outputs) - rows["target_mean"]
        return mean_error.abs()


class MeanOnly(ValueDistribution):
    """The expected return itself."""

    num_atoms = 1

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)

    def target(self, outputs: Tensor, reward: Tensor, discount: Tensor) -> Minibatch:
        target = torch.addcmul(reward, discount, outputs.squeeze(-1))
        return {"target": target, "target_mean": target}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        # The error is clipped to ±1 (Mnih et al. 2015, "Training algorithm"): Huber's loss.
        return nn.functional.smooth_l1_loss(outputs.squeeze(-1), target, reduction="none")


class C51(ValueDistribution):
    """C51: probabilities of K returns, evenly spaced (Bellemare et al. 2017, arXiv:1707.06887).

    Outputs are logits.

    Raises:
        ConfigError: v_min is not below v_max, or there is only one atom.
    """

    atoms: Tensor

    def __init__(self, num_atoms: int, v_min: float, v_max: float) -> None:
        super().__init__()
        if not v_min < v_max or num_atoms < 2:
            raise ConfigError(
                f"v_min={v_min}, v_max={v_max} and num_atoms={num_atoms}: C51 needs v_min < v_max, "
                "the least and the greatest return to expect, and two atoms or more."
            )
        self.num_atoms, self._v_min, self._v_max = num_atoms, v_min, v_max
        self.register_buffer("atoms", torch.linspace(v_min, v_max, num_atoms), persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        return (outputs.softmax(-1) * self.atoms).sum(-1)

    def target(self, outputs: Tensor, reward: Tensor, discount: Tensor) -> Minibatch:
        """Return also `clipped`, the probability `[B]` of returns outside of [v_min, v_max]."""
        # Algorithm 1: T̂z_j = r + γ z_j, clipped; its probability goes to the two atoms beside it.
        probability = outputs.softmax(-1)
        shifted = torch.addcmul(reward.unsqueeze(-1), discount.unsqueeze(-1), self.atoms)
        inside = shifted.clamp(self._v_min, self._v_max)
        place = (inside - self._v_min) * ((self.num_atoms - 1) / (self._v_max - self._v_min))
        lower = place.floor().clamp(max=self.num_atoms - 2)
        share = (place - lower).clamp(max=1.0)  # v_max may be rounded up beyond the last atom
        target = torch.zeros_like(probability)
        target.scatter_add_(-1, lower.long(), probability * (1 - share))
        target.scatter_add_(-1, lower.long() + 1, probability * share)
        return {
            "target": target,
            "target_mean": (target * self.atoms).sum(-1),
            "clipped": (probability * (inside != shifted)).sum(-1),
        }

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        # The cross-entropy: its gradient is that of D_KL(target || outputs)
        return -(target * outputs.log_softmax(-1)).sum(-1)

    def error(self, outputs: Tensor, rows: Minibatch) -> Tensor:
        # D_KL(target || outputs): 0 where the distribution is right, however wide it is
        # (Hessel et al. 2018, arXiv:1710.02298, "The Integrated Agent")
        entropy = torch.special.entr(rows["target"]).sum(-1)
        divergence: Tensor = self.loss(outputs, rows["target"]) - entropy
        return divergence.clamp(min=0)


class Quantiles(ValueDistribution):
    """Quantiles of the return at (i + 1/2) / K (QR-DQN: Dabney et al. 2018, arXiv:1710.10044)."""

    share: Tensor

    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.num_atoms = num_atoms
        share = (torch.arange(num_atoms) + 0.5) / num_atoms
        self.register_buffer("share", share, persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.mean(-1)

    def target(self, outputs: Tensor, reward: Tensor, discount: Tensor) -> Minibatch:
        target = torch.addcmul(reward.unsqueeze(-1), discount.unsqueeze(-1), outputs)
        return {"target": target, "target_mean": target.mean(-1)}

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        # Algorithm 1 and eq. 10: Σ_i E_j[|τ_i - 1{y_j < θ_i}| L(y_j - θ_i)], with Huber's L
        predicted = outputs.unsqueeze(-1).expand(-1, -1, self.num_atoms)
        aims = target.unsqueeze(-2).expand_as(predicted)
        huber = nn.functional.smooth_l1_loss(predicted, aims, reduction="none")
        share = self.share.unsqueeze(-1)
        weight = torch.where(aims < predicted, 1 - share, share)
        loss: Tensor = (weight * huber).mean(-1).sum(-1)
        return loss


def value_distribution(kind: str, num_atoms: int, v_min: float, v_max: float) -> ValueDistribution:
    """Return what a network with this setting `distribution` learns of the return."""
    if kind == "c51":
        return C51(num_atoms, v_min, v_max)
    return Quantiles(num_atoms) if kind == "qr" else MeanOnly()
