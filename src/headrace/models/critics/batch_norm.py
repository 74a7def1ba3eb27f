"""Batch renormalization of features, by the moments of the batch while a network learns.

Left out: which pass learns (`algos/critics/crossq.py`).
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_MOMENTUM, _EPS = 0.01, 1e-3
_MOST_SCALE, _MOST_SHIFT, _WARM_UP = 3.0, 5.0, 100_000  # of CrossQ's authors


class BatchNorm(nn.Module):
    """Normalizes features by running moments or, within `by_batch`, by those of the batch.

    Batch renormalization (Ioffe 2017, arXiv:1702.03275): the batch's own moments are corrected
    towards the running ones, once these have settled.

    Args:
        shape: of the features, without the batch: `(num_features,)`, or `(E, 1, num_features)` for
            E networks. The batch is the second last axis of what is normalized.
    """

    mean: Tensor
    var: Tensor
    num_batches: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(make(shape)) for make in (torch.ones, torch.zeros))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("num_batches", torch.zeros(()))
        self.of_batch = False

    def forward(self, features: Tensor, *, frozen: bool = False) -> Tensor:
        """Return normalized features `[..., B, num_features]`.

        Args:
            frozen: let no gradient flow to the weights.
        """
        features = features.float()  # moments of bf16 would be too coarse
        own: tuple[Tensor, Tensor] = (self.weight, self.bias)
        weight, bias = (each.detach() if frozen else each for each in own)
        if not self.of_batch:
            scale = weight * (self.var + _EPS).rsqrt()
            return torch.addcmul(bias - self.mean * scale, features, scale)
        var, mean = torch.var_mean(features, -2, correction=0, keepdim=True)
        std = (var + _EPS).sqrt()
        found = (features - mean) / std
        with torch.no_grad():
            running = (self.var + _EPS).sqrt()
            has_settled = self.num_batches >= _WARM_UP
            scale = (std / running).clamp(1 / _MOST_SCALE, _MOST_SCALE)
            shift = ((mean - self.mean) / running).clamp(-_MOST_SHIFT, _MOST_SHIFT)
            scale = torch.where(has_settled, scale, torch.ones_like(scale))
            shift = shift * has_settled
            self.mean.lerp_(mean.view_as(self.mean), _MOMENTUM)
            self.var.lerp_(var.view_as(self.var), _MOMENTUM)
            self.num_batches += 1
        return torch.addcmul(bias, torch.addcmul(shift, found, scale), weight)


@contextlib.contextmanager
def by_batch(module: nn.Module) -> Iterator[None]:
    """Have all layers of a module normalize by the batch's moments, and learn running ones."""
    layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
    for layer in layers:
        layer.of_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.of_batch = False
