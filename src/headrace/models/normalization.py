"""Running normalizers: in the model, so that they are published and saved with it.

They are frozen while a batch is made and learned from; the learner updates them in between. Only
the first batch sets them before it is learned from.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.models.networks import image_layout
from headrace.spec import PLAIN, Space

EPS = 1e-8
CLIP = 10.0


def merged(moments: Tensor) -> Tensor:
    """Merge count, mean and variance, `[samples, 3, ...]` to `[3, ...]` (Chan et al. 1979, 2.1)."""
    whole, *others = moments.unbind()
    for other in others:
        (count, mean, var), (more, their_mean, their_var) = whole, other
        total, delta = count + more, their_mean - mean
        some = total.clamp(min=1)  # two empty samples have moments of 0
        square = var * count + their_var * more + delta.square() * count * more / some
        whole = torch.stack([total, mean + delta * more / some, square / some])
    return whole


class RunningMoments(nn.Module):
    """Running mean and variance per element; float64, as 1e8 would swallow float32 increments."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor, ranks: Ranks = SINGLE_RANK) -> None:
        """Merge `[rows, ...]` of all ranks; pool dimensions where the moments have length 1."""
        pooled = [0, *(d + 1 for d, length in enumerate(self.mean.shape) if length == 1)]
        count = torch.full_like(self.mean, rows.numel() // max(1, self.mean.numel()))
        mean = var = torch.zeros_like(self.mean)
        if len(rows):
            var, mean = torch.var_mean(rows.double(), pooled, correction=0, keepdim=True)
        seen = torch.stack([count, mean.reshape(count.shape), var.reshape(count.shape)])
        before = torch.stack([self.count.expand_as(count), self.mean, self.var])
        count, mean, var = merged(torch.cat([before.unsqueeze(0), ranks.gather(seen)]))
        self.count.copy_(count.max())
        self.mean.copy_(mean)
        self.var.copy_(var)

    def scaling(self) -> tuple[Tensor, Tensor]:
        """Return what to subtract and what to multiply by then, float32."""
        return self.mean.float(), (self.var + EPS).rsqrt().float()


class NormalizeObs(nn.Module):
    """Boxes to mean 0 and variance 1, clipped to ±10: images by channel. Other spaces pass."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        boxes = {key: part for key, part in space.leaves if part.kind == "box"}
        self._index = {key: i for i, key in enumerate(boxes)}
        self.moments = nn.ModuleList(RunningMoments(_by_channel(box)) for box in boxes.values())

    def of(self, key: str) -> RunningMoments:
        """Return the moments of a key of the observation (PLAIN: of the only array)."""
        return self.moments[self._index[key]]  # type: ignore[return-value]

    def _each(self, function: Callable[[str, Tensor], Any], obs: Obs) -> Any:
        if isinstance(obs, dict):
            return {key: function(key, part) for key, part in obs.items()}
        return function(PLAIN, obs)

    def forward(self, obs: Obs) -> Any:
        """Normalize observations, or some of their parts."""

        def normalized(key: str, part: Tensor) -> Tensor:
            if key not in self._index:
                return part
            mean, scale = self.of(key).scaling()
            return ((part.float() - mean) * scale).clamp(-CLIP, CLIP)

        return self._each(normalized, obs)

    def update(self, obs: Obs, valid: Tensor, ranks: Ranks = SINGLE_RANK) -> None:
        """Merge the valid observations `[T, n, ...]` of all ranks."""

        def merge(key: str, part: Tensor) -> None:
            if key in self._index:
                self.of(key).update(part[valid], ranks)

        self._each(merge, obs)


class NormalizeReward(RunningMoments):
    """Rewards divided by the spread of the discounted return (not centred), clipped to ±10.

    Attributes:
        drift: how many times as large rewards have become by the last update of the moments. Values
            that were learned before it are of the smaller ones.
    """

    drift: Tensor

    def __init__(self) -> None:
        super().__init__(())
        self.register_buffer("drift", torch.ones(()), persistent=False)

    def update(self, rows: Tensor, ranks: Ranks = SINGLE_RANK) -> None:
        before, is_empty = self.scaling()[1], self.count == 0
        super().update(rows, ranks)
        # Empty moments are set before the first values are learned.
        self.drift.copy_(torch.where(is_empty, 1.0, self.scaling()[1] / before))

    def forward(self, reward: Tensor) -> Tensor:
        return (reward * self.scaling()[1]).clamp(-CLIP, CLIP)


def _by_channel(space: Space) -> tuple[int, ...]:
    """Return the shape of a box's moments: its own; 1 in height and width of an image."""
    layout = image_layout(space)
    if layout is None:
        return space.shape
    pooled = layout.order[-2:]
    return tuple(1 if d in pooled else length for d, length in enumerate(space.shape))
