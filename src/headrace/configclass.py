"""The decorator of every group of settings: frozen, keyword-only, and aware of what was given.

Left out: where values come from (flags, file, preset: `config/resolve.py`) and what they mean (the
class that carries them).
"""

import functools
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from headrace.errors import ConfigError, did_you_mean

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
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
    """The fields of a `settings` instance that its caller named, with their values."""
    return {name: getattr(instance, name) for name in sorted(instance._given)}
