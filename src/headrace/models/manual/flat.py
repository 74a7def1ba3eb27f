"""The parameters of a module as one vector, so that a gradient and its steps are few operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FlatParameters:
    """Parameters that become views of one vector.

    Attributes:
        parameters: the vector.
        flat: a gradient of the same layout, 0 at first.
    """

    def __init__(self, shaped: Sequence[nn.Parameter]) -> None:
        self._shaped = shaped
        self.parameters = torch.cat([p.detach().flatten() for p in shaped])
        self.flat = torch.zeros_like(self.parameters)
        values, self._gradients = self.parts(self.parameters), self.parts(self.flat)
        for parameter, part in values.items():
            parameter.data = part

    def parts(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's part of a flat vector with the layout of `parameters`."""
        pieces = torch.split_with_sizes(flat, [p.numel() for p in self._shaped])
        return {p: piece.view_as(p) for p, piece in zip(self._shaped, pieces, strict=True)}

    def start_update(self) -> None:
        """Read what stays the same during an update; nothing by default."""

    def value_and_gradient(self, parameter: Any) -> tuple[Tensor, Tensor]:
        """Return a parameter and its gradient."""
        return parameter.detach(), self._gradients[parameter]

    def stacked(self, parameters: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return neighbours in the vector, of one shape, and their gradients: `[E, *shape]`."""
        first = parameters[0]
        shape, size = (len(parameters), *first.shape), len(parameters) * first.numel()
        start = (first.data_ptr() - self.parameters.data_ptr()) // first.element_size()
        values, gradients = (
            flat[start : start + size].view(shape) for flat in (self.parameters, self.flat)
        )
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(values, parameters, strict=True))
        return values, gradients
