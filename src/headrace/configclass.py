"""The decorator of every group of settings: frozen, keyword-only, and aware of what was given.

Left out: where values come from (flags, file, preset: `config/resolve.py`) and what they mean (the
class that carries them).
"""

import functools
import json
import numbers
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin

from headrace.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass that remembers which fields its caller named.

    A preset fills only what the caller left open, and a caller may well name a value that equals
    the default: comparing values could not tell the two apart.
    """
    data_cls: Any = dataclass(frozen=True, kw_only=True)(cls)
    plain_init = data_cls.__init__

    @functools.wraps(plain_init)
    def init(self: Any, **given: Any) -> None:
        for name in given:
            if name not in data_cls.__dataclass_fields__:
                hint = did_you_mean(name, data_cls.__dataclass_fields__)
                raise ConfigError(f"{cls.__name__} has no setting {name!r}.{hint}")
        plain_init(self, **given)
        object.__setattr__(self, "_given", frozenset(given))

    data_cls.__init__ = init
    return data_cls  # type: ignore[no-any-return]


def given_values(instance: Any) -> dict[str, Any]:
    """The fields of a `configclass` instance that its caller named, with their values."""
    return {name: getattr(instance, name) for name in sorted(instance._given)}


# Values from files and Python as the types that settings have.


def coerce(name: str, value: Any, hint: Any, source: str) -> Any:
    """Check `value` against the field's type; int may become float, a list a tuple.

    Raises:
        ConfigError: it does not fit.
    """
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in kinds:
        fitting = _as(kind, value)
        if fitting is not None or (kind is NoneType and value is None):
            return fitting
    expected = " or ".join(
        " | ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal
        else str(kind) if get_origin(kind) else kind.__name__
        for kind in kinds if kind is not NoneType
    )  # fmt: skip
    if name in ("policies", "frozen"):
        expected = "names of policies, each with a word or a table"
    if name == "env_kwargs":
        expected = (
            "numbers, words, lists and dicts of them, as config.json can hold them (a tuple would "
            "come back as a list); put anything else into a callable that makes the environment"
        )
    raise ConfigError(f"{name}={value!r} ({source}): expected {expected}.")


def _as(kind: Any, value: Any) -> Any | None:
    """`value` as one of the kinds of settings, or None."""
    origin = get_origin(kind)
    if origin is Literal:
        return value if value in get_args(kind) else None
    if origin is tuple:
        item = get_args(kind)[0]
        items = [_as(item, v) for v in value] if isinstance(value, list | tuple) else [None]
        return None if None in items else tuple(items)
    if origin is dict:
        return value if isinstance(value, dict) and _is_plain(value) else None
    if kind in (bool, str):
        return value if type(value) is kind else None
    wanted = numbers.Real if kind is float else numbers.Integral
    is_number = isinstance(value, wanted) and not isinstance(value, bool)
    return kind(value) if is_number else None


def _is_plain(value: dict[str, Any]) -> bool:
    """Whether it comes back from JSON as it went."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
