"""Layers and how they begin. Left out: what goes through them (`encoders.py`, `policy.py`)."""

import itertools
import math

from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
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


def mlp(num_in: int, hidden_sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """Hidden layers only, each with gain sqrt 2; the caller puts its own last layer on top.

    Maps `[..., num_in]` to `[..., hidden_sizes[-1]]` (or to itself, without hidden layers).
    """
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise((num_in, *hidden_sizes)):
        layers += [linear(size_in, size_out, math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)
