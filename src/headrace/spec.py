"""What an environment looks like from outside, as plain data: spaces and their encodings.

A spec is free of torch and gymnasium, travels as JSON inside checkpoints, and is all that a policy
is built from. `envs/make.py` makes one from Gymnasium's spaces.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_UNBOUNDED = 1e30


@dataclass(frozen=True)
class Space:
    """A Box, Discrete or MultiDiscrete space.

    Attributes:
        kind: `box` (float or integer array within bounds), `discrete` (one integer), or
            `multi_discrete` (a vector of integers).
        shape: shape of one element; `()` for `discrete`.
        dtype: NumPy's name of the dtype in which one element is *stored*.
        low, high: bounds per element, flattened (`box`); else empty.
        nvec: number of choices per component (`discrete`: one entry); empty for `box`.
        start: first value per component, as `nvec`.
    """

    kind: Literal["box", "discrete", "multi_discrete"]
    shape: tuple[int, ...]
    dtype: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    nvec: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of scalars in one element."""
        return int(np.prod(self.shape, dtype=np.int64))

    def to_json(self) -> dict[str, Any]:
        """Plain data; the inverse of `from_json`. Infinite bounds become strings, for JSON."""
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "low": [str(x) if np.isinf(x) else x for x in self.low],
            "high": [str(x) if np.isinf(x) else x for x in self.high],
            "nvec": list(self.nvec),
            "start": list(self.start),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Space":
        """Rebuild from `to_json`."""
        return cls(
            kind=data["kind"],
            shape=tuple(data["shape"]),
            dtype=data["dtype"],
            low=tuple(float(x) for x in data["low"]),
            high=tuple(float(x) for x in data["high"]),
            nvec=tuple(data["nvec"]),
            start=tuple(data["start"]),
        )

    def describe(self) -> str:
        """A short name for messages, such as `Box(4,) float32` or `Discrete(2)`."""
        if self.kind == "box":
            return f"Box{self.shape} {self.dtype}"
        choices = ", ".join(map(str, self.nvec))
        return f"Discrete({choices})" if self.kind == "discrete" else f"MultiDiscrete([{choices}])"


@dataclass(frozen=True)
class EnvSpec:
    """What a policy needs to know of an environment.

    Attributes:
        id: the environment's name, for people and for messages.
        observation: the space of one observation.
        action: the space of one action.
    """

    id: str
    observation: Space
    action: Space

    def to_json(self) -> dict[str, Any]:
        """Plain data; the inverse of `from_json`."""
        return {
            "id": self.id,
            "observation": self.observation.to_json(),
            "action": self.action.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "EnvSpec":
        """Rebuild from `to_json`."""
        return cls(
            id=data["id"],
            observation=Space.from_json(data["observation"]),
            action=Space.from_json(data["action"]),
        )


class ActionCodec:
    """From what a policy emits to what an environment expects.

    A policy's action is zero-based integers, or for a Box the flat sample of a Gaussian: it is
    stretched so that [-1, 1] becomes the space's bounds, where both are finite, and then clipped to
    the bounds that there are.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        if space.kind == "box":
            self._low = np.array(space.low, dtype=space.dtype)
            self._high = np.array(space.high, dtype=space.dtype)
            # The largest floats are often written for "no bound"
            bounded = (np.abs(self._low) < _UNBOUNDED) & (np.abs(self._high) < _UNBOUNDED)
            low, high = np.where(bounded, self._low, -1), np.where(bounded, self._high, 1)
            self._scale, self._shift = (high - low) / 2, (high + low) / 2
        else:
            self._start = np.array(space.start, dtype=np.int64)

    def to_env(self, action: Array) -> Array:
        """Map a batch of policy actions to environment actions.

        Args:
            action: `[n]` (discrete), `[n, components]` (multi_discrete) or `[n, size]` (box).

        Returns:
            `[n, *space.shape]`, ready to be handed row by row to `env.step`.
        """
        if self.space.kind == "box":
            scaled = action.astype(self.space.dtype, copy=False) * self._scale + self._shift
            # Last, in the space's own dtype: rounding must not leave the bounds.
            clipped = np.clip(scaled, self._low, self._high)
            return clipped.reshape(-1, *self.space.shape)
        return action + (self._start[0] if self.space.kind == "discrete" else self._start)
