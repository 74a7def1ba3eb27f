"""The decorator of every class of settings: frozen, keyword-only, checked when it is made.

Left out: where values come from (`config/resolve.py`).
"""

import functools
import json
import math
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from headrace.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Bounds(ABC):
    """What values a field takes, besides its type; its text says what is expected."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def contain(self, value: Any) -> bool:
        """Return whether a value of the field's type is allowed."""


@dataclass(frozen=True)
class Between(Bounds):
    """The finite bounds of a number, or of each number in a tuple; both are allowed as well."""

    least: float
    most: float = math.inf
    minus_one: str = ""  # what -1 means, where it is allowed besides
    auto: int | None = None  # the number that stands for the word "auto", where it is allowed

    def __str__(self) -> str:
        upper = "" if self.most == math.inf else f" and at most {self.most}"
        besides = f" (or -1: {self.minus_one})" if self.minus_one else ""
        besides += "" if self.auto is None else ", or auto"
        return f"at least {self.least}{upper}{besides}"

    def contain(self, value: Any) -> bool:
        """Return whether the number, or each number of the tuple, is within."""
        return all(
            (self.least <= number <= self.most and math.isfinite(number))
            or (number == -1 and bool(self.minus_one))
            or number == self.auto
            for number in (value if isinstance(value, tuple) else (value,))
        )


@dataclass(frozen=True)
class Expected:
    """Error text for a field whose type does not say what is expected."""

    words: str


PLAIN_DATA = (
    "numbers, words, lists and dicts of them, as config.json can hold them (a tuple would come "
    "back as a list)"
)
"""The error text for a value that does not survive a round trip through JSON."""

PEER_NAMES = {
    "batch_size": "minibatch_size",
    "action_noise": "exploration_noise",
    "buffer_size": "replay_size",
    "clip_range": "clip_coef",
    "end_e": "exploration_final_eps",
    "learning_rate": "lr",
    "n_envs": "num_envs",
    "n_epochs": "num_epochs",
    "n_critics": "num_critics",
    "n_steps": "num_steps",
    "noise_clip": "target_noise_clip",
    "policy_frequency": "policy_delay",
    "policy_kwargs": "hidden_sizes",
    "start_e": "exploration_initial_eps",
    "target_network_frequency": "target_update_interval",
    "target_noise_std": "target_noise",
    "target_policy_noise": "target_noise",
    "timesteps": "total_env_steps",
    "total_timesteps": "total_env_steps",
}
"""Names in Stable-Baselines3 and CleanRL, for hints. An algorithm of one's own may have them."""
PositiveInt = Annotated[int, Between(1)]
NonNegativeInt = Annotated[int, Between(0)]
PositiveInts = Annotated[tuple[int, ...], Between(1)]
NonNegative = Annotated[float, Between(0)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that checks types and bounds of its fields.

    It remembers which fields its caller named: a preset fills only the others. A named value may
    equal the default, so comparing values could not tell the two apart.
    """
    data_cls: Any = dataclass(frozen=True, kw_only=True)(cls)
    plain_init = data_cls.__init__

    @functools.wraps(plain_init)
    def init(self: Any, **explicit: Any) -> None:
        plain_init(self, **check_values(data_cls, explicit))
        object.__setattr__(self, "_explicit", frozenset(explicit))

    data_cls.__init__ = init
    return data_cls  # type: ignore[no-any-return]


def explicit_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a `configclass` instance that its caller named, with their values."""
    return {name: getattr(instance, name) for name in sorted(instance._explicit)}


def check_values(cls: Any, values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return values as the fields of a `configclass` have them, a list as a tuple for example.

    Args:
        source: where the values come from, for the error message; default: the class.

    Raises:
        ConfigError: there is no such field, or a value does not fit its type or bounds.
    """
    checked, hints = {}, _hints(cls)
    for name, value in values.items():
        if name not in hints:
            near = did_you_mean(PEER_NAMES.get(name, name), list(hints))
            raise ConfigError(f"{cls.__name__} has no setting {name!r}.{near}")
        hint: Any = hints[name]
        metadata: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, metadata = hint.__origin__, hint.__metadata__
        is_union = get_origin(hint) in (Union, UnionType)  # of a Literal it is the former
        kinds = get_args(hint) if is_union else (hint,)
        if value == "auto":
            autos = (item.auto for item in metadata if isinstance(item, Between))
            value = next((auto for auto in autos if auto is not None), value)
        fitting, expected = _convert(kinds, value), _describe(kinds)
        fits = fitting is not None or (value is None and NoneType in kinds)
        for item in metadata:
            if isinstance(item, Expected):
                expected = item.words
            if isinstance(item, Bounds) and fits and not item.contain(fitting):
                fits, expected = False, str(item)
        if not fits:
            # Users see the names of PPO and Network, not those of groups of a run's settings.
            place = source or ("" if cls.__name__.endswith("Config") else cls.__name__)
            where = f" ({place})" if place else ""
            raise ConfigError(f"{name}={value!r}{where}: expected {expected}.")
        checked[name] = fitting
    return checked


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__dataclass_fields__}


def _describe(kinds: tuple[Any, ...]) -> str:
    return " or ".join(
        " | ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal
        else str(kind) if get_origin(kind) else kind.__name__
        for kind in kinds if kind is not NoneType
    )  # fmt: skip


def _convert(kinds: tuple[Any, ...], value: Any) -> Any | None:
    """Return `value` as the first of the types that it fits, or None."""
    return next((fit for kind in kinds if (fit := _convert_one(kind, value)) is not None), None)


def _convert_one(kind: Any, value: Any) -> Any | None:
    origin = get_origin(kind)
    if origin is Literal:
        return value if value in get_args(kind) else None
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return None
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            return None
        items = [_convert_one(item, v) for item, v in zip(kinds, value, strict=True)]
        return None if None in items else tuple(items)
    if origin is dict:
        named = _with_paths(value) if isinstance(value, dict) else None
        return named if is_plain(named) else None
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind in (bool, str):
        return value if type(value) is kind else None
    number = numbers.Real if kind is float else numbers.Integral
    fits = isinstance(value, number) and not isinstance(value, bool)
    return kind(value) if fits else None


def _with_paths(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict in which paths are text."""
    return {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in named.items()
    }


def is_plain(value: Any) -> bool:
    """Return True if the value survives a round trip through JSON."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
