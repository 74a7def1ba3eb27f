"""Layers and how they begin. Left out: what goes through them (`encoders.py`, `policy.py`)."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": nn.functional.elu,
    "silu": nn.functional.silu,
}


def linear(num_in: int, num_out: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal weights (Saxe et al. 2014, arXiv:1312.6120) and zero bias."""
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def conv(num_in: int, num_out: int, kernel: int, *, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    """A convolution with orthogonal weights, gain sqrt 2, and zero bias."""
    layer = nn.Conv2d(num_in, num_out, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Mlp(nn.Module):
    """Hidden layers only, each with gain sqrt 2; the caller puts its own last layer on top.

    Maps `[..., num_in]` to `[..., hidden_sizes[-1]]` (or to itself, without hidden layers).
    """

    def __init__(self, num_in: int, hidden_sizes: tuple[int, ...], activation: str) -> None:
        super().__init__()
        sizes = itertools.pairwise((num_in, *hidden_sizes))
        self.layers = nn.ModuleList(linear(*pair, math.sqrt(2)) for pair in sizes)
        # A function, not a module: a module's call takes longer than a small tensor's tanh.
        self._activation = ACTIVATIONS[activation]

    def forward(self, features: Tensor) -> Tensor:
        """The last layer's activations."""
        for layer in self.layers:
            features = self._activation(layer(features))
        return features
