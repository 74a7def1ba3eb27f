"""Description of an environment as plain data: spaces and their encodings.

A spec is free of torch and gymnasium, travels as JSON inside checkpoints, and is all that a policy
is built from. `envs/spaces/specs.py` makes one from Gymnasium's spaces.
"""

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_UNBOUNDED = 1e30

Interface = Literal["gym", "kernel", "tensor", "parallel", "turns"]
"""Gymnasium's environments, kernel environments, vectors that step tensors, and games in
PettingZoo's parallel form and in its AEC form, in which agents take turns."""
GAMES: tuple[Interface, ...] = ("parallel", "turns")


KeyPath = tuple[str | int, ...]
"""The way to a part of a nested element: keys of Dicts, and indices of Tuples."""


@dataclass(frozen=True)
class Space:
    """A Box, Discrete, MultiDiscrete or MultiBinary space, or a Dict or Tuple of those.

    An observation is stored as a flat `dict` of all its parts. Their keys are their paths joined by
    a dot, such as `hand.0`, and `paths` has the way to each. A Dict or Tuple of actions is nested
    as the environment's own. It is stored as one row of numbers: `shape` is that of the row, `nvec`
    and `start` are those of its choices.
    """

    kind: Literal["box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple"]
    shape: tuple[int, ...] = ()  # of one element; () for `discrete` and observations of parts
    dtype: str = ""  # NumPy's name of the dtype in which one element is *stored*
    low: tuple[float, ...] = ()  # bounds per element, flattened (`box` of actions); else empty
    high: tuple[float, ...] = ()
    nvec: tuple[int, ...] = ()  # choices per component (`discrete`: one entry); else empty
    start: tuple[int, ...] = ()  # first value per component, as `nvec`
    parts: tuple[tuple[str, "Space"], ...] = ()  # (key, space) of a dict or tuple, as stored
    paths: tuple[KeyPath, ...] = ()  # of each part of a nested observation; (): its key is its path

    @property
    def size(self) -> int:
        """Number of scalars in one element."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def flat_size(self) -> int:
        """Number of floats that a network gets of one element: choices are one-hot."""
        return sum(self.nvec) if self.nvec else self.size

    def to_json(self) -> dict[str, Any]:
        """Return plain data. Infinite bounds become strings, for JSON."""
        data = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(self).items()}
        data["paths"] = [list(path) for path in self.paths]
        for bound in ("low", "high"):
            data[bound] = [str(x) if np.isinf(x) else x for x in data[bound]]
        return data | {"parts": [[key, part.to_json()] for key, part in self.parts]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Space":
        """Rebuild from `to_json`."""
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        for bound in ("low", "high"):
            fields[bound] = tuple(float(x) for x in data[bound])
        parts = tuple((key, cls.from_json(part)) for key, part in data["parts"])
        paths = tuple(tuple(path) for path in data.get("paths", ()))
        return cls(**fields | {"parts": parts, "paths": paths})

    @property
    def leaves(self) -> tuple[tuple[str, "Space"], ...]:
        """(key, space) of each part of an observation; without parts only ("", the space)."""
        return self.parts if self.kind == "dict" else (("", self),)

    @property
    def key_paths(self) -> tuple[KeyPath, ...]:
        """The path of each of `leaves` in the environment's observation; () is all of it."""
        return self.paths or tuple((key,) if key != PLAIN else () for key, _ in self.leaves)

    def describe(self) -> str:
        """Return a short name for messages, such as `Box(4,) float32` or `Discrete(2)`."""
        if self.kind in ("dict", "tuple"):
            of_tuple = self.kind == "tuple" or any(isinstance(path[0], int) for path in self.paths)
            inner = ", ".join(
                f"{key}: {part.describe()}" if key else part.describe() for key, part in self.parts
            )
            return f"{'Tuple' if of_tuple else 'Dict'}({inner})"
        if self.kind in ("box", "multi_binary"):
            name = "Box" if self.kind == "box" else "MultiBinary"
            return f"{name}{self.shape} {self.dtype}"
        choices = ", ".join(map(str, self.nvec))
        return f"Discrete({choices})" if self.kind == "discrete" else f"MultiDiscrete([{choices}])"


def getter(path: KeyPath) -> Callable[[Any], Any]:
    """Return the function that takes the part at `path` out of an element."""
    if len(path) == 1:
        return operator.itemgetter(path[0])

    def get(element: Any) -> Any:
        for key in path:
            element = element[key]
        return element

    return get


def nested(space: Space, obs: Any) -> Any:
    """Return an observation of parts as its environment nests them: `obs["hand"][0]`.

    A Tuple becomes a dict of its indices, since parts of it may have been left out. An observation
    that is not nested is returned as it is.
    """
    if not space.paths:
        return obs
    tree: dict[Any, Any] = {}
    for (key, _), path in zip(space.parts, space.paths, strict=True):
        inner = tree
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = obs[key]
    return tree


