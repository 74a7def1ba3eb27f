"""DQN's loss with an explicit gradient, for small networks on the CPU.

`dqn.loss` is the reference: results agree within rounding (`tests/models/test_dqn_gradient.py`).
This needs fewer operations, and some are NumPy's, whose overhead is lower than torch's. One vector
holds all parameters.
"""

import itertools

import numpy as np
import torch

from headrace.algos.action_values import dqn
from headrace.algos.base import Metrics
from headrace.batch import Minibatch
from headrace.models.action_values.noisy import NoisyLinear
from headrace.models.action_values.q_policy import QNetwork, QPolicy
from headrace.models.action_values.value_distributions import MeanOnly
from headrace.models.manual import dense
from headrace.models.manual.dense import Dense, linear
from headrace.models.manual.flat import FlatParameters
from headrace.models.policy import Network


def unsupported(policy: QPolicy, network: Network, cfg: dqn.DQN) -> str:
    """Return the reason why `Gradient` cannot replace autograd, or ""."""
    model = policy.model
    if not isinstance(model, QNetwork):
        return "a network of your own"
    reasons = {
        "a policy of its own kind": type(policy) is not QPolicy,
        "a distribution of returns": not isinstance(model.returns, MeanOnly),
        "noise in weights": isinstance(model.actor, NoisyLinear),
        "--dueling": model.critic_trunk is not None,
    }
    return dense.unsupported(network, [model.encoder], model.actor.weight, reasons)


class Gradient(FlatParameters):
    """A `ManualGradient` of `dqn.loss`. All parameters become views of one vector."""

    def __init__(self, policy: QPolicy, network: Network, cfg: dqn.DQN) -> None:
        model = policy.model
        assert isinstance(model, QNetwork)
        self._policy, self._encoder = policy, model.encoder
        layers, norms = [*model.trunk.layers, model.actor], [*model.trunk.norms]
        super().__init__([p for layer in (*layers, *norms) for p in (layer.weight, layer.bias)])
        hidden = itertools.zip_longest(model.trunk.layers, norms)
        net = [linear(self, layer, network.activation, norm) for layer, norm in hidden]
        self._net = Dense([*net, linear(self, model.actor)])

    @torch.no_grad()
    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> Metrics:
        """Fill `flat`. `dqn.loss` documents the minibatch and the metrics."""
        seen = self._policy.normalized(minibatch["obs"])
        values = self._net.forward(self._encoder(seen).to(self.flat.dtype))
        action = minibatch["action"].unsqueeze(1)
        value = values.gather(1, action).squeeze(1).numpy()
        weight = minibatch["weight"].numpy()
        share = minibatch["share"].numpy() if "share" in minibatch else weight
        error = value - minibatch["target"].numpy()
        # Huber's loss has the error, clipped to ±1, for its gradient.
        clipped = np.clip(error, -1, 1)
        of_value = clipped * weight
        distance = np.abs(error)
        metrics = {
            "td_error": float(distance @ share),
            "mean_value": float(value @ share),
            "loss": float(of_value @ (error - 0.5 * clipped)),
            "error": torch.from_numpy(distance),
        }
        signal = self._net.output_gradient.zero_()
        signal.scatter_(1, action, torch.from_numpy(of_value).unsqueeze(1))
        self._net.fill()
        return metrics
