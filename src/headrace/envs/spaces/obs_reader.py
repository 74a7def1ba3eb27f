"""Reads observations and action masks of one agent, as its environment returns them.

Left out: the memory that they are written to (`envs/episodes.py`, `envs/games/rows.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from headrace.envs.spaces.masks import MASK, flat_mask, mask_array
from headrace.spec import PLAIN, Array, EnvSpec, KeyPath, Space, getter


def leaf(obs: Any, key: str) -> Array:
    """Return the array of this key of `Space.leaves`."""
    array: Array = obs[key] if isinstance(obs, dict) else obs
    return array


def misfit(name: str, space: Space, obs: Any) -> str:
    """Describe a wrong shape or dtype, which storing would broadcast or round; "" if it fits."""
    array = np.asarray(obs)
    fits = array.shape == space.shape and (
        np.can_cast(array.dtype, space.dtype, "same_kind")
        # A list of small integers, where the space has smaller ones
        or (array.dtype.kind in "iu" and np.array_equal(array.astype(space.dtype), array))
    )
    if fits:
        return ""
    return (
        f"{name} of shape {array.shape} and dtype {array.dtype}, but the environment declares "
        f"{space.describe()}"
    )


class ObsPart(NamedTuple):
    """A part of an observation: its key in `Space.leaves`, and the way to it in an element."""

    key: str
    space: Space
    path: KeyPath
    get: Callable[[Any], Any]


class ObsReader:
    """Writes an environment's observations, of one agent, to rows of memory.

    Attributes:
        parts: the leaves that the environment's observation has; the others come from elsewhere.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec, space = spec, spec.observation
        self.parts = [
            ObsPart(key, part, path, getter(path))
            for (key, part), path in zip(space.leaves, space.key_paths, strict=True)
            if key not in spec.added_keys
        ]
        self._choices = [
            (key, first, first + np.reshape(part.nvec, part.shape))
            for key, part in space.leaves
            if part.nvec
            for first in [np.reshape(part.start, part.shape)]
        ]

    def put(self, rows: Any, i: Any, obs: Any, info: Any, *, ended: bool) -> None:
        """Write an observation (and mask) to row i; KeyError if a part or the mask is missing."""
        for key, _, _, get in self.parts:
            target = rows[key] if isinstance(rows, dict) else rows
            target[i] = self.stored(key, get(obs))
        if self.spec.mask_in_info:
            # There may be no mask at the end of an episode.
            mask = info.get(MASK) if ended else info[MASK]
            rows[MASK][i] = True if mask is None else flat_mask(mask, self.spec.action)

    def stored(self, key: str, value: Any) -> Any:
        """Return a part of an observation as it is stored: a mask of several arrays as one."""
        is_nested = key == self.spec.mask_key and isinstance(value, Mapping | tuple)
        return mask_array(value, self.spec.action) if is_nested else value

    def misfit(self, obs: Any) -> str:
        """Describe a wrong shape or dtype of an observation; "" if it is as declared."""
        for key, space, path, get in self.parts:
            if problem := _missing(obs, path):
                return problem
            name = "an observation" if key == PLAIN else f"an observation {key!r}"
            if problem := misfit(name, space, self.stored(key, get(obs))):
                return problem
        return ""

    def mask_misfit(self, info: Any) -> str:
        """Describe what is wrong with the action mask in `info`; "" if nothing is."""
        if not self.spec.mask_in_info:
            return ""
        count = sum(self.spec.action.nvec)
        if not hasattr(info, "get") or info.get(MASK) is None:
            return f"no action mask in info[{MASK!r}]"
        try:
            size = flat_mask(info[MASK], self.spec.action).size
        except (KeyError, IndexError, TypeError, ValueError):
            size = -1
        if size == count:
            return ""
        return (
            f"an action mask that does not fit {self.spec.action.describe()}: expected {count} "
            f"entries in info[{MASK!r}], got {info[MASK]!r}"
        )

    def no_choice(self, rows: Any, shape: tuple[int, ...]) -> Array | None:
        """Return which rows, `shape` bool, are no choice of their space; None if none can be."""
        if not self._choices:
            return None
        bad = np.zeros(shape, bool)
        for key, first, end in self._choices:
            part = leaf(rows, key)
            bad |= ((part < first) | (part >= end)).reshape(*shape, -1).any(-1)
        return bad

    def without_action(self, rows: Any, shape: tuple[int, ...]) -> list[tuple[slice, Array]]:
        """Return choices of an action, and where a mask forbids them all: `shape` bool."""
        if not self.spec.mask_key:
            return []
        mask, first, found = rows[self.spec.mask_key].reshape(*shape, -1), 0, []
        for count in self.spec.action.nvec:
            choices = slice(first, first + count)
            found.append((choices, ~mask[..., choices].any(-1)))
            first += count
        return found


def _missing(obs: Any, path: KeyPath) -> str:
    """Describe what is missing on the way to a part of an observation; "" if it is there."""
    for depth, step in enumerate(path):
        where = f" {'.'.join(map(str, path[:depth]))!r}" if depth else ""
        if isinstance(step, int):
            if not isinstance(obs, tuple | list) or len(obs) <= step:
                size = f" of {len(obs)}" if isinstance(obs, tuple | list) else ""
                return f"an observation{where} without the part {step} (a {_kind(obs)}{size})"
        elif not hasattr(obs, "keys") or step not in obs:
            keys = list(obs) if hasattr(obs, "keys") else _kind(obs)
            return f"an observation{where} without the key {step!r} (it has {keys})"
        obs = obs[step]
    return ""


def _kind(obs: Any) -> str:
    return type(obs).__name__
