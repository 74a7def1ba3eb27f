"""A sampler's inference in NumPy: `Policy.act` for small networks, in fewer microseconds.

For the few rows of a vector, torch spends more time around each operation than in it, and NumPy
less (`benchmarks/cartpole.py` trains with both). Log-probs and values are those of `Policy.act`
within 4e-6; an action differs only where its noise is that close to the boundary between two
(`tests/test_numpy_actor.py`). Features are rows here and envs are columns, so that what is done per
env runs along memory.

Left out: gradients; image, Dict and masked observations, bf16 and networks of the user's own, which
are the policy's.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.dists import Categorical, Gaussian, MultiCategorical
from headrace.models.encoders import image_layout
from headrace.models.normalize import CLIP
from headrace.models.policy import Act, ActorCritic, Network, Policy
from headrace.spec import EnvSpec

Floats: TypeAlias = NDArray[np.float32]
_Layer = tuple[Floats, Floats]  # weight [out, in], bias [out, 1]


def actor(policy: Policy, spec: EnvSpec, network: Network) -> Act:
    """What acts with the policy's weights as they are now (a later change may not be seen)."""
    if isinstance(policy.model, ActorCritic) and _can(spec, network):
        return NumpyActor(policy, network)
    return policy.act


def _can(spec: EnvSpec, network: Network) -> bool:
    """Whether `NumpyActor` knows how."""
    numbers = spec.observation.kind == "box" and image_layout(spec.observation) is None
    return numbers and network.arithmetic == "auto" and network.precision == "fp32"


class NumpyActor:
    """Acts as `policy` does: a network of our own, float32, over a Box of numbers.

    Args:
        policy: on the CPU.
        network: what it was built from.
    """

    def __init__(self, policy: Policy, network: Network) -> None:
        model, self._head = policy.model, policy.head
        assert isinstance(model, ActorCritic), model
        self._trunks = [[_layer(layer) for layer in model.actor_trunk.layers]]
        if model.critic_trunk is not None:
            self._trunks.append([_layer(layer) for layer in model.critic_trunk.layers])
        self._tops = _layer(model.actor), _layer(model.critic)
        self._activate = _ACTIVATE[network.activation]
        self._scaling: tuple[Floats, Floats] | None = None
        if policy.normalize_obs is not None:
            mean, scale = policy.normalize_obs.of("").scaling()
            self._scaling = mean.numpy().reshape(-1, 1), scale.numpy().reshape(-1, 1)

    def __call__(self, obs: Obs, noise: Tensor) -> dict[str, Tensor]:
        """See `Policy.act`."""
        assert isinstance(obs, Tensor)
        array = obs.numpy()
        x: Floats = array.reshape(len(array), -1).T.astype(np.float32, copy=False)
        if self._scaling is not None:
            mean, scale = self._scaling
            x = ((x - mean) * scale).clip(-CLIP, CLIP)
        hidden = [self._through(trunk, x) for trunk in self._trunks]
        params, value = (
            weight @ h + bias
            for (weight, bias), h in zip(self._tops, (hidden[0], hidden[-1]), strict=True)
        )
        action, log_prob = self._sample(params, noise)
        return {
            "action": torch.from_numpy(action),
            "log_prob": torch.from_numpy(log_prob),
            "value": torch.from_numpy(value[0]),
        }

    def _through(self, trunk: list[_Layer], x: Floats) -> Floats:
        for weight, bias in trunk:
            x = weight @ x
            x += bias
            x = self._activate(x)
        return x

    def _sample(self, params: Floats, noise: Tensor) -> tuple[NDArray[Any], Floats]:
        """See `sample` of each distribution; params are `[num_params, n]` here."""
        if isinstance(self._head, Gaussian):
            log_std = self._head.log_std.detach().numpy()[:, None]
            z = torch.special.ndtri(noise).numpy().T
            action = params + np.exp(log_std) * z
            z = (action - params) * np.exp(-log_std)
            log_prob = -0.5 * z * z - log_std - np.float32(0.5 * math.log(2 * math.pi))
            return action.T, log_prob.sum(0)
        uniform = noise.numpy().T
        if isinstance(self._head, Categorical):
            return _choose(params, uniform[0])
        assert isinstance(self._head, MultiCategorical)
        parts = np.split(params, np.cumsum(self._head.sizes)[:-1])
        each = [_choose(logits, u) for logits, u in zip(parts, uniform, strict=True)]
        choices, log_probs = zip(*each, strict=True)
        return np.stack(choices, -1), np.sum(log_probs, 0)


def _layer(linear: nn.Module) -> _Layer:
    assert isinstance(linear, nn.Linear)
    return linear.weight.detach().numpy(), linear.bias.detach().numpy()[:, None]


def _choose(logits: Floats, uniform: Floats) -> tuple[NDArray[np.int64], Floats]:
    """One choice per column of logits `[num_choices, n]` by inverse CDF, and its log-prob."""
    logits = logits - logits.max(0)
    cumulative = np.exp(logits).cumsum(0)
    total = cumulative[-1]
    choice = (cumulative < uniform * total).sum(0)
    return choice, logits[choice, np.arange(len(choice))] - np.log(total)


_ACTIVATE: dict[str, Callable[[Floats], Floats]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    # x * sigmoid(x), in the form that cannot overflow
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
}
