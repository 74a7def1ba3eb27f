"""Our own small network on the CPU with its gradient written out: fewer and larger operations.

A layer of the actor's trunk and the one of the critic's beside it are one batched product, and tanh
is NumPy's, in place (torch's takes longer on some CPUs). What a gradient needs of the
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

    Weights of a layer of both trunks lie beside each other from here on, and so do gradients.

    Args:
        model: one that `can`; its parameters may change, but not be replaced.
        own: parameters of the distribution.

    Attributes:
        gradient: of all parameters: one flat vector.
        of: parameter -> its part of `gradient`.
    """

    def __init__(self, model: ActorCritic, own: list[nn.Parameter]) -> None:
        trunks = [model.actor_trunk, *([model.critic_trunk] if model.critic_trunk else [])]
        self._model, self._depth = model, len(model.actor_trunk.layers)
        beside = list(zip(*(trunk.layers for trunk in trunks), strict=True))
        self._weights = [_side_by_side([layer.weight for layer in of]) for of in beside]
        self._biases = [_side_by_side([layer.bias for layer in of]) for of in beside]
        heads: list[Any] = [model.actor.weight, model.actor.bias, model.critic.weight]
        heads += [model.critic.bias, *own]
        shaped: list[Tensor] = [*self._weights, *self._biases, *heads]
        sizes = [t.numel() for t in shaped]
        self.gradient = torch.zeros(sum(sizes), dtype=heads[0].dtype)
        pieces = torch.split_with_sizes(self.gradient, sizes)
        parts = [piece.view(t.shape) for piece, t in zip(pieces, shaped, strict=True)]
        self._of_weights, self._of_biases = (
            parts[: self._depth],
            parts[self._depth :][: self._depth],
        )
        self._of_heads = parts[2 * self._depth :]
        self.of: dict[nn.Parameter, Tensor] = dict(zip(heads, self._of_heads, strict=True))
        for number, layers in enumerate(beside):
            for i, layer in enumerate(layers):
                self.of[layer.weight] = self._of_weights[number][i]
                self.of[layer.bias] = self._of_biases[number][i]
        self._hidden: list[Tensor] = []
        self._last_signal = torch.empty(0)
        self._features = torch.empty(0)

    @torch.no_grad()
    def forward(self, obs: Obs) -> tuple[Floats, Floats]:
        """Params of the head `[num_params, rows]`, and values `[rows]`, of `rows` observations."""
        features, num_trunks = self._model.features(obs), len(self._weights[0])
        if self._last_signal.shape[-2:-1] != features.shape[:1]:
            sizes = [(num_trunks, len(features), weight.shape[1]) for weight in self._weights]
            self._hidden = [torch.empty(size, dtype=features.dtype) for size in sizes]
            self._last_signal = torch.empty_like(self._hidden[-1])
        x = self._features = features.expand(num_trunks, -1, -1)
        for weight, bias, out in zip(self._weights, self._biases, self._hidden, strict=True):
            torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2), out=out)
            array = out.numpy()
            np.tanh(array, out=array)
            x = out
        actor, critic = self._model.actor, self._model.critic
        params = torch.addmm(actor.bias.unsqueeze(1), actor.weight, x[0].t())
        value = torch.addmm(critic.bias.unsqueeze(1), critic.weight, x[-1].t())
        return params.numpy(), value.numpy()[0]

    @torch.no_grad()
    def fill_gradient(self, of_params: Floats, of_value: Floats, of_own: list[Floats]) -> None:
        """Fill `gradient`, from those of what `forward` gave and of the distribution's own."""
        for part, of_part in zip(self._of_heads[4:], of_own, strict=True):
            part.copy_(torch.from_numpy(of_part))
        params, value = torch.from_numpy(of_params), torch.from_numpy(of_value).unsqueeze(0)
        actor, critic, x = self._model.actor, self._model.critic, self._hidden[-1]
        for given, hidden, weight, bias in (
            (params, x[0], *self._of_heads[:2]),
            (value, x[-1], *self._of_heads[2:4]),
        ):
            torch.mm(given, hidden, out=weight)
            torch.sum(given, 1, out=bias)
        signal = self._last_signal
        torch.mm(params.t(), actor.weight, out=signal[0])
        if len(x) == 1:
            signal[0].addmm_(value.t(), critic.weight)
        else:
            torch.mul(value.t(), critic.weight, out=signal[1])
        for number in reversed(range(self._depth)):
            hidden = self._hidden[number]
            # From the gradient of tanh(x) to that of x, in place
            torch.ops.aten.tanh_backward.grad_input(signal, hidden, grad_input=signal)
            below = self._hidden[number - 1] if number else self._features
            torch.bmm(signal.transpose(1, 2), below, out=self._of_weights[number])
            torch.sum(signal, 1, out=self._of_biases[number])
            if number:
                # In memory that nobody reads any more, and that is still in the cache
                free = hidden if hidden.shape == below.shape else torch.empty_like(below)
                signal = torch.bmm(signal, self._weights[number], out=free)


@torch.no_grad()
def _side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor that they are views of from here on."""
    together = torch.stack([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, together, strict=True):
        parameter.data = part
    return together


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
