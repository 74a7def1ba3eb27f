"""Changes of all environments during a run: calls of their methods, new values of attributes.

`on_update` returns them. Left out: which fragment they come before (`collectors/`), and the
environments that have them (`gym/python_vector.py`).
"""

import copy
import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headrace.configclass import PLAIN_DATA, is_plain
from headrace.errors import ConfigError, EnvChangeError, did_you_mean
from headrace.spec import Array, EnvSpec

BEFORE_RESET, UNKNOWN = -1, -2
_MOST_BYTES = 1 << 18  # the manifest of a checkpoint has room for them, and each order too


class EnvChange(NamedTuple):
    """A call of a method in all environments, or a new value of an attribute, as plain data.

    Attributes:
        arguments: of the call: a list, and a dict of keywords; None: `name` is an attribute.
        number: of the change in its run, from 1; 0: it is not recorded.
    """

    name: str
    arguments: list[Any] | None = None
    value: Any = None
    number: int = 0

    @property
    def key(self) -> tuple[str, bool]:
        """The method or attribute: of these, the last change is kept."""
        return self.name, self.arguments is None

    def describe(self) -> str:
        """Return the change as it would be written for one environment."""
        if self.arguments is None:
            return f"{self.name} = {self.value!r}"
        args, keywords = self.arguments
        words = [*map(repr, args), *(f"{name}={value!r}" for name, value in keywords.items())]
        return f"{self.name}({', '.join(words)})"


Changes = tuple[EnvChange, ...]
"""The recorded changes of a run, by number: the last of each method and attribute."""


def call_envs(name: str, /, *args: Any, **keywords: Any) -> list[EnvChange]:
    """Call a method of every environment; for `on_update` to return.

    Of each method, the last call is kept, and repeated in an environment that is made later. So
    the arguments must say all: `set_difficulty(3)`, not `add_difficulty(1)`.

    Raises:
        ConfigError: an argument is not plain data.
    """
    _check_plain("call_envs", name, [list(args), keywords])
    return [EnvChange(name, _as_saved([args, keywords]))]


def set_envs(**attributes: Any) -> list[EnvChange]:
    """Set attributes of every environment, which they must have; for `on_update` to return.

    Raises:
        ConfigError: a value is not plain data.
    """
    for name, value in attributes.items():
        _check_plain("set_envs", name, value)
    return [EnvChange(name, None, _as_saved(value)) for name, value in attributes.items()]


def _check_plain(function: str, name: str, value: Any) -> None:
    if not is_plain(value):
        raise ConfigError(f"{function}: {name}: {value!r}: expected {PLAIN_DATA}.")


def _as_saved(value: Any) -> Any:
    """Return a copy as a resumed run reads it: a float of NumPy's is a float."""
    return json.loads(json.dumps(value))


def as_changes(returned: Any) -> list[EnvChange]:
    """Return the changes that `on_update` returned; ConfigError if it is anything else."""
    changes = [] if returned is None else returned
    if not isinstance(changes, list) or not all(isinstance(c, EnvChange) for c in changes):
        raise ConfigError(
            f"on_update returned {returned!r}: expected None, headrace.call_envs(...), "
            "headrace.set_envs(...), or a sum of these."
        )
    return changes


def refuse_changes(changes: list[EnvChange], spec: EnvSpec, *, native: bool) -> None:
    """Raise ConfigError if there are changes, and environments that cannot have any."""
    if not changes:
        return
    refused = f"on_update returned {changes[0].describe()}, but {spec.id}"
    if spec.interface == "tensor":
        raise ConfigError(
            f"{refused} is not changed by Headrace: it steps tensors, many at a time.\nIt is made "
            "in the process that calls on_update: keep a reference to it in the callable that "
            "makes it."
        )
    if native:
        raise ConfigError(
            f"{refused} is stepped many at a time, in a vector form of its own, which has no "
            "single environments.\nUse --vectorization python."
        )


