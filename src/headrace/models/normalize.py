"""Running normalizers. They live in the model, so that they are published and saved with it.

Frozen while acting and while learning from what was acted; updated between updates only, by
`update`. Left out: when that is (`run/learner.py`).
"""

import torch
from torch import Tensor, nn

_EPS = 1e-8
_CLIP = 10.0


class RunningMoments(nn.Module):
    """Mean and variance of all that was seen, per element (Chan, Golub, LeVeque 1979, eq. 2.1).

    Kept in float64: a count of 1e8 would swallow float32 increments.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Merge `[rows, *shape]` into the moments."""
        rows = rows.double()
        count = float(len(rows))
        if not count:
            return
        mean, var = rows.mean(0), rows.var(0, correction=0)
        total = self.count + count
        delta = mean - self.mean
        square = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean += delta * count / total
        self.var.copy_(square / total)
        self.count.copy_(total)


class NormalizeObs(RunningMoments):
    """Observations to mean 0 and variance 1, clipped to ±10."""

    def forward(self, features: Tensor) -> Tensor:
        """Normalize `[..., *shape]`."""
        scale = (self.var + _EPS).rsqrt().float()
        return ((features - self.mean.float()) * scale).clamp(-_CLIP, _CLIP)


class NormalizeReward(RunningMoments):
    """Rewards divided by the spread of the discounted return (not centred), clipped to ±10."""

    def __init__(self) -> None:
        super().__init__(())

    def forward(self, reward: Tensor) -> Tensor:
        """Scale rewards of any shape."""
        return (reward * (self.var + _EPS).rsqrt().float()).clamp(-_CLIP, _CLIP)
