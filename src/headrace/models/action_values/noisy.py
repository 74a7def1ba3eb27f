"""Layers with noise in their weights, which explore in place of random actions.

Left out: when there is new noise (`algos/action_values/dqn.py`).
"""

import math

import torch
from torch import Tensor, nn

from headrace.device_seeding import normal_noise


class NoisyLinear(nn.Linear):
    """A linear layer with factorised noise (Fortunato et al. 2018, arXiv:1706.10295, section 3).

    The weights are `weight + sigma * f(e_out) f(e_in)`, with f(x) = sgn(x) sqrt(|x|). The noise is
    in buffers, so that it is saved and published with the weights. In `eval` mode there is none.
    """

    noise_in: Tensor
    noise_out: Tensor

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)  # uniform in ±1 / sqrt(num_in), as in the paper
        sigma = 0.5 / math.sqrt(num_in)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, sigma))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, sigma))
        self.register_buffer("noise_in", _scaled(torch.randn(num_in)))
        self.register_buffer("noise_out", _scaled(torch.randn(num_out)))

    def noisy_weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights and the bias that the layer applies."""
        if not self.training:
            return self.weight, self.bias
        weight = self.weight + self.weight_sigma * torch.outer(self.noise_out, self.noise_in)
        return weight, self.bias + self.bias_sigma * self.noise_out

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, *self.noisy_weights())


@torch.no_grad()
def renew_noise(module: nn.Module, seed: int, number: int | Tensor, use: int) -> None:
    """Give all noisy layers of a module the noise that belongs to (seed, number, use)."""
    layers = [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]
    parts = [part for layer in layers for part in (layer.noise_in, layer.noise_out)]
    sizes = [len(part) for part in parts]
    noise = _scaled(normal_noise(seed, number, use, sum(sizes), parts[0].device))
    for part, new in zip(parts, torch.split_with_sizes(noise, sizes), strict=True):
        part.copy_(new)


def _scaled(noise: Tensor) -> Tensor:
    return noise.sign() * noise.abs().sqrt()
