"""What critics say of a return, as a whole: the least of their values, or quantiles of all of them.

Critics give `[E, B, K]`: E networks, B rows, and K numbers each. Left out: the networks
(`critics.py`), and the entropy that SAC adds (`algos/critics/`).
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError


class Estimate(nn.Module, ABC):
    """One estimate of the return from those of several critics.

    Attributes:
        num_outputs: K.
        num_normal: normal numbers that `of_next` takes for each row.
    """

    num_outputs: int
    num_normal: int = 0

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Return the value `[E, B]` that each critic gives."""

    @abstractmethod
    def to_improve(self, outputs: Tensor) -> Tensor:
        """Return the values `[B]` that the policy is to make larger."""

    @abstractmethod
    def of_next(self, outputs: Tensor, normal: Tensor) -> Tensor:
        """Return what a target is made of, `[B, K']`.

        Args:
            outputs: of the target critics.
            normal: `[B, num_normal]`.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss `[B]` of outputs against targets `[B, K']`, summed over critics."""

    @abstractmethod
    def loss_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return `loss`, and the gradient `[E, B, K]` of each row's loss by its outputs."""

    @abstractmethod
    def improvement_gradient(self, outputs: Tensor) -> Tensor:
        """Return the gradient `[E, B, K]` of each row's `to_improve` by its outputs."""


class LeastValue(Estimate):
    """The least of the critics' values (Fujimoto et al. 2018, arXiv:1802.09477, section 4.2)."""

    num_outputs = 1

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(-1)

    def to_improve(self, outputs: Tensor) -> Tensor:
        return outputs.amin(0).squeeze(-1)

    def of_next(self, outputs: Tensor, normal: Tensor) -> Tensor:
        return outputs.amin(0)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square().sum((0, -1))

    def loss_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        error = outputs - target
        return error.square().sum((0, -1)), 2 * error

    def improvement_gradient(self, outputs: Tensor) -> Tensor:
        is_least = (outputs == outputs.amin(0)).to(outputs.dtype)
        return is_least / is_least.sum(0)


class LeastOfSome(LeastValue):
    """The least value of a few critics, drawn anew for each row; the policy improves the mean.

    Randomized ensembled double Q-learning (Chen et al. 2021, arXiv:2101.05982), which draws them
    for each minibatch.

    Args:
        num_critics: E.
        num_used: so many of them make a target.

    Raises:
        ConfigError: there are not so many.
    """

    def __init__(self, num_critics: int, num_used: int) -> None:
        super().__init__()
        if num_used > num_critics:
            raise ConfigError(
                f"critics_in_target={num_used}, but num_critics={num_critics}: expected no more.\n"
                f"Use --critics-in-target {num_critics} or less."
            )
        self.num_normal, self._num_used = num_critics, num_used

    def to_improve(self, outputs: Tensor) -> Tensor:
        return outputs.mean(0).squeeze(-1)

    def improvement_gradient(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / len(outputs))

    def of_next(self, outputs: Tensor, normal: Tensor) -> Tensor:
        used = normal.T.topk(self._num_used, 0).indices.unsqueeze(-1)
        return outputs.gather(0, used).amin(0)


class TruncatedQuantiles(Estimate):
    """Quantiles of the return (Kuznetsov et al. 2020, arXiv:2005.04269).

    Targets are made of the quantiles of all critics together, without the largest ones.

    Args:
        num_quantiles: K, of each critic.
        num_dropped: quantiles that targets leave out, for each critic.

    Raises:
        ConfigError: none would be left.
    """

    share: Tensor

    def __init__(self, num_quantiles: int, num_dropped: int) -> None:
        super().__init__()
        if num_dropped >= num_quantiles:
            raise ConfigError(
                f"num_quantiles={num_quantiles} and dropped_quantiles={num_dropped}: expected that "
                "some are left.\nUse --dropped-quantiles 2, for example."
            )
        self.num_outputs, self._num_dropped = num_quantiles, num_dropped
        share = (torch.arange(num_quantiles) + 0.5) / num_quantiles
        self.register_buffer("share", share, persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.mean(-1)

    def to_improve(self, outputs: Tensor) -> Tensor:
        return outputs.mean((0, -1))

    def of_next(self, outputs: Tensor, normal: Tensor) -> Tensor:
        num_critics = len(outputs)
        together = outputs.movedim(0, -1).flatten(-2).sort(-1).values
        return together[..., : together.shape[-1] - self._num_dropped * num_critics]

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        # Eq. 8: the mean of |τ_m - 1{y_i < θ_m}| L(y_i - θ_m) over quantiles m and targets i, with
        # Huber's L
        predicted, aims, weight = self._pairs(outputs, target)
        huber = nn.functional.smooth_l1_loss(predicted, aims, reduction="none")
        loss: Tensor = (weight * huber).mean((-2, -1)).sum(0)
        return loss

    def loss_and_gradient(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        predicted, aims, weight = self._pairs(outputs, target)
        # The gradient of Huber's loss is the error e, clipped to ±1: c. The loss is c (e - c / 2).
        error = predicted - aims
        clipped = error.clamp(-1, 1)
        rest = error.sub_(clipped, alpha=0.5)
        of_pairs = clipped.mul_(weight)
        loss = torch.linalg.vecdot(of_pairs.flatten(-2), rest.flatten(-2)).sum(0)
        num_pairs = self.num_outputs * target.shape[-1]
        return loss.div_(num_pairs), of_pairs.mean(-1).div_(self.num_outputs)

    def improvement_gradient(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / (len(outputs) * self.num_outputs))

    def _pairs(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each pair of a quantile and a target, and its weight, `[E, B, K, K']` each."""
        shape = *outputs.shape, target.shape[-1]
        predicted = outputs.unsqueeze(-1).expand(shape)
        aims = target.unsqueeze(-2).expand(shape)
        share = self.share.unsqueeze(-1)
        weight = torch.where(aims < predicted, 1 - share, share)
        return predicted, aims, weight


def estimate(num_critics: int, num_used: int, num_quantiles: int, num_dropped: int) -> Estimate:
    """Return the estimate of critics.

    Args:
        num_used: of them in a target; 0: all.
        num_quantiles: of each; 1: they give values.
        num_dropped: quantiles that targets leave out, for each critic.
    """
    if num_quantiles > 1:
        return TruncatedQuantiles(num_quantiles, num_dropped)
    return LeastOfSome(num_critics, num_used) if num_used else LeastValue()
