"""The losses of SAC, TQC, REDQ and TD3 with explicit gradients, for the CPU.

`critics_loss` (`shared.py`), and the losses of the policy and the temperature (`sac.py`, `td3.py`)
are the references: results agree within rounding (`tests/models/test_critics_gradient.py`). These
need fewer operations, and one vector holds all parameters of a module. Left out: targets
(`manual_targets.py`).
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.algos.base import Metrics, share_of
from headrace.algos.critics.sac import SAC
from headrace.algos.critics.shared import loss_of_rows
from headrace.algos.critics.td3 import TD3
from headrace.batch import Minibatch, Obs
from headrace.models.critics.actor import ActorNetwork, ActorPolicy
from headrace.models.critics.critics import Critics, join
from headrace.models.critics.heads import NoisyAction, SquashedGaussian
from headrace.models.critics.temperature import Temperature
from headrace.models.manual import dense, squashed
from headrace.models.manual.dense import Dense, Layer, batched, linear
from headrace.models.manual.flat import FlatParameters
from headrace.models.policy import Network


def unsupported(critics: Critics, network: Network, cfg: Any) -> str:
    """Return the reason why the gradients here cannot replace autograd's, or "".

    With a recurrent core the losses are others.
    """
    reasons = {
        "actions that are choices": critics.num_choices > 0,
        "dropout": len(critics.dropout) > 0,
        "batch normalization": len(critics.norms) > 0,
    }
    return dense.unsupported(network, [critics.encoder], next(critics.parameters()), reasons)


def policy_unsupported(
    policy: ActorPolicy, network: Network, cfg: Any, *, critics: Critics, **_: Any
) -> str:
    """Return `unsupported` for the loss of a policy."""
    if type(policy.model) is not ActorNetwork or not policy.is_own:
        return "a network of your own"
    if type(policy) is not ActorPolicy:
        return "a policy of its own kind"
    reason = unsupported(critics, network, cfg)
    is_known = type(policy.head) in (SquashedGaussian, NoisyAction)
    return reason or ("" if is_known else "a distribution of its own")


def layers_of_actor(
    model: ActorNetwork, network: Network, flat: FlatParameters | None = None
) -> list[Layer]:
    """Return the layers of a policy; `flat` as in `linear`."""
    hidden = [linear(flat, layer, network.activation) for layer in model.trunk.layers]
    return [*hidden, linear(flat, model.actor)]


def layers_of(
    critics: Critics, network: Network, flat: FlatParameters | None = None, first: int | None = None
) -> list[Layer]:
    """Return the layers of so many first critics; `flat` as in `batched`."""
    *hidden, last = critics.layers
    norm = critics.has_layer_norm
    each = [
        batched(layer, network.activation, flat, first=first, layer_norm=norm) for layer in hidden
    ]
    return [*each, batched(last, None, flat, first=first)]


class CriticsGradient(FlatParameters):
    """A `ManualGradient` of `critics_loss`. All parameters become views of one vector."""

    def __init__(self, critics: Critics, network: Network, cfg: Any) -> None:
        super().__init__(list(critics.layers.parameters()))
        self._critics = critics
        self._net = Dense(layers_of(critics, network, flat=self))

    @torch.no_grad()
    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Fill `flat`. `critics_loss` documents the minibatch and the metrics."""
        critics, weight, target = self._critics, minibatch["weight"], minibatch["target"]
        x = join(critics.encoder(minibatch["seen"]), minibatch["action"], self.flat.dtype)
        outputs = self._net.forward(x.expand(critics.num_critics, *x.shape))
        loss, signal = critics.estimate.loss_and_gradient(outputs, target)
        _, metrics = loss_of_rows(loss, critics.estimate, outputs, target, minibatch)
        torch.mul(signal, weight.unsqueeze(-1), out=self._net.output_gradient)
        self._net.fill()
        return metrics


