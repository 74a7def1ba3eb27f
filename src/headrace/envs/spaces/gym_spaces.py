"""Reads Gymnasium's spaces.

Left out: which mask an environment gives (`masks.py`), and its description as a whole (`specs.py`).
"""

import itertools
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.spaces import masks
from headrace.errors import ConfigError, UnsupportedSpaceError
from headrace.spec import KeyPath, Space

_NESTED = (gymnasium.spaces.Dict, gymnasium.spaces.Tuple)


def read_observation(
    space: Any, action: Space, *, drop: tuple[str, ...] = (), mask: str = ""
) -> tuple[Space, tuple[str, ...]]:
    """Describe a space of observations, nested as it may be.

    Args:
        space: Gymnasium's.
        action: what a mask is for.
        drop: paths, or heads of paths, of parts that are not wanted.
        mask: key of a mask, which may be a Dict or Tuple; "": there is none.

    Returns:
        tuple: the space, and a line for each part that is left out or changed.

    Raises:
        UnsupportedSpaceError: naming the space and its key.
        ConfigError: there is no such key to drop, or nothing is left.
    """
    notes: list[str] = []
    if isinstance(space, _NESTED):
        return _Parts(drop, notes, mask, action).read(space), tuple(notes)
    return _leaf("observation", space, notes), tuple(notes)


def has_choices(action: Any) -> bool:
    """Return whether a space of actions has choices, for which there may be a mask."""
    if isinstance(action, _NESTED):
        return any(has_choices(part) for _, part in _inner(action, "action"))
    if isinstance(action, gymnasium.spaces.Box):
        return not np.issubdtype(action.dtype, np.floating)
    return isinstance(action, gymnasium.spaces.MultiBinary) or _choices(action) is not None


class _Parts:
    """Reads the parts of a Dict or Tuple observation, nested as it may be, into one flat Dict.

    Arguments are those of `read_observation`. `notes` receives the lines that it returns.
    """

    def __init__(self, drop: tuple[str, ...], notes: list[str], mask: str, action: Space) -> None:
        self._drop, self._notes, self._mask, self._action = drop, notes, mask, action
        self._dropped: set[str] = set()
        self._parts: dict[str, tuple[KeyPath, Space]] = {}

    def read(self, space: Any) -> Space:
        """Return the flat Dict. Errors are those of `read_observation`."""
        self._add_all(space, ())
        if unknown := [key for key in self._drop if key not in self._dropped]:
            raise ConfigError(
                f"drop_obs_keys={self._drop}: the observation has no {unknown[0]!r}, its keys are "
                f"{', '.join(self._parts)}."
            )
        if not self._parts and self._drop:
            raise ConfigError(f"drop_obs_keys={self._drop} leaves no observation.")
        if not self._parts:
            raise _unsupported("observation", space, _NO_NUMBERS)
        paths = tuple(path for path, _ in self._parts.values())
        flat = all(path == (key,) for path, key in zip(paths, self._parts, strict=True))
        parts = tuple((key, part) for key, (_, part) in self._parts.items())
        return Space("dict", parts=parts, paths=() if flat else paths)

    def _add_all(self, space: Any, path: KeyPath) -> None:
        for step, part in _inner(space, "observation"):
            self._add(part, (*path, step))

    def _add(self, space: Any, path: KeyPath) -> None:
        key = ".".join(map(str, path))
        is_nested = isinstance(space, _NESTED)
        name = f"observation {key!r}"
        if key in self._drop:
            self._dropped.add(key)
            self._notes.append(f"the {name} ({type(space).__name__}) is dropped")
        elif is_nested and key == self._mask and self._is_mask(space):
            self._put(key, path, masks.space_of_masks(self._action))
        elif is_nested:
            self._add_all(space, path)
        elif reason := _why_not(space):
            self._notes.append(f"the {name} ({type(space).__name__}) is left out: {reason}")
        else:
            self._put(key, path, _leaf(name, space, self._notes))

    def _is_mask(self, space: Any) -> bool:
        try:
            bits = masks.mask_array(_zeros(space), self._action)
        except (KeyError, IndexError, ValueError):
            return False
        return bool(bits.shape == (sum(self._action.nvec),))

    def _put(self, key: str, path: KeyPath, space: Space) -> None:
        if key in self._parts:
            raise UnsupportedSpaceError(
                f"Two parts of the observation would be stored as {key!r}: {self._parts[key][0]} "
                f"and {path}.\nGive one of these keys another name, without a dot."
            )
        self._parts[key] = path, space


def _inner(space: Any, role: str) -> list[tuple[str | int, Any]]:
    """Return (key or index, space) of each part of a Dict or Tuple."""
    if isinstance(space, gymnasium.spaces.Tuple):
        return list(enumerate(space.spaces))
    for key in space.spaces:
        if not isinstance(key, str) or not key:
            raise UnsupportedSpaceError(
                f"The {role} space has the key {key!r}: expected a string that is not empty.\n"
                "Give this part another key."
            )
    return list(space.spaces.items())


def _zeros(space: Any) -> Any:
    """Return an element of a nested space, of zeros."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _zeros(part) for key, part in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_zeros(part) for part in space)
    return np.zeros(space.shape or ())


_NO_NUMBERS = "a policy takes numbers of a fixed shape"
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""torch computes little with these: the dtype in which they are stored."""


