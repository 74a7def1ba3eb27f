"""The forward and backward pass of linear layers with relu between them, without autograd.

Left out: losses (`algos/`), and layers with tanh (`models/manual_gradient.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.networks import NORM_EPS


class FlatParameters:
    """Parameters that become views of one vector.

    Attributes:
        parameters: the vector.
        flat: a gradient of the same layout, 0 at first.
        gradients: the part of `flat` of each parameter.
    """

    def __init__(self, shaped: Sequence[nn.Parameter]) -> None:
        self._shaped = shaped
        self.parameters = torch.cat([p.detach().flatten() for p in shaped])
        self.flat = torch.zeros_like(self.parameters)
        for parameter, part in self.parts(self.parameters).items():
            parameter.data = part
        self.gradients = self.parts(self.flat)

    def parts(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's part of a flat vector with the layout of `parameters`."""
        pieces = torch.split_with_sizes(flat, [p.numel() for p in self._shaped])
        return {p: piece.view_as(p) for p, piece in zip(self._shaped, pieces, strict=True)}


class ManualMlp:
    """Layers of one network, or of E networks side by side. It remembers its last forward pass.

    Args:
        layers: `nn.Linear`, or layers whose weights are `[E, num_in, num_out]`.
        norms: layer normalization before each relu of one network, or none. `of_input` is for
            layers without it.
        first: use only so many of the E networks; `fill` is for all of them.
    """

    def __init__(
        self, layers: Sequence[Any], norms: Sequence[Any] = (), first: int | None = None
    ) -> None:
        self._layers, self._norms, self._first = layers, norms, first
        self._is_batched = layers[0].weight.dim() == 3
        self._product: Callable[..., Tensor] = torch.bmm if self._is_batched else torch.mm
        self._plus_product: Callable[..., Tensor] = (
            torch.baddbmm if self._is_batched else torch.addmm
        )
        self._inputs: list[Tensor] = []
        self._sums: list[tuple[Any, ...]] = []

    def _weight(self, layer: Any) -> Tensor:
        """Return a layer's weight as `[..., num_in, num_out]`."""
        weight: Tensor = layer.weight
        return weight[: self._first] if self._is_batched else weight.t()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer, `[(E,) B, num_out]`, which has no relu.

        Args:
            x: `[(E,) B, num_in]`.
        """
        self._inputs, self._sums = [x], []
        for number, layer in enumerate(self._layers):
            bias = layer.bias[: self._first] if self._is_batched else layer.bias
            x = self._plus_product(bias, x, self._weight(layer))
            if number == len(self._layers) - 1:
                break
            if self._norms:
                before, (gain, shift) = x, (self._norms[number].weight, self._norms[number].bias)
                x, mean, scale = torch.native_layer_norm(x, gain.shape, gain, shift, NORM_EPS)
                self._sums.append((before, gain.shape, mean, scale, gain, shift))
            self._inputs.append(x.relu_())
        return x

    @torch.no_grad()
    def fill(self, signal: Tensor, gradients: Mapping[Any, Tensor]) -> None:
        """Fill the gradients of all parameters from that of the output."""
        assert self._first is None
        for number in reversed(range(len(self._layers))):
            layer, x = self._layers[number], self._inputs[number]
            of_weight, of_bias = gradients[layer.weight], gradients[layer.bias]
            if self._is_batched:
                torch.bmm(x.transpose(1, 2), signal, out=of_weight)
                torch.sum(signal, 1, keepdim=True, out=of_bias)
            else:
                torch.mm(signal.t(), x, out=of_weight)
                torch.sum(signal, 0, out=of_bias)
            if number:
                signal = self._below(number, signal)
                if self._norms:
                    signal, *of_norm = torch.ops.aten.native_layer_norm_backward(
                        signal, *self._sums[number - 1], [True] * 3
                    )
                    norm = self._norms[number - 1]
                    gradients[norm.weight].copy_(of_norm[0])
                    gradients[norm.bias].copy_(of_norm[1])

    @torch.no_grad()
    def of_input(self, signal: Tensor) -> Tensor:
        """Return the gradient of the input, `[(E,) B, num_in]`, from that of the output."""
        assert not self._norms
        for number in reversed(range(1, len(self._layers))):
            signal = self._below(number, signal)
        return self._product(signal, self._weight(self._layers[0]).transpose(-1, -2))

    def _below(self, number: int, signal: Tensor) -> Tensor:
        """Return the gradient of what the relu below layer `number` was given."""
        weight = self._weight(self._layers[number])
        signal = self._product(signal, weight.transpose(-1, -2))
        # In place: from the gradient of relu(x) to that of x
        torch.ops.aten.threshold_backward.grad_input(
            signal, self._inputs[number], 0, grad_input=signal
        )
        return signal