def record(before: Changes, new: Iterable[EnvChange]) -> Changes:
    """Return the recorded changes with new ones; ConfigError if they are too large."""
    number = before[-1].number if before else 0
    added = [change._replace(number=number + k) for k, change in enumerate(new, 1)]
    changes = tuple(_last_of_each([*before, *added]))
    if (size := len(json.dumps(changes))) > _MOST_BYTES:
        raise ConfigError(
            f"on_update returned {added[-1].name}, with which the changes of environments are "
            f"{size:,} bytes; expected at most {_MOST_BYTES:,}, since checkpoints hold them.\n"
            "Have environments read large data from a file, and give its name."
        )
    return changes


def _last_of_each(changes: Iterable[EnvChange]) -> list[EnvChange]:
    last: dict[tuple[str, bool], EnvChange] = {}
    for change in changes:
        last.pop(change.key, None)  # it comes after those that were made in between
        last[change.key] = change
    return list(last.values())


class AppliedChanges:
    """The changes that one environment has, and where they came in its episode.

    A step is the number of env steps of the episode before the change; `BEFORE_RESET`: the episode
    began with it; `UNKNOWN`: the episode is too long to be replayed.

    Args:
        saved: what `to_array` returned; None: no changes.
    """

    def __init__(self, saved: Array | None = None) -> None:
        rows = [] if saved is None else json.loads(saved.tobytes())
        self._rows = [(int(step), EnvChange(*change)) for step, change in rows]

    def missing(self, changes: Changes) -> list[EnvChange]:
        """Return those that the environment does not have."""
        newest = self._rows[-1][1].number if self._rows else 0
        return [change for change in changes if change.number > newest]

    def add(self, change: EnvChange, step: int) -> None:
        """Add a newer change. If its step is `UNKNOWN`, all are from then on."""
        self._rows.append((step, change))
        if step == UNKNOWN:
            self._keep_last(UNKNOWN)

    def begin_episode(self) -> None:
        """Note that an episode begins, after all of them."""
        if self._rows:
            self._keep_last(BEFORE_RESET)

    def all(self) -> list[EnvChange]:
        """Return the last of each method and attribute, in order."""
        return _last_of_each(change for _, change in self._rows)

    def by_step(self) -> dict[int, list[EnvChange]]:
        """Return the changes by step."""
        by_step: dict[int, list[EnvChange]] = {}
        for step, change in self._rows:
            by_step.setdefault(step, []).append(change)
        return by_step

    def to_array(self) -> Array | None:
        """Return them as bytes of JSON, uint8; None: there are none."""
        if not self._rows:
            return None
        return np.frombuffer(json.dumps(self._rows).encode(), np.uint8).copy()

    def _keep_last(self, step: int) -> None:
        self._rows = [(step, change) for change in self.all()]


def prepare(env: Any, change: EnvChange, position: str) -> Callable[[], object]:
    """Return what changes the environment, or the outermost of its wrappers that has the name.

    Args:
        position: of the environment, for messages.

    Raises:
        EnvChangeError: none of them has the name.
    """
    layers = _layers(env)
    # Asked of class and instance: some wrappers forward attributes that are not their own.
    owner = next((layer for layer in layers if _has_own(layer, change.name)), None)
    if owner is None:
        classes = ", ".join(type(layer).__name__ for layer in layers)
        kind = "attribute" if change.arguments is None else "method"
        known = {name for layer in layers for name in dir(layer) if not name.startswith("_")}
        raise EnvChangeError(
            f"on_update returned {change.describe()}, but there is no {kind} {change.name!r} in "
            f"{classes} ({position}).{did_you_mean(change.name, sorted(known))}"
        )
    if change.arguments is None:
        return partial(setattr, owner, change.name, copy.deepcopy(change.value))
    args, keywords = copy.deepcopy(change.arguments)
    return partial(getattr(owner, change.name), *args, **keywords)


def _layers(env: Any) -> list[Any]:
    """Return the wrappers, the outermost first, and the environment."""
    layers: list[Any] = []
    while env is not None and all(env is not layer for layer in layers):
        layers.append(env)
        env = getattr(env, "env", None)
    return layers


def _has_own(layer: Any, name: str) -> bool:
    return hasattr(type(layer), name) or name in getattr(layer, "__dict__", {})