def _why_not(space: Any) -> str:
    """Return why an observation, which is no Dict or Tuple, is not supported; "" if it is."""
    if isinstance(space, gymnasium.spaces.Box):
        if not np.prod(space.shape):
            return "it holds no number"
        is_too_wide = space.dtype == np.uint64 and bool((space.high >= 2**63).any())
        return "torch has no integers above 2**63 - 1" if is_too_wide else ""
    is_supported = isinstance(space, gymnasium.spaces.MultiBinary) or _choices(space) is not None
    return "" if is_supported else _NO_NUMBERS


def _leaf(role: str, space: Any, notes: list[str]) -> Space:
    if reason := _why_not(space):
        raise _unsupported(role, space, reason)
    if isinstance(space, gymnasium.spaces.Box):
        # Floats are stored as float32; integers as they are, or wider.
        given = str(space.dtype)
        is_float = np.issubdtype(space.dtype, np.floating)
        dtype = "float32" if is_float else _WIDER.get(given, given)
        if given in ("float64", *_WIDER):
            notes.append(f"the {role} is {given}, and stored as {dtype}")
        if is_float and len(space.shape) == _IMAGE_AXES:
            size = int(np.prod(space.shape))
            notes.append(
                f"the {role}, of shape {space.shape}, is taken as {size:,} numbers, and not as an "
                "image: images are uint8"
            )
        return Space("box", space.shape, dtype)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return Space("multi_binary", space.shape, "int8")
    choices = _choices(space)
    assert choices is not None, space
    return choices


_IMAGE_AXES = 3  # rows, columns and channels
_MOST_CHOICES = 1000  # of a whole number of a Box
_MOST_EXACT = 2**24  # float32 holds no larger integers exactly


def read_action(space: Any, name: str = "action") -> Space:
    """Describe a space of actions. Raises UnsupportedSpaceError, naming the space and its key."""
    if isinstance(space, _NESTED):
        return _product(space, name)
    if isinstance(space, gymnasium.spaces.Box) and not np.prod(space.shape):
        raise _unsupported(name, space, "it holds no number")
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return Space("box", space.shape, str(space.dtype), low, high)
    if isinstance(space, gymnasium.spaces.Box):
        start, last = ([int(x) for x in bound.ravel()] for bound in (space.low, space.high))
        nvec = tuple(end - first + 1 for first, end in zip(start, last, strict=True))
        if max(nvec, default=0) > _MOST_CHOICES:
            reason = f"each whole number is a choice, and {max(nvec)} are more than {_MOST_CHOICES}"
            raise _unsupported(name, space, reason)
        return Space("multi_discrete", space.shape, str(space.dtype), nvec=nvec, start=tuple(start))
    if isinstance(space, gymnasium.spaces.MultiBinary):
        nvec = (2,) * int(np.prod(space.shape))
        return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=(0,) * len(nvec))
    if choices := _choices(space):
        return choices
    raise _unsupported(name, space, "a policy gives numbers of a fixed shape")


def _product(space: Any, name: str) -> Space:
    """Read a Dict or Tuple of actions."""
    of = [(str(key), read_action(part, f"action {key!r}")) for key, part in _inner(space, "action")]
    nvec = tuple(itertools.chain.from_iterable(part.nvec for _, part in of))
    start = tuple(itertools.chain.from_iterable(part.start for _, part in of))
    if max(nvec, default=0) > _MOST_EXACT:
        raise _unsupported(name, space, f"{max(nvec)} choices are more than {_MOST_EXACT}")
    if not of:
        raise _unsupported(name, space, "it has no parts")
    kind = "dict" if isinstance(space, gymnasium.spaces.Dict) else "tuple"
    size = sum(part.size for _, part in of)
    return Space(kind, (size,), "float64", nvec=nvec, start=start, parts=tuple(of))  # type: ignore[arg-type]


def _choices(space: Any) -> Space | None:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Space("discrete", (), "int64", nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        nvec, start = (tuple(map(int, of.ravel())) for of in (space.nvec, space.start))
        return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=start)
    return None


def _unsupported(role: str, space: Any, reason: str) -> UnsupportedSpaceError:
    """Describe in one line what cannot be used, and in another one what to do."""
    if role.startswith("action"):
        remedy = (
            "gymnasium.wrappers.TransformAction can offer another space, in a function of yours "
            "(--wrapper module:function)"
        )
    elif _flattens(space):
        remedy = (
            "gymnasium.wrappers.FlattenObservation makes numbers of it: "
            "--wrapper gymnasium.wrappers:FlattenObservation"
        )
    else:
        remedy = (
            "gymnasium.wrappers.TransformObservation can make numbers of it, in a function of "
            "yours (--wrapper module:function)"
        )
    kind, _, key = role.partition(" ")
    name = f"{kind} space {key}".rstrip()
    return UnsupportedSpaceError(f"The {name} cannot be used: {space} ({reason}).\n{remedy}.")


def _flattens(space: Any) -> bool:
    """Return whether Gymnasium can make one array of it, of numbers that a policy takes."""
    try:
        flat = gymnasium.spaces.flatten_space(space)
        return isinstance(flat, gymnasium.spaces.Box) and not _why_not(flat)
    except (NotImplementedError, ValueError):  # of a custom space; of no parts
        return False
