"""Dropout whose masks need no generator: they follow from a number of each row.

Left out: where these numbers come from (`algos/critics/sac.py`).
"""

import torch
from torch import Tensor, nn

from headrace.batch import Minibatch
from headrace.errors import ConfigError


class Dropout(nn.Module):
    """Dropout of the units of E networks (Hiraoka et al. 2022, arXiv:2110.02034).

    A unit is dropped where the product of the row's key and the unit's, both 32 bits, is small.
    Thus one multiplication per unit takes the place of a random number.

    Args:
        rate: share of the units to drop.

    Raises:
        ConfigError: it would drop all.
    """

    key: Tensor

    def __init__(self, rate: float, num_networks: int, num_units: int) -> None:
        super().__init__()
        if rate >= 1:
            raise ConfigError(f"dropout={rate}: expected less than 1.\nUse --dropout 0.01.")
        key = torch.randint(-(2**30), 2**30, (num_networks, 1, num_units), dtype=torch.int32)
        self.register_buffer("key", 2 * key + 1)  # odd: no bit of the row's key is lost
        self._rate = rate
        self._least = int(-(2**31) + rate * 2**32)

    def forward(self, units: Tensor, row_key: Tensor) -> Tensor:
        """Return `units`, `[E, B, num_units]`, some of them 0, and the others scaled up.

        Args:
            row_key: `[B]` int32.
        """
        product = self.key[: len(units)] * row_key.view(1, -1, 1)  # the lowest 32 bits of it
        return units * (product >= self._least) * (1 / (1 - self._rate))


USES = 3
"""Passes of critics in a gradient step, each with masks of its own."""


def row_keys(normal: Tensor) -> Tensor:
    """Return the keys of rows `[B, USES]` int32: the bits of as many normal numbers."""
    return normal.contiguous().view(torch.int32)


def key_of(minibatch: Minibatch, use: int) -> Tensor | None:
    """Return the keys `[B]` of a pass; None: nothing is dropped."""
    keys = minibatch.get("row_keys")
    return None if keys is None else keys[:, use]
