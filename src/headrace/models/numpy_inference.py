"""A worker's inference in NumPy: a faster `Policy.act` for small networks.

For the few rows of a vector, NumPy's overhead is lower than torch's (`benchmarks/cartpole.py`).
Values and log-probs are computed after a fragment's last step, and equal those of `Policy.act`
within 4e-6. Rows here are features and columns are envs, as in `numpy_features.py`.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.batch import Fragment, Obs, each
from headrace.models.distributions import Categorical, Gaussian, Head, MultiCategorical, Product
from headrace.models.numpy_features import (
    Floats,
    NumpyFeatures,
    NumpyMask,
    arrays_of,
    columns,
    has_images,
    joined_rows,
)
from headrace.models.policy import Actor, ActorCritic, Network, Policy
from headrace.spec import EnvSpec

Layer = tuple[Floats, Floats]  # weight [out, in], bias [out, 1]
_MOST_ROWS = 2048  # per product after the last step: they fit the cache


def unsupported(policy: Policy, spec: EnvSpec, network: Network) -> str:
    """Return the reason why `NumpyActor` cannot replace `policy.act`, or ""."""
    return why_not(policy, spec, network, Policy, ActorCritic)


def why_not(
    policy: Policy,
    spec: EnvSpec,
    network: Network,
    kind: type[Policy],
    model: type[nn.Module],
) -> str:
    """Return why a policy of this kind with such a network cannot act in NumPy, or ""."""
    reasons = {
        "--arithmetic plain": network.arithmetic == "plain",
        f"precision {network.precision}": network.precision != "fp32",
        "a network of your own": not (isinstance(policy.model, model) and policy.is_own),
        "a policy of its own kind": type(policy) is not kind,
        "a recurrent core": network.core != "none",
        "images": has_images(spec),
        "on a GPU": next(policy.parameters()).is_cuda,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class NumpyActor(Actor):
    """An `Actor` in NumPy."""

    def __init__(self, policy: Policy, spec: EnvSpec, network: Network) -> None:
        model = policy.model
        assert isinstance(model, ActorCritic), model
        critic_trunk = model.critic_trunk or model.actor_trunk
        self._actor = [layer_of(layer) for layer in (*model.actor_trunk.layers, model.actor)]
        self._critic = [layer_of(layer) for layer in (*critic_trunk.layers, model.critic)]
        self._activate = ACTIVATE[network.activation]
        self._head, self._mask = policy.head, NumpyMask(policy, spec)
        seen = spec.seen.leaves
        key = spec.state_key  # `PLAIN`, of an observation, is the same as no key of a state
        state = [(key, dict(spec.observation.parts)[key])] if key else []
        self._seen = NumpyFeatures(policy, seen)
        self._seen_by_critic = NumpyFeatures(policy, [*seen, *state])

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        num_steps, n = fragment.num_steps, fragment.num_envs
        self._fragment, self._obs = fragment, arrays_of(fragment.obs)
        features, mask = self._seen.reader(self._obs), self._mask.applier(self._obs)
        # [T, ..., n], [T, num_params, n]
        self._actions = _columns(fragment.action)
        params = self._params = np.empty((num_steps, self._head.num_params, n), np.float32)
        actions, sample = list(self._actions), _sampler(self._head, noise)
        hidden = [np.empty((len(bias), n), np.float32) for _, bias in self._actor[:-1]]

        def act(t: int) -> None:
            self._through(self._actor, features(t), [*hidden, params[t]])
            mask(t, params[t])
            sample(t, params[t], actions[t])

        return act

    def act_on(self, obs: Obs, noise: Tensor) -> Tensor:
        """Return the actions of any rows: observations `[n, ...]`, noise `[n, draws]`."""
        arrays, n = arrays_of(each(lambda o: o.unsqueeze(0), obs)), len(noise)
        sizes = (len(bias) for _, bias in self._actor)
        buffers = [np.empty((size, n), np.float32) for size in sizes]
        params = self._through(self._actor, self._seen.reader(arrays)(0), buffers)
        self._mask.applier(arrays)(0, params)
        is_choice = isinstance(self._head, Categorical | MultiCategorical)
        shape = (n,) if isinstance(self._head, Categorical) else (self._head.num_draws, n)
        action = np.empty(shape, np.int64 if is_choice else np.float32)
        _sampler(self._head, noise.unsqueeze(0))(0, params, action)
        return torch.from_numpy(action.T)

    def finish(self, rows: slice) -> None:
        out, n = self._fragment.stored_outputs, self._fragment.num_envs
        if "log_prob" in out:
            log_prob = _log_prob(self._head, self._params[rows], self._actions[rows])
            out["log_prob"].numpy()[rows] = log_prob
        if "value" not in out:
            return
        num_steps = max(1, _MOST_ROWS // n)
        for t in range(rows.start, rows.stop, num_steps):
            some = slice(t, min(t + num_steps, rows.stop))
            value = out["value"].numpy()[some]
            x = self._seen_by_critic.reader(joined_rows(self._obs, some))(0)
            sizes = [len(bias) for _, bias in self._critic]
            buffers = [np.empty((size, x.shape[1]), np.float32) for size in sizes]
            value[:] = self._through(self._critic, x, buffers).reshape(value.shape)

    # OpenBLAS says "invalid value" now and then of right products (numpy issue 24067). The learner
    # refuses what is not finite. `dot` is `matmul` at half its overhead.
    @np.errstate(invalid="ignore")
    def _through(self, layers: list[Layer], x: Floats, buffers: list[Floats]) -> Floats:
        """Compute the last layer's output in the last buffer."""
        last = buffers[-1]
        for (weight, bias), out in zip(layers, buffers, strict=True):
            np.dot(weight, x, out=out)
            out += bias
            x = out if out is last else self._activate(out)
        return last


