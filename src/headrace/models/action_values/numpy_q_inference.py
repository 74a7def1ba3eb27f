"""A worker's inference in NumPy by the values of actions: a faster `QPolicy.act`.

Rows are features and columns are envs, as in `numpy_features.py`. Values agree with those of
`QPolicy.act` within 4e-6 of a few units.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.batch import Fragment
from headrace.models.action_values.noisy import NoisyLinear
from headrace.models.action_values.q_policy import QNetwork, QPolicy
from headrace.models.action_values.value_distributions import MeanOnly
from headrace.models.networks import NORM_EPS, Mlp
from headrace.models.numpy_features import Floats, NumpyFeatures, NumpyMask, arrays_of
from headrace.models.numpy_inference import ACTIVATE, Layer, layer_of, why_not
from headrace.models.policy import Actor, Network
from headrace.spec import EnvSpec


def unsupported(policy: QPolicy, spec: EnvSpec, network: Network) -> str:
    """Return the reason why `NumpyQActor` cannot replace `policy.act`, or ""."""
    reason = why_not(policy, spec, network, QPolicy, QNetwork)
    if not reason and not isinstance(policy.returns, MeanOnly):
        reason = "a distribution of returns"
    if not reason and any(isinstance(layer, NoisyLinear) for layer in policy.modules()):
        reason = "noise in weights"
    return reason


class NumpyQActor(Actor):
    """An `Actor` in NumPy, with the weights of its creation."""

    def __init__(self, policy: QPolicy, spec: EnvSpec, network: Network) -> None:
        model = policy.model
        assert isinstance(model, QNetwork), model
        activate = ACTIVATE[network.activation]
        self._advantage = [*_hidden(model.trunk, activate), _product(layer_of(model.actor))]
        self._value: list[Callable[[Floats], Floats]] = []
        if model.critic_trunk is not None:
            last = _product(layer_of(model.critic))
            self._value = [*_hidden(model.critic_trunk, activate), last]
        self._seen, self._mask = NumpyFeatures(policy, spec.seen.leaves), NumpyMask(policy, spec)
        self._num_choices, self._is_masked = policy.head.num_choices, policy.masks
        self._epsilon = np.float32(policy.head.epsilon)

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        num_steps, n = fragment.num_steps, fragment.num_envs
        self._fragment, arrays = fragment, arrays_of(fragment.obs)
        features, mask = self._seen.reader(arrays), self._mask.applier(arrays)
        is_masked = self._is_masked
        uniform, actions = noise.numpy()[..., 0], fragment.action.numpy()
        best = self._best = np.empty((num_steps, n), np.float32)
        columns = np.arange(n)
        some = self._epsilon / np.float32(self._num_choices)

        def act(t: int) -> None:
            values = self._values(features(t))
            mask(t, values)
            choice = values.argmax(0)
            best[t] = values[choice, columns]
            if is_masked:
                allowed = values > NumpyMask.LEAST
                # A row that only resets may allow nothing: its value is 0, its choice the first.
                best[t] *= allowed[choice, columns]
                count = np.maximum(np.add.reduce(allowed, 0), 1)
                probability = allowed * (self._epsilon / count).astype(np.float32)
            else:
                probability = np.full_like(values, some)
            probability[choice, columns] += 1 - self._epsilon
            cumulative = np.add.accumulate(probability, 0)
            threshold = uniform[t] * cumulative[-1]
            np.add.reduce(cumulative < threshold, 0, dtype=np.int64, out=actions[t])

        return act

    def finish(self, rows: slice) -> None:
        if "value" in (out := self._fragment.stored_outputs):
            out["value"].numpy()[rows] = self._best[rows]

    @np.errstate(invalid="ignore")  # as in `NumpyActor`
    def _values(self, x: Floats) -> Floats:
        """Return the values of actions `[num_choices, n]`."""
        values = _through(self._advantage, x)
        if self._value:
            values = _through(self._value, x) + (values - values.mean(0))
        return values


def _hidden(trunk: Mlp, activate: Callable[[Floats], Floats]) -> list[Callable[[Floats], Floats]]:
    steps: list[Callable[[Floats], Floats]] = []
    for i, linear in enumerate(trunk.layers):
        steps.append(_product(layer_of(linear)))
        if trunk.norms:
            steps.append(_layer_norm(layer_of(trunk.norms[i])))
        steps.append(activate)
    return steps


def _through(steps: list[Callable[[Floats], Floats]], x: Floats) -> Floats:
    for step in steps:
        x = step(x)
    return x


def _product(layer: Layer) -> Callable[[Floats], Floats]:
    weight, bias = layer
    return lambda x: np.dot(weight, x) + bias


def _layer_norm(layer: Layer) -> Callable[[Floats], Floats]:
    gain, bias = layer

    def normalize(x: NDArray[Any]) -> Floats:
        centered = x - x.mean(0)
        variance = np.square(centered).mean(0)
        normal: Floats = centered / np.sqrt(variance + np.float32(NORM_EPS))
        return normal * gain[:, None] + bias

    return normalize
