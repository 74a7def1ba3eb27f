"""Our own small network on the CPU with its gradient written out: fewer and larger operations.

A layer of the actor's trunk and the one of the critic's beside it are one batched product, and tanh
is NumPy's, in place (torch's takes six times as long on some CPUs). What a gradient needs of the
forward pass stays in memory that is used again by the next.

Left out: losses (`algos/by_hand.py`); other activations, images, GPUs and bf16, which are torch's.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.dists import Categorical, Gaussian
from headrace.models.encoders import FlatEncoder
from headrace.models.policy import ActorCritic, Network, Policy

Floats: TypeAlias = NDArray[np.floating[Any]]
Pull: TypeAlias = Callable[[Floats, Floats], tuple[Floats, list[Floats]]]
"""From the gradients of log-probs and entropies, `[rows]` each, to those of the head's params
`[num_params, rows]` and of its own parameters."""


def can(policy: Policy, network: Network) -> bool:
    """Whether `Net` and `evaluate` know how."""
    model = policy.model
    return (
        network.arithmetic == "auto"
        and network.precision == "fp32"
        and network.activation == "tanh"
        and len(network.hidden_sizes) > 0
        and isinstance(model, ActorCritic)
        and isinstance(model.encoder, FlatEncoder)
        and not policy.masks
        and isinstance(policy.head, Categorical | Gaussian)
        and model.actor.weight.device.type == "cpu"
    )


class Net:
    """The actor and the critic of a policy; activations are `[trunks, rows, width]`.

    Args:
        model: one that `can`; its parameters may change, but not be replaced.
    """

    def __init__(self, model: ActorCritic) -> None:
        trunks = [model.actor_trunk, *([model.critic_trunk] if model.critic_trunk else [])]
        beside = list(zip(*(trunk.layers for trunk in trunks), strict=True))
        layers = [*(layer for layers in beside for layer in layers), model.actor, model.critic]
        self._model, self._layers = model, beside
        self._actor, self._critic = model.actor, model.critic
        self.parameters: list[nn.Parameter] = [
            parameter for layer in layers for parameter in (layer.weight, layer.bias)
        ]
        """In the order of `gradients`."""
        self._first = torch.empty(0, 0)
        self._weights: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._signals: list[Tensor] = []  # as large: the gradients of what is in `_hidden`

    def forward(self, obs: Obs) -> tuple[Floats, Floats]:
        """Params of the head `[num_params, rows]`, and values `[rows]`, of `rows` observations."""
        features = self._model.features(obs)
        rows, dtype = len(features), features.dtype
        if self._first.shape[1] != rows or self._first.dtype != dtype:
            sizes = [beside[0].out_features for beside in self._layers]
            num_trunks = len(self._layers[0])
            self._hidden = [torch.empty(num_trunks, rows, size, dtype=dtype) for size in sizes]
            self._signals = [torch.empty_like(hidden) for hidden in self._hidden]
            # The last of the features is always 1: the first layer's bias is its weight.
            self._first = torch.ones(features.shape[1] + 1, rows, dtype=dtype)
        self._first[:-1].copy_(features.t())
        x = self._first.t().expand(len(self._layers[0]), -1, -1)
        self._weights = [torch.stack([layer.weight for layer in of]) for of in self._layers]
        biases = [torch.stack([layer.bias for layer in of]) for of in self._layers]
        weights = [torch.cat([self._weights[0], biases[0].unsqueeze(2)], 2), *self._weights[1:]]
        for number, (weight, out) in enumerate(zip(weights, self._hidden, strict=True)):
            torch.bmm(x, weight.transpose(1, 2), out=out)
            if number:
                out += biases[number].unsqueeze(1)
            array = out.numpy()
            np.tanh(array, out=array)
            x = out
        actor, critic = self._actor, self._critic
        params = torch.addmm(actor.bias.unsqueeze(1), actor.weight, x[0].t())
        value = torch.addmm(critic.bias.unsqueeze(1), critic.weight, x[-1].t())
        return params.numpy(), value.numpy()[0]

    def gradients(self, of_params: Floats, of_value: Floats) -> list[Tensor]:
        """Gradients of the parameters, from those of what the last `forward` gave."""
        params, value = torch.from_numpy(of_params), torch.from_numpy(of_value).unsqueeze(0)
        x = self._hidden[-1]
        found = [params @ x[0], params.sum(1), value @ x[-1], value.sum(1)]
        signal = self._signals[-1]
        torch.mm(params.t(), self._actor.weight, out=signal[0])
        if len(x) == 1:
            signal[0].addmm_(value.t(), self._critic.weight)
        else:
            torch.mul(value.t(), self._critic.weight, out=signal[1])
        for number in range(len(self._hidden) - 1, 0, -1):
            _through_tanh(signal, self._hidden[number])
            of_weight = torch.bmm(signal.transpose(1, 2), self._hidden[number - 1])
            found = [*_in_turn(of_weight, signal.sum(1)), *found]
            signal = torch.bmm(signal, self._weights[number], out=self._signals[number - 1])
        _through_tanh(signal, self._hidden[0])
        of_first = torch.bmm(self._first.expand(len(x), -1, -1), signal)
        return [*_in_turn(of_first[:, :-1].transpose(1, 2), of_first[:, -1]), *found]


def _through_tanh(signal: Tensor, tanh: Tensor) -> None:
    """From the gradient of tanh(x) to that of x, in place."""
    torch.ops.aten.tanh_backward.grad_input(signal, tanh, grad_input=signal)


def _in_turn(weights: Tensor, biases: Tensor) -> list[Tensor]:
    """Weight and bias of each trunk."""
    pairs = zip(weights.unbind(), biases.unbind(), strict=True)
    return [tensor for pair in pairs for tensor in pair]


def evaluate(
    head: Categorical | Gaussian, params: Floats, action: NDArray[Any]
) -> tuple[Floats, Floats, Pull]:
    """Log-probs of actions and entropies, `[rows]` each, and the way back.

    Args:
        head: of the policy.
        params: `[num_params, rows]`.
        action: `[rows, ...]`.
    """
    if isinstance(head, Gaussian):
        return _gaussian(head.log_std.detach().numpy()[:, None], params, action.T)
    shifted = params - params.max(0)
    p = np.exp(shifted)
    total = p.sum(0)
    p /= total
    log_p = shifted - np.log(total)
    entropy = -(p * log_p).sum(0)
    chosen = action * len(action) + np.arange(len(action))  # where it is in [num_params, rows]

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        of_params = -p * (of_log_prob + of_entropy * (log_p + entropy))
        of_params.reshape(-1)[chosen] += of_log_prob
        return of_params, []

    return log_p.reshape(-1)[chosen], entropy, pull


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
