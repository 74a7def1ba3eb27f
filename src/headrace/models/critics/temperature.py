"""The weight of the entropy in SAC."""

import math

import torch
from torch import Tensor, nn


class Temperature(nn.Module):
    """The weight α of the entropy; its logarithm is learned."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        """Return α, as a constant."""
        return self.log_alpha.detach().exp()
