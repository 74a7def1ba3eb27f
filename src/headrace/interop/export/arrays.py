"""The arrays that an exported policy takes and gives: their names, dtypes and shapes.

Left out: how outputs are computed from inputs (`module.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.spec import PLAIN, EnvSpec, KeyPath, Space

OBS, MASK, AGENT, STATE, NOISE = "obs", "action_mask", "agent", "state", "noise"
ACTION, PARAMS, VALUE, NEXT_STATE = "action", "params", "value", "next_state"


class ArrayInfo(NamedTuple):
    """One input or output, `[batch, *shape]`.

    Attributes:
        dtype: as NumPy names it.
        meaning: for people.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    meaning: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self._asdict(), "shape": ["batch", *self.shape]}


def observed_arrays(spec: EnvSpec) -> Iterator[tuple[str, ArrayInfo]]:
    """Yield the key of each stored part of an observation, and the input that it comes from.

    The state of a game is left out: no action depends on it.
    """
    whole = spec.observation
    for (key, space), path in zip(whole.leaves, whole.key_paths, strict=True):
        name, meaning = f"{OBS}.{key}", f"the part {_at(path)} of the environment's observation"
        if key == PLAIN:
            name, meaning = OBS, "the environment's observation"
        elif key == spec.state_key:
            continue
        elif key == spec.mask_key:
            name, where = MASK, "info" if spec.mask_in_info else "the observation"
            meaning = f"which choices are allowed, not 0: {where}{_at(path)}"
        elif key == spec.id_key:
            name, meaning = AGENT, "the agent's index among all agents of the game"
        yield key, ArrayInfo(name, space.dtype, space.shape, f"{meaning}, {space.describe()}")


def state_array(name: str, size: int, when: str) -> ArrayInfo:
    """Return the recurrent state as an input or an output."""
    return ArrayInfo(name, "float32", (size,), f"the recurrent state {when}")


def noise_array(num_draws: int) -> ArrayInfo:
    """Return the input of random numbers."""
    meaning = "uniform random numbers in (0, 1), from which the action is drawn"
    return ArrayInfo(NOISE, "float32", (num_draws,), meaning)


class ActionPart(NamedTuple):
    """A part of an action that is an array of its own.

    Attributes:
        columns: of it, in the row of numbers that a Dict or Tuple is stored as.
    """

    name: str
    path: KeyPath
    space: Space
    columns: slice

    @property
    def array(self) -> ArrayInfo:
        """The part as an output."""
        what = f"the part {_at(self.path)} of the action" if self.path else "the action"
        meaning = f"{what}, as the environment takes it, {self.space.describe()}"
        return ArrayInfo(self.name, self.space.dtype, self.space.shape, meaning)


def action_parts(space: Space, path: KeyPath = (), first: int = 0) -> list[ActionPart]:
    """Return the arrays of an action: one, or one for each leaf of a Dict or Tuple."""
    if not space.parts:
        name = ".".join([ACTION, *map(str, path)])
        return [ActionPart(name, path, space, slice(first, first + space.size))]
    found = list[ActionPart]()
    for i, (key, part) in enumerate(space.parts):
        found += action_parts(part, (*path, key if space.kind == "dict" else i), first)
        first += part.size
    return found


def _at(path: KeyPath) -> str:
    return "".join(f"[{step!r}]" for step in path)
