"""Checks of an environment's arguments; each raises UsageError."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from headrace.errors import UsageError


def check_integers(env: Any, *names: str, least: int) -> None:
    """Check that these attributes are whole numbers of at least `least`."""
    _check(
        env, names, lambda x: _is(x, Integral) and x >= least, f"a whole number, {least} or more"
    )


def check_numbers(env: Any, *names: str, least: float = -math.inf, most: float = math.inf) -> None:
    """Check that these attributes are finite numbers from `least` to `most`."""
    bounds = f", {least:g} or more" if least > -math.inf else ""
    bounds += f", {most:g} or less" if most < math.inf else ""
    _check(
        env,
        names,
        lambda x: _is(x, Real) and math.isfinite(x) and least <= x <= most,
        f"a finite number{bounds}",
    )


def check_positive(env: Any, *names: str) -> None:
    """Check that these attributes are finite numbers greater than 0."""
    check_numbers(env, *names, least=0)
    _check(env, names, lambda x: x > 0, "a number greater than 0")


def check_flags(env: Any, *names: str) -> None:
    """Check that these attributes are True or False."""
    _check(env, names, lambda x: isinstance(x, bool), "True or False")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check(
    env: Any, names: tuple[str, ...], is_valid: Callable[[Any], bool], expected: str
) -> None:
    for name in names:
        if not is_valid(value := getattr(env, name)):
            raise UsageError(f"{type(env).__name__}: {name}={value!r}: expected {expected}.")
