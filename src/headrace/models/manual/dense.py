"""Dense layers forward and backward without autograd: few operations, in memory that is reused.

Left out: losses (`algos/`), and the two trunks of actor and critic (`actor_critic.py`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.models.manual.flat import FlatParameters
from headrace.models.networks import NORM_EPS
from headrace.models.policy import Network

_FEW_COLUMNS = 8
"""Products with so few columns are NumPy's: MKL takes 2 to 20 times as long for them. With two
threads and thousands of rows, it takes a fifth less for 5 columns or more."""


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the product of two matrices, or of two batches of them, to `out`."""
    if out.shape[-1] <= _FEW_COLUMNS:
        np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    elif a.shape[-1] == 1:
        torch.mul(a, b, out=out)
    elif a.dim() == 2:
        torch.mm(a, b, out=out)
    else:
        torch.bmm(a, b, out=out)


def _tanh(sums: Tensor) -> None:
    array = sums.numpy()
    np.tanh(array, out=array)  # torch's takes longer on some CPUs


class Activation(NamedTuple):
    """An activation and its derivative, both in place.

    Attributes:
        apply: replaces sums by activations.
        pull: (gradient of the activations, activations, sums) -> None: replaces that gradient
            by the gradient of the sums.
        needs_sums: whether the derivative needs sums as well as activations.
    """

    apply: Callable[[Tensor], Any]
    pull: Callable[[Tensor, Tensor, Tensor | None], Any]
    needs_sums: bool = False


_of_tanh = torch.ops.aten.tanh_backward.grad_input
_of_relu = torch.ops.aten.threshold_backward.grad_input
_of_elu = torch.ops.aten.elu_backward.grad_input
_of_silu = torch.ops.aten.silu_backward.grad_input
ACTIVATIONS = {
    "tanh": Activation(_tanh, lambda signal, h, _: _of_tanh(signal, h, grad_input=signal)),
    "relu": Activation(torch.relu_, lambda signal, h, _: _of_relu(signal, h, 0, grad_input=signal)),
    "elu": Activation(
        nn.functional.elu_,
        lambda signal, h, _: _of_elu(signal, 1, 1, 1, True, h, grad_input=signal),
    ),
    "silu": Activation(
        partial(nn.functional.silu, inplace=True),
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
        self._plus_product: Callable[..., Tensor] = torch.baddbmm if is_batched else torch.addmm
        self._back = [layer.weight.transpose(-1, -2) for layer in layers]
        self._rows = -1
        self._memory: list[Tensor] = []
        self._outputs: list[Tensor] = []  # of each layer, in the last pass
        # Of each layer with few columns: weight, bias and output
        self._arrays: list[tuple[NDArray[Any], ...] | None] = []
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
            out, arrays = self._outputs[number], self._arrays[number]
            if arrays is not None:
                weight, bias, array = arrays
                np.matmul(x.numpy(), weight, out=array)
                np.add(array, bias, out=array)
                x = out
            else:
                x = self._plus_product(layer.bias, x, layer.weight, out=out)
            if layer.norm is not None:
                factors = layer.norm[:2]
                x, mean, scale = torch.native_layer_norm(x, x.shape[-1:], *factors, NORM_EPS)
                self._norms[number] = out, x.shape[-1:], mean, scale, *factors
            if layer.activation is not None:
                if layer.activation.needs_sums:
                    self._sums[number] = x.clone()
                layer.activation.apply(x)
            self._inputs[number + 1] = x
        return x

    def fill(self) -> None:
        """Fill the gradients of all layers from `output_gradient`."""
        for number, layer in self._backwards:
            signal, transposed = self._of_sums(number, layer)
            assert layer.of_weight is not None
            if layer.is_transposed:
                _multiply(transposed, self._inputs[number], layer.of_weight)
            else:
                below = self._inputs[number].transpose(-1, -2)
                _multiply(below, signal, layer.of_weight)
            torch.sum(signal, -2, keepdim=self._is_batched, out=layer.of_bias)
            if number:
                _multiply(signal, self._back[number], self._signals[number][0])

    def of_input(self, size: int) -> Tensor:
        """Return the gradient of the last numbers of the input, `[(E,) B, size]`.

        It follows from `output_gradient`.
        """
        for number, layer in self._backwards[:-1]:
            signal, _ = self._of_sums(number, layer)
            _multiply(signal, self._back[number], self._signals[number][0])
        signal, _ = self._of_sums(0, self._layers[0])
        of_last = signal.new_empty((*signal.shape[:-1], size))
        _multiply(signal, self._back[0][..., -size:], of_last)
        return of_last

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
        self._outputs = outputs
        self._arrays = [
            (layer.weight.numpy(), layer.bias.numpy(), out.numpy())
            if out.shape[-1] <= _FEW_COLUMNS
            else None
            for layer, out in zip(self._layers, outputs, strict=True)
        ]
        self._signals = [(signal, signal.transpose(-1, -2)) for signal in signals]
        self.output_gradient = signals[-1]
