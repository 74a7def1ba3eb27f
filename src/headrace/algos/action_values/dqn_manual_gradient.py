"""DQN's loss with an explicit gradient, for small networks on the CPU.

`dqn.loss` is the reference: results agree within rounding (`tests/models/test_dqn_gradient.py`).
This needs fewer operations, and one vector holds all parameters.
"""

import torch
from torch import Tensor, nn

from headrace.algos.action_values import dqn
from headrace.algos.action_values.q_learning import loss_of_outputs
from headrace.batch import Minibatch
from headrace.models.action_values.noisy import NoisyLinear
from headrace.models.action_values.q_policy import QNetwork, QPolicy
from headrace.models.action_values.value_distributions import MeanOnly
from headrace.models.networks import NORM_EPS, FlatEncoder
from headrace.models.policy import Network


def unsupported(policy: QPolicy, network: Network, cfg: dqn.DQN) -> str:
    """Return the reason why `Gradient` cannot replace autograd, or ""."""
    model = policy.model
    if not isinstance(model, QNetwork):
        return "a network of your own"
    reasons = {
        "--arithmetic plain": network.arithmetic == "plain",
        f"precision {network.precision}": network.precision != "fp32",
        "a policy of its own kind": type(policy) is not QPolicy,
        f"activation {network.activation}": network.activation != "relu",
        "an observation that is no plain vector": not isinstance(model.encoder, FlatEncoder),
        "a distribution of returns": not isinstance(model.returns, MeanOnly),
        "noise in weights": isinstance(model.actor, NoisyLinear),
        "--dueling": model.critic_trunk is not None,
        "on a GPU": model.actor.weight.is_cuda,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Gradient:
    """A `ManualGradient` of `dqn.loss`. All parameters become views of one vector."""

    def __init__(self, policy: QPolicy, network: Network, cfg: dqn.DQN) -> None:
        model = policy.model
        assert isinstance(model, QNetwork)
        self._policy, self._encoder = policy, model.encoder
        layers = [*model.trunk.layers, model.actor, *model.trunk.norms]
        self._shaped = [p for layer in layers for p in (layer.weight, layer.bias)]
        self.parameters = torch.cat([p.detach().flatten() for p in self._shaped])
        self.flat = torch.zeros_like(self.parameters)
        for parameter, part in self.parts(self.parameters).items():
            parameter.data = part
        weights, gradients = (list(self.parts(v).values()) for v in (self.parameters, self.flat))
        pairs, of_pairs = (list(zip(v[::2], v[1::2], strict=True)) for v in (weights, gradients))
        depth = len(model.trunk.layers) + 1
        self._layers, self._norms = pairs[:depth], pairs[depth:]
        self._of_layers, self._of_norms = of_pairs[:depth], of_pairs[depth:]

    def parts(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Return each parameter's part of a flat vector with the layout of `parameters`."""
        pieces = torch.split_with_sizes(flat, [p.numel() for p in self._shaped])
        return {p: piece.view_as(p) for p, piece in zip(self._shaped, pieces, strict=True)}

    @torch.no_grad()
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Fill `flat`. `dqn.loss` documents the minibatch and the metrics."""
        seen = self._policy.normalized(minibatch["obs"])
        x: Tensor = self._encoder(seen).to(self.flat.dtype)
        inputs, sums = [x], []
        for number, (weight, bias) in enumerate(self._layers[:-1]):
            x = torch.addmm(bias, x, weight.t())
            if self._norms:
                before, (gain, shift) = x, self._norms[number]
                x, mean, scale = torch.native_layer_norm(x, gain.shape, gain, shift, NORM_EPS)
                sums.append((before, gain.shape, mean, scale, gain, shift))
            inputs.append(x.relu_())
        weight, bias = self._layers[-1]
        values = torch.addmm(bias, x, weight.t())
        action = minibatch["action"].unsqueeze(1)
        value = values.gather(1, action)
        _, metrics = loss_of_outputs(self._policy.returns, value, minibatch)

        # Huber's loss has the error, clipped to ±1, for its gradient.
        error = value - minibatch["target"].unsqueeze(1)
        of_value = error.clamp_(-1, 1).mul_(minibatch["weight"].unsqueeze(1))
        signal = torch.zeros_like(values).scatter_(1, action, of_value)
        for number in reversed(range(len(self._layers))):
            of_weight, of_bias = self._of_layers[number]
            torch.mm(signal.t(), inputs[number], out=of_weight)
            torch.sum(signal, 0, out=of_bias)
            if number:
                signal = torch.mm(signal, self._layers[number][0])
                # In place: from the gradient of relu(x) to that of x
                torch.ops.aten.threshold_backward.grad_input(
                    signal, inputs[number], 0, grad_input=signal
                )
                if self._norms:
                    signal, *of_norm = torch.ops.aten.native_layer_norm_backward(
                        signal, *sums[number - 1], [True] * 3
                    )
                    for part, found in zip(self._of_norms[number - 1], of_norm, strict=True):
                        part.copy_(found)
        return metrics
