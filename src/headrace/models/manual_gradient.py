"""The forward and backward pass of Headrace's small network on the CPU, in few, large operations.

Each layer of actor and critic is one batched product. NumPy computes tanh in place, since torch's
takes longer on some CPUs. Memory for activations is reused.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.distributions import Categorical, Gaussian, Product
from headrace.models.networks import FlatEncoder
from headrace.models.policy import ActorCritic, Network, Policy

Floats: TypeAlias = NDArray[np.floating[Any]]
Pull: TypeAlias = Callable[[Floats, Floats], tuple[Floats, list[Floats]]]
"""From the gradients of log-probs and entropies, `[rows]` each, to those of the head's params
`[num_params, rows]` and of its own parameters."""


def unsupported(policy: Policy, network: Network) -> str:
    """Return the reason why `ManualNetwork` and `evaluate` cannot replace `policy`, or ""."""
    model = policy.model
    if not isinstance(model, ActorCritic):
        return "a network of your own"
    reasons = {
        "--arithmetic plain": network.arithmetic == "plain",
        f"precision {network.precision}": network.precision != "fp32",
        "a policy of its own kind": type(policy) is not Policy,
        f"activation {network.activation}": network.activation != "tanh",
        "no hidden layer": not network.hidden_sizes,
        "a recurrent core": model.core is not None,
        "action masks": policy.masks,
        "a critic that sees the game": model.state_encoder is not None,
        "an observation that is no plain vector": not isinstance(model.encoder, FlatEncoder),
        "a Dict or Tuple of actions": isinstance(policy.head, Product),
        "several choices in one action": not isinstance(policy.head, Categorical | Gaussian),
        "on a GPU": model.actor.weight.device.type != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class ManualNetwork:
    """The actor and the critic of a policy; activations are `[trunks, rows, width]`.

    All parameters become views of the flat vector `parameters`, in which a layer's parts of both
    trunks are neighbours; `gradient` has the same layout. `own` are those of the distribution.
    """

    def __init__(self, model: ActorCritic, own: list[nn.Parameter]) -> None:
        trunks = [model.actor_trunk, *([model.critic_trunk] if model.critic_trunk else [])]
        layers = list(zip(*(trunk.layers for trunk in trunks), strict=True))
        heads: list[Any] = [model.actor.weight, model.actor.bias, model.critic.weight]
        # Each entry: parameters of one shape, stored as one tensor.
        self._together: list[list[nn.Parameter]] = [
            *([layer.weight for layer in of] for of in layers),
            *([layer.bias for layer in of] for of in layers),
            *([parameter] for parameter in [*heads, model.critic.bias, *own]),
        ]
        self._encoder, self._depth, self._dtype = model.encoder, len(layers), heads[0].dtype
        self.parameters = torch.cat([p.detach().flatten() for of in self._together for p in of])
        self.gradient = torch.zeros_like(self.parameters)
        for parameter, part in self.parts(self.parameters).items():
            parameter.data = part
        self._weights, self._biases, self._heads = self._shaped(self.parameters)
        self._of_weights, self._of_biases, self._of_heads = self._shaped(self.gradient)
        self._memory: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._last_signal = torch.empty(0)
        self._features = torch.empty(0)

    def parts(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's part of a flat vector with the layout of `parameters`."""
        tensors = [tensor for of in self._shaped(flat) for tensor in of]
        each = zip(self._together, tensors, strict=True)
        return {p: part for of, tensor in each for p, part in zip(of, tensor, strict=True)}

    def _shaped(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return weights and biases of the layers, `[trunks, ...]`, and the rest, `[1, ...]`."""
        sizes = [len(of) * of[0].numel() for of in self._together]
        pieces = zip(torch.split_with_sizes(flat, sizes), self._together, strict=True)
        shaped = [piece.view(len(of), *of[0].shape) for piece, of in pieces]
        return (
            shaped[: self._depth],
            shaped[self._depth :][: self._depth],
            shaped[2 * self._depth :],
        )

    @torch.no_grad()
    def forward(self, obs: Obs) -> tuple[Floats, Floats]:
        """Return params of the head `[num_params, rows]` and values `[rows]` of observations."""
        features: Tensor = self._encoder(obs).to(self._dtype)
        num_trunks = len(self._weights[0])
        if self._last_signal.shape[-2:-1] != features.shape[:1]:
            self._allocate(num_trunks, len(features))
        x = self._features = features.expand(num_trunks, -1, -1)
        for weight, bias, out in zip(self._weights, self._biases, self._hidden, strict=True):
            torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)
            array = out.numpy()
            np.tanh(array, out=array)
            x = out
        actor, actor_bias, critic, critic_bias, *_ = self._heads
        params = torch.addmm(actor_bias.t(), actor[0], x[0].t())
        value = torch.addmm(critic_bias, critic[0], x[-1].t())
        return params.numpy(), value.numpy()[0]

    def _allocate(self, num_trunks: int, rows: int) -> None:
        """Shape the memory for so many rows; allocate it if there are more than ever before."""
        widths = [weight.shape[1] for weight in self._weights]
        sizes = [(num_trunks, rows, width) for width in [*widths, widths[-1]]]
        if not self._memory or self._memory[0].numel() < math.prod(sizes[0]):
            self._memory = [torch.empty(math.prod(size), dtype=self._dtype) for size in sizes]
        shaped = zip(self._memory, sizes, strict=True)
        *self._hidden, self._last_signal = (
            memory[: math.prod(size)].view(size) for memory, size in shaped
        )

    @torch.no_grad()
    def fill_gradient(self, of_params: Floats, of_value: Floats, of_own: list[Floats]) -> None:
        """Fill `gradient` from those of params, values and the distribution's parameters."""
        for part, of_part in zip(self._of_heads[4:], of_own, strict=True):
            part[0] = torch.from_numpy(of_part)
        params, value = torch.from_numpy(of_params), torch.from_numpy(of_value).unsqueeze(0)
        x = self._hidden[-1]
        for given, hidden, weight, bias in (
            (params, x[0], *self._of_heads[:2]),
            (value, x[-1], *self._of_heads[2:4]),
        ):
            torch.mm(given, hidden, out=weight[0])
            torch.sum(given, 1, out=bias[0])
        signal, actor, critic = self._last_signal, self._heads[0][0], self._heads[2][0]
        torch.mm(params.t(), actor, out=signal[0])
        if len(x) == 1:
            signal[0].addmm_(value.t(), critic)
        else:
            torch.mul(value.t(), critic, out=signal[1])
        for number in reversed(range(self._depth)):
            hidden = self._hidden[number]
            # In place: from the gradient of tanh(x) to that of x
            torch.ops.aten.tanh_backward.grad_input(signal, hidden, grad_input=signal)
            below = self._hidden[number - 1] if number else self._features
            torch.bmm(signal.transpose(1, 2), below, out=self._of_weights[number])
            torch.sum(signal, 1, out=self._of_biases[number])
            if number:
                # Reuse memory that is no longer read and is still in the cache
                free = hidden if hidden.shape == below.shape else torch.empty_like(below)
                signal = torch.bmm(signal, self._weights[number], out=free)


def evaluate(
    head: Categorical | Gaussian, params: Floats, action: NDArray[Any]
) -> tuple[Floats, Floats, Pull]:
    """Return log-probs of actions and entropies, `[rows]` each, and their backward function.

    Args:
        params: `[num_params, rows]`.
        action: `[rows, ...]`.
    """
    if isinstance(head, Gaussian):
        return _gaussian(head.log_std.detach().numpy()[:, None], params, action.T)
    # A ufunc's `reduce` avoids the Python overhead of the methods `max` and `sum`.
    log_p = params - np.maximum.reduce(params, 0)
    p = np.exp(log_p)
    total = np.add.reduce(p, 0)
    p /= total
    log_p -= np.log(total)
    entropy = -np.add.reduce(p * log_p, 0)
    chosen = action * len(action) + np.arange(len(action))  # flat index in [num_params, rows]

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        of_params = -p * (of_log_prob + of_entropy * (log_p + entropy))
        of_params.reshape(-1)[chosen] += of_log_prob
        return of_params, []

    return log_p.take(chosen), entropy, pull


def _gaussian(log_std: Floats, mean: Floats, action: Floats) -> tuple[Floats, Floats, Pull]:
    narrow = np.exp(-log_std)
    z = (action - mean) * narrow
    square = z * z
    log_prob = (-0.5 * square).sum(0) - (log_std + _HALF_LOG_2_PI).sum()
    entropy = np.full_like(log_prob, (log_std + _HALF_LOG_2_PI + 0.5).sum())

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        of_log_std = ((square - 1) * of_log_prob).sum(1) + of_entropy.sum()
        return of_log_prob * z * narrow, [of_log_std]

    return log_prob, entropy, pull


_HALF_LOG_2_PI = np.float32(0.5 * np.log(2 * np.pi))