def layer_of(linear: nn.Module) -> Layer:
    """Return weight (or gain) and bias `[out, 1]` of a layer."""
    assert isinstance(linear, nn.Linear | nn.LayerNorm)
    return linear.weight.detach().numpy(), linear.bias.detach().numpy()[:, None]


def _columns(tensor: Tensor) -> NDArray[Any]:
    """Move the envs of `[T, n]` or `[T, n, parts]` last: `[T, n]` or `[T, parts, n]`."""
    return tensor.numpy() if tensor.dim() == 2 else columns(tensor.numpy())


_Sample = Callable[[int, Floats, NDArray[Any]], None]
"""Writes the actions `[..., n]` of step t, from params `[num_params, n]`."""


def _sampler(head: Head, noise: Tensor) -> _Sample:
    """Return the sampling function of a distribution; noise is `[T, n, draws]`."""
    if isinstance(head, Gaussian):
        std = head.log_std.detach().exp()
        spread = _columns(std * torch.special.ndtri(noise))

        def sample(t: int, params: Floats, action: NDArray[Any]) -> None:
            np.add(params, spread[t], out=action)

        return sample
    if isinstance(head, Product):
        return _sampler_of_parts(head, noise)
    uniform = _columns(noise)
    if isinstance(head, Categorical):
        draws = [row[0] for row in uniform]
        return lambda t, params, action: _choose(params, draws[t], action)
    ends = _ends(head)

    def sample_each(t: int, params: Floats, action: NDArray[Any]) -> None:
        for part, u, row in zip(np.split(params, ends), uniform[t], action, strict=True):
            _choose(part, u, row)

    return sample_each


def _sampler_of_parts(head: Product, noise: Tensor) -> _Sample:
    parts = _parts(head)
    samplers = [_sampler(part, noise[..., numbers]) for part, _, numbers in parts]

    def sample_each(t: int, params: Floats, action: NDArray[Any]) -> None:
        for sample, (_, of_part, numbers) in zip(samplers, parts, strict=True):
            sample(t, params[of_part], action[numbers])

    return sample_each


def _parts(head: Product) -> list[tuple[Head, slice, slice]]:
    """Return each part, and the slices of its params and of the numbers of its actions."""
    parts = [part for part in head.parts if isinstance(part, Head)]
    ends = [
        itertools.accumulate(sizes, initial=0)
        for sizes in ([p.num_params for p in parts], [p.num_draws for p in parts])
    ]
    slices = [[slice(*pair) for pair in itertools.pairwise(of)] for of in ends]
    return list(zip(parts, *slices, strict=True))


def _ends(head: Head) -> list[int]:
    assert isinstance(head, MultiCategorical), head
    return np.cumsum(head.sizes)[:-1].tolist()  # type: ignore[no-any-return]


def _choose(logits: Floats, uniform: Floats, choice: NDArray[Any]) -> None:
    """Sample one choice per column of logits `[num_choices, n]` by inverse CDF."""
    p = logits - np.maximum.reduce(logits, 0)
    np.exp(p, out=p)
    np.add.accumulate(p, 0, out=p)
    np.add.reduce(p < uniform * p[-1], 0, dtype=np.int64, out=choice)


def _log_prob(head: Head, params: Floats, action: NDArray[Any]) -> Floats:
    """Return `[T, n]` from params `[T, num_params, n]`, actions `[T, n]` or `[T, parts, n]`."""
    if isinstance(head, Gaussian):
        log_std = head.log_std.detach().numpy()[:, None]
        z = (action - params) * np.exp(-log_std)
        log_prob: Floats = -0.5 * z * z - log_std - np.float32(0.5 * math.log(2 * math.pi))
        return log_prob.sum(1)  # type: ignore[no-any-return]
    if isinstance(head, Categorical):
        return _log_p(params, action)
    if isinstance(head, Product):
        each = [
            _log_prob(part, params[:, of_part], action[:, numbers])
            for part, of_part, numbers in _parts(head)
        ]
        return np.sum(each, 0)  # type: ignore[no-any-return]
    parts = zip(np.split(params, _ends(head), 1), action.swapaxes(0, 1), strict=True)
    return np.sum([_log_p(*of) for of in parts], 0)  # type: ignore[no-any-return]


def _log_p(logits: Floats, choice: NDArray[Any]) -> Floats:
    logits = logits - logits.max(1, keepdims=True)
    chosen = np.take_along_axis(logits, choice[:, None].astype(np.int64, copy=False), 1)[:, 0]
    return chosen - np.log(np.exp(logits).sum(1))  # type: ignore[no-any-return]


ACTIVATE: dict[str, Callable[[Floats], Floats]] = {
    "tanh": lambda x: np.tanh(x, out=x),
    "relu": lambda x: np.maximum(x, 0, out=x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    # x * sigmoid(x), in a form that cannot overflow
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
}