class PolicyGradient(FlatParameters):
    """What the losses of policies share: the networks, and values of the policy's actions.

    Args:
        first: the policy improves the value of so many of the critics; None: of all.
    """

    def __init__(
        self, policy: ActorPolicy, network: Network, critics: Critics, first: int | None = None
    ) -> None:
        model = policy.model
        assert isinstance(model, ActorNetwork)
        layers = [*model.trunk.layers, model.actor]
        super().__init__([p for layer in layers for p in (layer.weight, layer.bias)])
        self._policy, self._critics, self._encoder = policy, critics, model.encoder
        self._net = Dense(layers_of_actor(model, network, self))
        self._network, self._num_critics = network, first or critics.num_critics

    @functools.cached_property
    def _of_critics(self) -> Dense:
        """The critics that judge actions.

        They are read at the first gradient: another `FlatParameters` may move their weights before.
        """
        return Dense(layers_of(self._critics, self._network, first=self._num_critics))

    def _params(self, obs: Obs) -> tuple[Obs, Tensor]:
        """Return normalized observations, and the parameters of the head."""
        seen = self._policy.normalized(obs)
        return seen, self._net.forward(self._encoder(seen).to(self.flat.dtype))

    def _fill(self, signal: Tensor) -> None:
        """Fill `flat` from the gradient of the head's parameters."""
        self._net.output_gradient.copy_(signal)
        self._net.fill()

    def _value(self, seen: Obs, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of actions, `[B]`, and their gradient, `[B, size]`."""
        estimate = self._critics.estimate
        x = join(self._critics.encoder(seen), action, self.flat.dtype)
        outputs = self._of_critics.forward(x.expand(self._num_critics, *x.shape))
        value = estimate.to_improve(outputs)
        self._of_critics.output_gradient.copy_(estimate.improvement_gradient(outputs))
        return value, self._of_critics.of_input(action.shape[-1]).sum(0)


class SACGradient(PolicyGradient):
    """A `ManualGradient` of `sac.actor_loss`."""

    def __init__(
        self,
        policy: ActorPolicy,
        network: Network,
        cfg: SAC,
        *,
        critics: Critics,
        temperature: Temperature,
    ) -> None:
        super().__init__(policy, network, critics)
        self._temperature, self._cfg = temperature, cfg

    @torch.no_grad()
    @np.errstate(all="ignore")  # as in torch: the gradient's norm shows what is not finite
    def __call__(self, minibatch: Minibatch) -> Metrics:
        """Fill `flat`. `sac.actor_loss` documents the minibatch and the metrics."""
        size, weight = self._policy.num_draws, minibatch["weight"].numpy()
        share = share_of(minibatch).numpy()
        seen, params = self._params(minibatch["obs"])
        normal = minibatch["noise"][:, size : 2 * size].numpy()
        action, log_prob, pull = squashed.draw(params.numpy(), normal)
        value, of_value = self._value(seen, torch.from_numpy(action))
        temperature = float(self._temperature())
        column = weight[:, None]
        self._fill(torch.from_numpy(pull(-column * of_value.numpy(), temperature * column)))
        return {
            "actor_loss": float((temperature * log_prob - value.numpy()) @ weight),
            "entropy": -float(log_prob @ share),
            "missing_entropy": torch.from_numpy(log_prob + self._cfg.target_entropy * size),
        }


class TD3Gradient(PolicyGradient):
    """A `ManualGradient` of `td3.actor_loss`."""

    def __init__(
        self, policy: ActorPolicy, network: Network, cfg: TD3, *, critics: Critics
    ) -> None:
        super().__init__(policy, network, critics, first=1)

    @torch.no_grad()
    @np.errstate(all="ignore")
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Fill `flat`. `td3.actor_loss` documents the minibatch and the metrics."""
        weight = minibatch["weight"]
        seen, params = self._params(minibatch["obs"])
        action = self._policy.head.mode(params)
        value, of_value = self._value(seen, action)
        # tanh'(x) = 1 - tanh(x)²
        self._fill(of_value * -weight.unsqueeze(-1) * (1 - action.square()))
        return {"actor_loss": -(value * weight).sum()}


class TemperatureGradient(FlatParameters):
    """A `ManualGradient` of `sac.temperature_loss`: one number, for which autograd takes longer."""

    def __init__(self, temperature: Temperature, network: Network, cfg: SAC) -> None:
        super().__init__([temperature.log_alpha])

    @torch.no_grad()
    def __call__(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Fill `flat`. There are no metrics."""
        self.flat.copy_(-(minibatch["missing_entropy"] * minibatch["weight"]).sum())
        return {}


def temperature_unsupported(temperature: Temperature, network: Network, cfg: SAC) -> str:
    """Return the reason why `TemperatureGradient` cannot replace autograd, or ""."""
    if network.arithmetic == "plain":
        return "--arithmetic plain"
    return "" if temperature.log_alpha.device.type == "cpu" else "on a GPU"
