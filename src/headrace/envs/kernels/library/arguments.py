"""Checks of what an environment was made with. Left out: what the arguments mean."""

import math
from numbers import Integral, Real
from typing import Any

from headrace.errors import UsageError


def whole(env: Any, *names: str, least: int) -> None:
    """UsageError unless these attributes are whole numbers, and large enough."""
    for name, value in _each(env, names):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise _error(env, name, f"a whole number, {least} or more")


def numbers(env: Any, *names: str, least: float = -math.inf, most: float = math.inf) -> None:
    """UsageError unless these attributes are finite numbers within bounds, which are allowed."""
    bounds = f", {least:g} or more" if least > -math.inf else ""
    bounds += f", {most:g} or less" if most < math.inf else ""
    for name, value in _each(env, names):
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= most:
            raise _error(env, name, f"a finite number{bounds}")


def above_zero(env: Any, *names: str) -> None:
    """UsageError unless these attributes are finite numbers greater than 0."""
    numbers(env, *names, least=0)
    for name, value in _each(env, names):
        if value == 0:
            raise _error(env, name, "a number greater than 0")


def flags(env: Any, *names: str) -> None:
    """UsageError unless these attributes are True or False."""
    for name, value in _each(env, names):
        if not isinstance(value, bool):
            raise _error(env, name, "True or False")


def _each(env: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    return [(name, getattr(env, name)) for name in names]


def _error(env: Any, name: str, expected: str) -> UsageError:
    given = f"{type(env).__name__}: {name}={getattr(env, name)!r}"
    return UsageError(f"{given}: expected {expected}.")