class Agents(NamedTuple):
    """Agents `first .. first + size - 1` of an environment."""

    first: int
    size: int

    def ids(self, env_id: Array, num_agents: int) -> Array:
        """Return each agent's index among all agents of a run, `[n * size]`, env after env."""
        ids: Array = env_id[:, None] * num_agents + np.arange(self.first, self.first + self.size)
        return ids.ravel()


PLAIN = ""
"""The key of an observation that is no Dict, where something is stored beside it, such as a mask
from `info`."""


class AgentSpaces(NamedTuple):
    """What one agent observes and takes; see `EnvSpec`."""

    observation: Space
    action: Space
    mask_key: str = ""
    mask_in_info: bool = False


@dataclass(frozen=True)
class EnvSpec:
    """Description of an environment for the policy.

    With several agents, observations and actions are those of one agent: of the first one, where
    they differ.
    """

    id: str
    # As it is stored. What is added to the environment's own observation, such as a mask that
    # `info` has, is stored as one more key of it (beside `PLAIN`, if it was no Dict).
    observation: Space
    action: Space
    mask_key: str = ""  # of the observation, for the actions that are allowed; "": there is none
    mask_in_info: bool = False
    roles: tuple[tuple[str, int], ...] = ()  # (role, its agents), by their ids; (): one agent
    agent_spaces: tuple[AgentSpaces, ...] = ()  # of each agent, where they differ
    state_key: str = ""  # of the state of the whole game, which only critics see; "": there is none
    id_key: str = ""  # of the agent's index among all; "": there is none
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was changed to fit, for people
    interface: Interface = field(default="gym", compare=False)
    # Where the first axis of observations is a stack of the newest frames: how many. It saves
    # memory where frames are stored, and nothing else depends on it.
    num_frames: int = field(default=0, compare=False)

    @property
    def added_keys(self) -> tuple[str, ...]:
        """Keys of `observation` that the environment's own observation does not have."""
        mask_key = self.mask_key if self.mask_in_info else ""
        return tuple(key for key in (mask_key, self.state_key, self.id_key) if key)

    @property
    def num_agents(self) -> int:
        """Number of agents in one environment."""
        return sum(size for _, size in self.roles) if self.roles else 1

    def for_agents(self, agents: Agents) -> "EnvSpec":
        """Return the spec for the policy of these agents, whose spaces are all the same."""
        if not self.agent_spaces:
            return self
        return replace(self, **self.agent_spaces[agents.first]._asdict(), agent_spaces=())

    @property
    def seen(self) -> Space:
        """The observation without mask and state: the input of a network that acts."""
        return self._without(self.mask_key, self.state_key)

    @property
    def seen_by_critic(self) -> Space:
        """The observation without the mask."""
        return self._without(self.mask_key)

    @property
    def given(self) -> Space:
        """The environment's own observation."""
        return self._without(*self.added_keys)

    def _without(self, *keys: str) -> Space:
        """Return the observation without the parts of these keys; "" is the key of none."""
        whole, left_out = self.observation, set(keys) - {""}
        if not left_out:
            return whole
        kept = [i for i, (key, _) in enumerate(whole.parts) if key not in left_out]
        parts = tuple(whole.parts[i] for i in kept)
        if [key for key, _ in parts] == [PLAIN]:
            return parts[0][1]
        return replace(whole, parts=parts, paths=tuple(whole.paths[i] for i in kept if whole.paths))

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "id": self.id,
            "observation": self.observation.to_json(),
            "action": self.action.to_json(),
            "mask_key": self.mask_key,
            "mask_in_info": self.mask_in_info,
            "roles": [[role, size] for role, size in self.roles],
            "of_each": [
                [of.observation.to_json(), of.action.to_json(), of.mask_key, of.mask_in_info]
                for of in self.agent_spaces
            ],
            "state_key": self.state_key,
            "id_key": self.id_key,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "EnvSpec":
        """Rebuild from `to_json`."""
        return cls(
            data["id"],
            Space.from_json(data["observation"]),
            Space.from_json(data["action"]),
            data["mask_key"],
            data["mask_in_info"],
            tuple((role, size) for role, size in data.get("roles", ())),
            tuple(
                AgentSpaces(Space.from_json(observation), Space.from_json(action), *mask)
                for observation, action, *mask in data.get("of_each", ())  # once without a mask
            ),
            data.get("state_key", ""),
            data.get("id_key", ""),
        )


