"""DQN's targets, and its loss with an explicit gradient, for small networks on the CPU.

`dqn.targets` and `dqn.loss` are the references: results agree within rounding, but where a double
target chooses between two values that are as close (`tests/models/test_dqn_gradient.py`). These
need fewer operations, and some are NumPy's, whose overhead is lower than torch's. One vector holds
all parameters.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algos.action_values import dqn
from headrace.algos.base import Metrics, share_of
from headrace.batch import Minibatch, Obs
from headrace.models.action_values.noisy import NoisyLinear
from headrace.models.action_values.q_policy import QNetwork, QPolicy
from headrace.models.action_values.value_distributions import MeanOnly
from headrace.models.manual import dense
from headrace.models.manual.dense import Dense, Layer, linear
from headrace.models.manual.flat import FlatParameters
from headrace.models.policy import Network


def unsupported(policy: QPolicy, network: Network, cfg: dqn.DQN) -> str:
    """Return the reason why `Gradient` cannot replace autograd, or ""."""
    model = policy.model
    if type(model) is not QNetwork or not policy.is_own:
        return "a network of your own"
    reasons = {
        "a policy of its own kind": type(policy) is not QPolicy,
        "a distribution of returns": not isinstance(model.returns, MeanOnly),
        "noise in weights": isinstance(model.actor, NoisyLinear),
        "--dueling": model.critic_trunk is not None,
    }
    return dense.unsupported(network, [model.encoder], model.actor.weight, reasons)


def unsupported_targets(network: Network, *, policy: QPolicy, cfg: dqn.DQN, **_: Any) -> str:
    """Return the reason why `Targets` cannot replace `dqn.targets`, or ""."""
    return "an action mask" if policy.masks else unsupported(policy, network, cfg)


def _layers(model: nn.Module, network: Network, flat: FlatParameters | None) -> list[Layer]:
    """Return the layers of a network; without `flat` they get no gradient."""
    assert isinstance(model, QNetwork)
    hidden = itertools.zip_longest(model.trunk.layers, model.trunk.norms)
    layers = [linear(flat, layer, network.activation, norm) for layer, norm in hidden]
    return [*layers, linear(flat, model.actor)]


def _input_of(policy: QPolicy) -> Callable[[Obs], Any]:
    """Return what makes the input of the first layer, `[B, num_features]`, from observations."""
    model = policy.model
    assert isinstance(model, QNetwork)
    dtype, is_normalized = model.actor.weight.dtype, policy.normalize_obs is not None

    def input_of(obs: Obs) -> Any:
        # The modules return vectors of floats as they are, in 4 % of a small network's step.
        if isinstance(obs, Tensor) and obs.dim() == 2 and obs.dtype == dtype and not is_normalized:
            return obs
        return model.features(policy.normalized(obs))

    return input_of


class Targets:
    """A replacement of `dqn.targets`."""

    def __init__(self, network: Network, *, policy: QPolicy, target: QPolicy, cfg: dqn.DQN) -> None:
        self._network, self._cfg = network, cfg
        self._policy, self._target = policy, target

    @functools.cached_property
    def _parts(self) -> tuple[Any, ...]:
        """The layers of both networks, their input, and how targets are made of values.

        They are read at the first use: a gradient may move the weights.
        """
        both = self._policy, self._target
        nets = (Dense(_layers(policy.model, self._network, None)) for policy in both)
        return *nets, _input_of(self._policy), self._target.returns.target

    @np.errstate(all="ignore")
    def __call__(self, rows: Minibatch) -> Minibatch:
        """Return what `dqn.targets` documents."""
        of_policy, of_target, input_of, target_of = self._parts
        x = input_of(rows["next_obs"])
        values = of_target.forward(x)
        if self._cfg.double_q:
            best = of_policy.forward(x).argmax(-1, keepdim=True)
            value = values.gather(-1, best)
        else:
            value = values.amax(-1, keepdim=True)
        found: Minibatch = target_of(value, rows["reward"], rows["discount"])
        return found


class Gradient(FlatParameters):
    """A `ManualGradient` of `dqn.loss`. All parameters become views of one vector."""

    def __init__(self, policy: QPolicy, network: Network, cfg: dqn.DQN) -> None:
        model = policy.model
        assert isinstance(model, QNetwork)
        parts = *model.trunk.layers, model.actor, *model.trunk.norms
        super().__init__([p for part in parts for p in (part.weight, part.bias)])
        self._net = Dense(_layers(model, network, self))
        self._input_of = _input_of(policy)

    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> Metrics:
        """Fill `flat`. `dqn.loss` documents the minibatch and the metrics."""
        values = self._net.forward(self._input_of(minibatch["obs"]))
        at = np.arange(len(values)), minibatch["action"].numpy()
        value = values.numpy()[at]
        weight = minibatch["weight"].numpy()
        share = share_of(minibatch).numpy()
        error = value - minibatch["target"].numpy()
        # Huber's loss has the error, clipped to ±1, for its gradient.
        clipped = np.minimum(np.maximum(error, -1), 1)
        of_value = clipped * weight
        distance = np.abs(error)
        metrics = {
            "td_error": float(distance @ share),
            "mean_value": float(value @ share),
            "loss": float(of_value @ (error - 0.5 * clipped)),
            "error": torch.from_numpy(distance),
        }
        signal = self._net.output_gradient.numpy()
        signal.fill(0)
        signal[at] = of_value
        self._net.fill()
        return metrics
