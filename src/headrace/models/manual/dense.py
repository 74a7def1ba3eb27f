"""Dense layers forward and backward without autograd: few operations, in memory that is reused.

Left out: losses (`algos/`), and the two trunks of actor and critic (`actor_critic.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.models.manual.flat import FlatParameters
from headrace.models.networks import NORM_EPS
from headrace.models.policy import Network

_FEW_COLUMNS = 8
"""Outputs, and gradients of weights, with so few columns are NumPy's products: MKL takes 2 to 20
times as long for them. (With two threads and thousands of rows MKL is a fifth faster for 5 columns
or more.)"""


def _if_few(tensor: Tensor | None) -> NDArray[Any] | None:
    """Return a tensor with few columns as an array, which has the same memory; else None."""
    if tensor is None or tensor.shape[-1] > _FEW_COLUMNS:
        return None
    return tensor.numpy()


class Activation(NamedTuple):
    """An activation and its derivative, both in place.

    Attributes:
        apply: (sums, the same as an array) -> None: replaces them by activations.
        pull: (gradient of the activations, activations, sums) -> None: replaces that gradient
            by the gradient of the sums.
        needs_sums: whether the derivative needs sums as well as activations.
    """

    apply: Callable[[Tensor, NDArray[Any]], Any]
    pull: Callable[[Tensor, Tensor, Tensor | None], Any]
    needs_sums: bool = False


_of_tanh = torch.ops.aten.tanh_backward.grad_input
_of_relu = torch.ops.aten.threshold_backward.grad_input
_of_elu = torch.ops.aten.elu_backward.grad_input
_of_silu = torch.ops.aten.silu_backward.grad_input
ACTIVATIONS = {
    "tanh": Activation(  # torch's tanh takes longer on some CPUs, and NumPy's ReLU on others
        lambda _, x: np.tanh(x, out=x), lambda signal, h, _: _of_tanh(signal, h, grad_input=signal)
    ),
    "relu": Activation(
        lambda x, _: torch.relu_(x), lambda signal, h, _: _of_relu(signal, h, 0, grad_input=signal)
    ),
    "elu": Activation(
        lambda x, _: nn.functional.elu_(x),
        lambda signal, h, _: _of_elu(signal, 1, 1, 1, True, h, grad_input=signal),
    ),
    "silu": Activation(
        lambda x, _: nn.functional.silu(x, inplace=True),
        lambda signal, _, x: _of_silu(signal, x, grad_input=signal),
        needs_sums=True,
    ),
}


def unsupported(
    network: Network, encoders: Iterable[nn.Module], weight: Tensor, own: Mapping[str, bool]
) -> str:
    """Return the reason why gradients of such a network are not written out, or "".

    Args:
        encoders: of observations. What they learn has no gradient here.
        weight: one of the network's.
        own: reasons of the caller, and whether each holds.
    """
    reasons = {
        **own,
        "--arithmetic plain": network.arithmetic == "plain",
        f"precision {network.precision}": network.precision != "fp32",
        f"activation {network.activation}": network.activation not in ACTIVATIONS,
        "images": any(True for encoder in encoders for _ in encoder.parameters()),
        "on a GPU": weight.device.type != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Norm(NamedTuple):
    """Layer normalization.

    `gain` and `shift` are learned, and come with memory for their gradients. All are None where
    nothing is learned.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    of_gain: Tensor | None = None
    of_shift: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """A layer of one network, or of E networks side by side, and what computes its gradient.

    Attributes:
        weight: `[(E,) num_in, num_out]`.
        bias: `[num_out]`, or `[E, 1, num_out]`.
        of_weight, of_bias: memory for their gradients. `of_weight` is `[(E,) num_out, num_in]` if
            `is_transposed`, as `nn.Linear` stores it. None: the layer is frozen.
        activation: None: there is none.
        norm: before the activation; None: there is none.
    """

    weight: Tensor
    bias: Tensor
    of_weight: Tensor | None
    of_bias: Tensor | None
    is_transposed: bool
    activation: Activation | None
    norm: Norm | None = None


def _activation(name: str | None) -> Activation | None:
    return None if name is None else ACTIVATIONS[name]