class ActionCodec:
    """Turns what a policy emits into what an environment expects.

    A policy's action is zero-based integers, or for a Box the flat sample of a Gaussian. The sample
    is scaled so that [-1, 1] becomes the space's bounds, where both are finite, and then clipped to
    the bounds that exist. The action of a Dict or Tuple is a row of those of its parts. In such a
    row choices are floats: float32 holds integers up to 2**24 exactly, and no space has more
    choices (`envs/spaces/gym_spaces.py`).

    Attributes:
        scale, shift, low, high: per component: `clip(action * scale + shift, low, high)`; not of a
            Dict or Tuple.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self._parts = [(key, ActionCodec(part)) for key, part in space.parts]
        if self._parts:
            ends = itertools.accumulate((codec.space.size for _, codec in self._parts), initial=0)
            self._columns = [slice(*pair) for pair in itertools.pairwise(ends)]
        elif space.kind == "box":
            self.low = np.array(space.low, dtype=space.dtype)
            self.high = np.array(space.high, dtype=space.dtype)
            # The largest floats are often written for "no bound"
            bounded = (np.abs(self.low) < _UNBOUNDED) & (np.abs(self.high) < _UNBOUNDED)
            low, high = np.where(bounded, self.low, -1), np.where(bounded, self.high, 1)
            self.scale, self.shift = (high - low) / 2, (high + low) / 2
        else:
            self.low = self.shift = np.array(space.start, dtype=np.int64)
            self.high = self.low + np.array(space.nvec, dtype=np.int64) - 1
            self.scale = np.ones_like(self.shift)
            self._start = self.shift.reshape(space.shape)

    @property
    def is_bounded(self) -> bool:
        """Whether the space is a Box with finite bounds of all components."""
        if self.space.kind != "box":
            return False
        return bool((np.abs([self.low, self.high]) < _UNBOUNDED).all())

    def to_env(self, action: Array) -> Array:
        """Map `[n]`, `[n, components]` or (box) `[n, size]` policy actions to the environment's.

        Those of a Dict or Tuple are `[n, size]` before and after: `elements` has their structure.
        """
        space = self.space
        if self._parts:
            values = [
                codec.to_env(action[:, columns]).reshape(len(action), -1)
                for (_, codec), columns in zip(self._parts, self._columns, strict=True)
            ]
            return np.concatenate(values, -1, dtype=space.dtype)
        if space.kind == "box":
            scaled = action.astype(space.dtype, copy=False) * self.scale + self.shift
            # Last, in the space's own dtype: rounding must not leave the bounds.
            clipped = np.clip(scaled, self.low, self.high)
            return clipped.reshape(-1, *space.shape)
        choices = action.reshape(-1, *space.shape) + self._start
        return choices.astype(space.dtype, copy=False)

    def from_env(self, elements: Any) -> Array:
        """Undo `to_env`, for elements `[n, ...]` as Gymnasium's vectors take them."""
        if self._parts:
            keys = [key for key, _ in self.space.parts]
            of_parts = [elements[key] for key in keys] if hasattr(elements, "keys") else elements
            codecs = [codec for _, codec in self._parts]
            rows = [codec.from_env(part) for codec, part in zip(codecs, of_parts, strict=True)]
            flat_rows = [row.reshape(len(row), -1) for row in rows]
            return np.concatenate(flat_rows, -1, dtype=np.float32)
        values = np.asarray(elements)
        flat = values.reshape(len(values), -1)
        if self.space.kind == "box":
            scale = np.where(self.scale > 0, self.scale, 1)  # 0: the bounds are one number
            return ((flat - self.shift) / scale).astype(np.float32)
        rows_of_choices: Array = flat.astype(np.int64) - self.shift.reshape(-1)
        return rows_of_choices[:, 0] if self.space.kind == "discrete" else rows_of_choices

    def batched(self, values: Array) -> Any:
        """Return `to_env`'s values as Gymnasium's vectors take them: arrays `[n, ...]` of parts."""
        if not self._parts:
            return values.astype(self.space.dtype, copy=False).reshape(-1, *self.space.shape)
        rows = values.reshape(-1, self.space.size)
        parts = {
            key: codec.batched(rows[:, columns])
            for (key, codec), columns in zip(self._parts, self._columns, strict=True)
        }
        return parts if self.space.kind == "dict" else tuple(parts.values())

    def elements(self, values: Array) -> Any:
        """Return `to_env`'s values as a sequence of n elements, as environments take them."""
        if not self._parts:
            return values
        batch = self.batched(values)
        return [element(batch, i) for i in range(len(values.reshape(-1, self.space.size)))]


def element(batch: Any, i: int) -> Any:
    """Return element i of a batch of Gymnasium's: a Dict's or Tuple's is one of arrays `[n, ...]`.

    What has no array (text) is returned as it is.
    """
    if isinstance(batch, Mapping):
        return {key: element(part, i) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(element(part, i) for part in batch)
    return batch[i] if hasattr(batch, "__array__") or isinstance(batch, list) else batch
