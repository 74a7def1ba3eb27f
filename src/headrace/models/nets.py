"""Networks: from one vector of numbers to another. Left out: what the numbers mean."""

import itertools
import math

import torch
from torch import Tensor, nn

from headrace.spec import Space

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


def mlp(num_in: int, hidden_sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """Hidden layers only, each with gain sqrt 2; the caller puts its own last layer on top.

    Maps `[..., num_in]` to `[..., hidden_sizes[-1]]` (or to itself, without hidden layers).
    """
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise((num_in, *hidden_sizes)):
        layers += [linear(size_in, size_out, math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


class FlatEncoder(nn.Module):
    """An observation as one flat float vector: Box flattened, integers one-hot.

    Maps `[..., *space.shape]` to `[..., num_features]`.
    """

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space
        self.num_features = space.size if space.kind == "box" else sum(space.nvec)

    def forward(self, obs: Tensor) -> Tensor:
        """Encode a batch of observations."""
        if self._space.kind == "box":
            batch = obs.shape[: obs.dim() - len(self._space.shape)]
            return obs.reshape(*batch, self._space.size).float()
        components = obs.unsqueeze(-1) if self._space.kind == "discrete" else obs
        hot = [
            nn.functional.one_hot(components[..., i] - first, choices)
            for i, (choices, first) in enumerate(
                zip(self._space.nvec, self._space.start, strict=True)
            )
        ]
        return torch.cat(hot, -1).float()
