"""Reads action masks: where an environment gives them, and as one row of bits.

Left out: how a policy applies them, which is in `headrace.models`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.spec import Array, Space

MASK = "action_mask"
"""What Gymnasium's environments call a mask, in `info` or among observations."""


def mask_array(mask: Any, action: Space) -> Array:
    """Return an action mask as one array, with the bits of several arrays side by side.

    The mask of a MultiDiscrete may be a tuple of one per component. That of a Dict or Tuple may be
    one of masks, with the structure of the actions; there is none for a Box.

    Raises:
        KeyError, IndexError: a part of `action` has choices and no mask.
    """
    if action.parts and isinstance(mask, Mapping | tuple):
        keys: Iterable[Any] = range(len(action.parts))
        if isinstance(mask, Mapping):
            keys = (key for key, _ in action.parts)
        mask = [
            mask_array(mask[key], part)
            for key, (_, part) in zip(keys, action.parts, strict=True)
            if part.nvec
        ]
    if isinstance(mask, tuple | list) and any(np.ndim(part) for part in mask):
        mask = np.concatenate([np.asarray(part) for part in mask], -1)
    return np.asarray(mask)


def flat_mask(mask: Any, action: Space) -> Array:
    """Flatten a mask, of any form that `mask_array` takes, to a vector of bool."""
    bits: Array = mask_array(mask, action).ravel() != 0
    return bits


def space_of_masks(action: Space) -> Space:
    """Return the space of masks for `action`: a bit per choice."""
    return Space("multi_binary", (sum(action.nvec),), "int8")


def find_key(obs_space: Space, act_space: Space, info: Mapping[str, Any], action_mask: str) -> str:
    """Return the key of the mask, in `info` or among observations; "": there is none.

    `action_mask` is that of `specs.read`.

    Raises:
        ConfigError: there is no such mask, or it does not fit the actions.
    """
    count, parts = sum(act_space.nvec), dict(obs_space.parts)
    info_size = _size_in(info, act_space)
    if action_mask == "auto":
        fits = MASK in parts and parts[MASK].size == count and parts[MASK].kind != "discrete"
        return MASK if count and (fits or (info_size == count and MASK not in parts)) else ""
    if action_mask == "off":
        return ""
    if not count:
        raise ConfigError(
            f"action_mask={action_mask!r}: masks are for Discrete and MultiDiscrete actions, and "
            f"these are {act_space.describe()}."
        )
    if action_mask == "info" and MASK in parts:
        raise ConfigError(
            f"action_mask='info', but the observation has a key {MASK!r} too: expected a mask in "
            f"one place.\nUse --action-mask {MASK}, or --drop-obs-keys {MASK}."
        )
    if action_mask == "info":
        key, place, size, keys = MASK, f"info[{MASK!r}]", info_size, sorted(info)
    else:
        key, place, keys = action_mask, f"the observation {action_mask!r}", list(parts)
        size = parts[key].size if key in parts else None
    if size != count:
        actual = f"keys {keys}" if size is None else f"{size} entries"
        raise ConfigError(
            f"action_mask={action_mask!r}: expected {place} with {count} entries, one per choice "
            f"of {act_space.describe()}; got {actual}."
        )
    return key


def _size_in(info: Mapping[str, Any], action: Space) -> int | None:
    """Return the number of entries of the mask in `info`; None: none, or not all parts have one."""
    try:
        return flat_mask(info[MASK], action).size
    except (KeyError, IndexError, ValueError):
        return None
