"""Observations as a network's input in NumPy: normalized, flat, choices one-hot, side by side.

The reference are `Policy.normalized` and the encoders of vectors (`networks.py`). Rows here are
features and columns are envs, so that work per env runs along memory. Left out: images, and what a
network computes (`numpy_inference.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.batch import Obs
from headrace.models.networks import image_layout
from headrace.models.normalization import CLIP
from headrace.models.policy import Policy
from headrace.spec import PLAIN, EnvSpec, Space

Floats: TypeAlias = NDArray[np.float32]
Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Observations `[T, n, ...]` by key; `PLAIN` is the key of the only one."""


def has_images(spec: EnvSpec) -> bool:
    """Whether a network sees an image."""
    return any(image_layout(leaf) is not None for _, leaf in spec.seen_by_critic.leaves)


def arrays_of(obs: Obs) -> Arrays:
    """Return observations `[T, n, ...]` as arrays that share their memory."""
    if isinstance(obs, dict):
        return {key: part.numpy() for key, part in obs.items()}
    return {PLAIN: obs.numpy()}


def joined_rows(arrays: Arrays, steps: slice) -> Arrays:
    """Return some steps `[T, n, ...]` as one: `[1, T * n, ...]`."""
    some = {key: array[steps] for key, array in arrays.items()}
    return {k: a.reshape(1, a.shape[0] * a.shape[1], *a.shape[2:]) for k, a in some.items()}


class NumpyFeatures:
    """The features of some parts of observations, with the moments of its creation."""

    def __init__(self, policy: Policy, leaves: Sequence[tuple[str, Space]]) -> None:
        self._parts = [(key, _features(policy, key, leaf)) for key, leaf in leaves]

    def reader(self, arrays: Arrays) -> Callable[[int], Floats]:
        """Return a function from a step t to its features `[num_features, n]`."""
        parts = [(of_part, columns(arrays[key])) for key, of_part in self._parts]
        if len(parts) == 1:
            of_part, column = parts[0]
            return lambda t: of_part(column[t])
        return lambda t: np.concatenate([of_part(column[t]) for of_part, column in parts])


class NumpyMask:
    """The action mask of a policy's observations; nothing without one."""

    LEAST = np.finfo(np.float32).min
    """In place of the logit, or the value, of a choice that is not allowed."""

    def __init__(self, policy: Policy, spec: EnvSpec) -> None:
        head = policy.head
        self._key = spec.mask_key if head.num_choices else ""
        nothing = torch.zeros(head.num_choices, dtype=torch.bool)
        # Of the params: a bit belongs to each
        self._choices = head.masked(torch.zeros(head.num_params), nothing).numpy() != 0

    def applier(self, arrays: Arrays) -> Callable[[int, Floats], None]:
        """Return a function that masks params `[num_choices, n]` of step t, in place."""
        if not self._key:
            return lambda t, params: None
        bits, choices = columns(arrays[self._key]), self._choices
        if choices.all():
            return lambda t, params: np.copyto(params, self.LEAST, where=bits[t] == 0)

        def apply(t: int, params: Floats) -> None:
            params[choices] = np.where(bits[t] == 0, self.LEAST, params[choices])

        return apply


def columns(array: NDArray[Any]) -> NDArray[Any]:
    """Return `[T, n, ...]` as `[T, numbers, n]`."""
    return array.reshape(*array.shape[:2], -1).swapaxes(1, 2)


def _features(policy: Policy, key: str, space: Space) -> Callable[[NDArray[Any]], Floats]:
    """Return a function from a part `[numbers, n]` to its features `[num_features, n]`."""
    if space.nvec:
        which = np.repeat(np.arange(len(space.nvec)), space.nvec)
        starts = zip(space.nvec, space.start, strict=True)
        choice = np.concatenate([np.arange(first, first + count) for count, first in starts])
        return lambda x: (x[which] == choice[:, None]).astype(np.float32)
    if policy.normalize_obs is None or space.kind != "box":
        return lambda x: x.astype(np.float32, copy=False)
    with torch.no_grad():
        moments = policy.normalize_obs.of(key).scaling()
    mean, scale = (each.numpy().reshape(-1, 1) for each in moments)
    return lambda x: ((x.astype(np.float32, copy=False) - mean) * scale).clip(-CLIP, CLIP)
