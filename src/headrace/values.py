"""Values from files and Python as the types that settings have. Left out: flags (`commands.py`)."""

import json
import numbers
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from headrace.errors import ConfigError


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