def linear(
    flat: FlatParameters | None,
    layer: Any,
    activation: str | None = None,
    norm: nn.Module | None = None,
) -> Layer:
    """Return an `nn.Linear` as a `Layer`.

    Args:
        flat: holds its parameters; None: it gets no gradient.
        norm: before the activation; None: there is none.
    """
    of: Any = _value_alone if flat is None else flat.value_and_gradient
    weight, of_weight = of(layer.weight)
    bias, of_bias = of(layer.bias)
    of_norm = None
    if norm is not None:
        gain, of_gain = of(norm.weight)
        shift, of_shift = of(norm.bias)
        of_norm = Norm(gain, shift, of_gain, of_shift)
    return Layer(weight.t(), bias, of_weight, of_bias, True, _activation(activation), of_norm)


def _value_alone(parameter: Tensor) -> tuple[Tensor, None]:
    return parameter.detach(), None


def linears(flat: FlatParameters, layers: Sequence[Any], activation: str) -> Layer:
    """Return one `nn.Linear` of each of E networks, all of one size, as a `Layer`."""
    weight, of_weight = flat.stacked([layer.weight for layer in layers])
    bias, of_bias = (b.unsqueeze(1) for b in flat.stacked([layer.bias for layer in layers]))
    transposed = weight.transpose(1, 2)
    return Layer(transposed, bias, of_weight, of_bias, True, ACTIVATIONS[activation])


def batched(
    layer: Any,
    activation: str | None,
    flat: FlatParameters | None = None,
    *,
    first: int | None = None,
    layer_norm: bool = False,
) -> Layer:
    """Return a `BatchedLinear` of critics as a `Layer`.

    Args:
        flat: None: it gets no gradient.
        first: only so many of the networks; None: all.
        layer_norm: normalize before the activation, without learned factors.
    """
    weight, bias = layer.weight.detach()[:first], layer.bias.detach()[:first]
    of_weight, of_bias = (
        None if flat is None else flat.value_and_gradient(p)[1] for p in (layer.weight, layer.bias)
    )
    norm = Norm() if layer_norm else None
    return Layer(weight, bias, of_weight, of_bias, False, _activation(activation), norm)


class Dense:
    """Layers of one network, or of E side by side. It remembers its last forward pass.

    Its results lie in memory that the next pass writes to. Memory grows to the most rows so far.

    Attributes:
        output_gradient: memory for the gradient of the output, `[(E,) B, num_out]`, after a forward
            pass. The backward pass overwrites it, and the output.
    """

    output_gradient: Tensor

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._backwards = [*enumerate(layers)][::-1]
        is_batched = self._is_batched = layers[0].weight.dim() == 3
        self._product: Callable[..., Tensor] = torch.bmm if is_batched else torch.mm
        self._plus_product: Callable[..., Tensor] = torch.baddbmm if is_batched else torch.addmm
        self._back = [layer.weight.transpose(-1, -2) for layer in layers]
        # MKL takes ten times as long as a product of each element where there is one column.
        self._to_input: list[Callable[..., Tensor]] = [
            torch.mul if layer.weight.shape[-1] == 1 else self._product for layer in layers
        ]
        self._narrow_gradients = [_if_few(layer.of_weight) for layer in layers]
        self._narrow = [
            None if (weight := _if_few(layer.weight)) is None else (weight, layer.bias.numpy())
            for layer in layers
        ]
        self._rows = -1
        self._memory: list[Tensor] = []
        # Of each layer, in the last pass: its output, also as an array
        self._outputs: list[tuple[Tensor, NDArray[Any]]] = []
        self._inputs = [torch.empty(0)] * (len(layers) + 1)
        # What derivatives of activations and of normalization need
        self._sums: list[Any] = [None] * len(layers)
        self._norms: list[tuple[Any, ...]] = [()] * len(layers)
        # The gradients of each layer's input, and of the last output: each also transposed
        self._signals: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last layer, `[(E,) B, num_out]`.

        Args:
            x: `[(E,) B, num_in]`, without autograd's graph.
        """
        if x.shape[-2] != self._rows:
            self._allocate(x.shape[-2])
        self._inputs[0] = x
        for number, layer in enumerate(self._layers):
            out, array = self._outputs[number]
            narrow = self._narrow[number]
            if narrow is None:
                x = self._plus_product(layer.bias, x, layer.weight, out=out)
            else:
                np.matmul(x.numpy(), narrow[0], out=array)
                np.add(array, narrow[1], out=array)
                x = out
            if layer.norm is not None:
                factors = layer.norm[:2]
                x, mean, scale = torch.native_layer_norm(x, x.shape[-1:], *factors, NORM_EPS)
                self._norms[number] = out, x.shape[-1:], mean, scale, *factors
                array = x.numpy()
            if layer.activation is not None:
                if layer.activation.needs_sums:
                    self._sums[number] = x.clone()
                layer.activation.apply(x, array)
            self._inputs[number + 1] = x
        return x

    def fill(self) -> None:
        """Fill the gradients of all layers from `output_gradient`."""
        for number, layer in self._backwards:
            assert layer.of_weight is not None
            signal, transposed = self._of_sums(number, layer)
            a, b = transposed, self._inputs[number]
            if not layer.is_transposed:
                a, b = b.transpose(-1, -2), signal
            narrow = self._narrow_gradients[number]
            if narrow is None:
                self._product(a, b, out=layer.of_weight)
            else:
                np.matmul(a.numpy(), b.numpy(), out=narrow)
            torch.sum(signal, -2, keepdim=self._is_batched, out=layer.of_bias)
            if number:
                self._to_input[number](signal, self._back[number], out=self._signals[number][0])

    def of_input(self, size: int) -> Tensor:
        """Return the gradient of the input's last `size` columns, `[(E,) B, size]`.

        It follows from `output_gradient`.
        """
        for number, layer in self._backwards[:-1]:
            signal, _ = self._of_sums(number, layer)
            self._to_input[number](signal, self._back[number], out=self._signals[number][0])
        signal, _ = self._of_sums(0, self._layers[0])
        back = self._back[0][..., -size:]
        if size <= _FEW_COLUMNS:
            return torch.from_numpy(np.matmul(signal.numpy(), back.numpy()))
        return self._to_input[0](signal, back)

    def _of_sums(self, number: int, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return the gradient of a layer's sums from that of its output; and transposed."""
        signal, transposed = self._signals[number + 1]
        if layer.activation is not None:
            layer.activation.pull(signal, self._inputs[number + 1], self._sums[number])
        if layer.norm is None:
            return signal, transposed
        of_factors = layer.norm[2:]
        wanted = [True, *(gradient is not None for gradient in of_factors)]
        signal, *found = torch.ops.aten.native_layer_norm_backward(
            signal, *self._norms[number], wanted
        )
        for gradient, of_factor in zip(of_factors, found, strict=True):
            if gradient is not None:
                gradient.copy_(of_factor)
        return signal, signal.transpose(-1, -2)

    def _allocate(self, rows: int) -> None:
        """Shape the memory for so many rows; allocate it if there are more than ever before."""
        self._rows = rows
        weights = [layer.weight for layer in self._layers]
        widths = [weight.shape[-1] for weight in weights]
        widths = [*widths, 0, *widths]  # of outputs, and of all signals but that of the input
        shapes = [(*weights[0].shape[:-2], rows, width) for width in widths]
        if not self._memory or self._memory[0].numel() < math.prod(shapes[0]):
            self._memory = [weights[0].new_empty(math.prod(shape)) for shape in shapes]
        sized = zip(self._memory, shapes, strict=True)
        shaped = [memory[: math.prod(shape)].view(shape) for memory, shape in sized]
        outputs, signals = shaped[: len(weights)], shaped[len(weights) :]
        for number in range(1, len(weights)):
            if signals[number].shape == outputs[number].shape:
                # What a layer put out is no longer read then, and is still in the cache.
                signals[number] = outputs[number]
        self._outputs = [(out, out.numpy()) for out in outputs]
        self._signals = [(signal, signal.transpose(-1, -2)) for signal in signals]
        self.output_gradient = signals[-1]
