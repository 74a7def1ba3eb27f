"""The user's catalogue of machines for rent: a TOML file, read and checked.

date = 2026-11-23                   # day of the prices
source = "our provider's list"
currency = "USD"
[machines.small-gpu]
price_per_h = 0.1578
cpus = 4
gpus = 1
"""

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, did_you_mean

KEYS = {
    "date": "the day of the prices",
    "source": "where the prices come from",
    "currency": "the currency of the prices, such as USD",
    "is_example": "true: each plan begins with a warning; default: false",
    "cpus_per_learner": "CPU cores that a learner takes from workers; default: 1",
    "at_most": "machines in all; default: no limit",
    "machines": "the kinds, each a table [machines.NAME]",
}
MACHINE_KEYS = {
    "price_per_h": "price of one machine, in the currency",
    "cpus": "CPU cores",
    "gpus": "GPUs; default: 0",
    "memory_gib": "main memory, shown beside the machine; default: not known",
    "cpu_speed": "speed of a core, relative to one of the profiled machine; default: 1",
    "learner_speed": "speed of a learner, relative to the profiled one; default: 1 if the machine "
    "and the profile both have a GPU, or neither",
    "at_most": "machines of this kind; default: no limit",
    "note": "shown beside the machine",
}
_REQUIRED = ("date", "source", "currency", "machines")
_REQUIRED_OF_MACHINE = ("price_per_h", "cpus")

_BOOL, _TEXT, _WHOLE = "true or false", "text in quotes", "a whole number, 0 or more"
_NUMBER, _POSITIVE = "a number, 0 or more", "a number above 0"
_TYPES: dict[str, Any] = {
    _BOOL: bool, _TEXT: str, _WHOLE: int, _NUMBER: (int, float), _POSITIVE: (int, float),
}  # fmt: skip
_EXPECTED = {
    "date": _TEXT, "source": _TEXT, "currency": _TEXT, "is_example": _BOOL,
    "cpus_per_learner": _WHOLE, "at_most": _WHOLE, "price_per_h": _NUMBER, "cpus": _WHOLE,
    "gpus": _WHOLE, "memory_gib": _NUMBER, "cpu_speed": _POSITIVE, "learner_speed": _POSITIVE,
    "note": _TEXT,
}  # fmt: skip


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine; `MACHINE_KEYS` describes the fields."""

    name: str
    price_per_h: float
    cpus: int
    gpus: int = 0
    memory_gib: float | None = None
    cpu_speed: float = 1.0
    learner_speed: float | None = None
    at_most: int | None = None
    note: str = ""

    @property
    def hardware(self) -> str:
        """The machine's CPUs, GPUs and memory as text."""
        parts = [f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"]
        parts += [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts += [f"{self.memory_gib:g} GiB"] if self.memory_gib is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Catalogue:
    """All kinds of machines; `KEYS` describes the other fields."""

    kinds: tuple[MachineKind, ...]
    date: str
    source: str
    currency: str
    is_example: bool = False
    cpus_per_learner: int = 1
    at_most: int | None = None


def read_catalogue(path: Path | None = None) -> Catalogue:
    """Read the catalogue in `path`; None: the example that comes with Headrace.

    Raises:
        ConfigError: the file is missing or is no TOML, or `parse_catalogue` refuses it.
    """
    if path is None:
        text = resources.files("headrace.tools.plan").joinpath("example_machines.toml").read_text()
        return parse_catalogue(tomllib.loads(text), "the example catalogue")
    try:
        return parse_catalogue(tomllib.loads(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"--machines {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}.") from None


def parse_catalogue(table: Mapping[str, Any], place: str) -> Catalogue:
    """Check a TOML table and build the catalogue; `place` names it in errors.

    Raises:
        ConfigError: a key is unknown or missing, or has an invalid value.
    """
    if isinstance(table.get("date"), datetime.date):
        table = {**table, "date": table["date"].isoformat()}
    values = _checked(table, KEYS, _REQUIRED, place)
    kinds = values.pop("machines")
    if not isinstance(kinds, dict) or not kinds:
        raise ConfigError(f"{place} has no machines: expected tables [machines.NAME].")
    machines = tuple(_parse_kind(name, kind, place) for name, kind in kinds.items())
    return Catalogue(machines, **values)


def _parse_kind(name: str, table: Any, file: str) -> MachineKind:
    place = f"machines.{name} in {file}"
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is {table!r}: expected a table, [machines.{name}].")
    kind = MachineKind(name, **_checked(table, MACHINE_KEYS, _REQUIRED_OF_MACHINE, place))
    if not kind.price_per_h and kind.at_most is None:
        raise ConfigError(
            f"price_per_h of {place} is 0, so that no number of them is too many.\n"
            "Say with at_most how many there are."
        )
    return kind


def _checked(
    table: Mapping[str, Any], keys: Mapping[str, str], required: tuple[str, ...], place: str
) -> dict[str, Any]:
    for key in table:
        if key not in keys:
            raise ConfigError(
                f"There is no key {key!r} in {place}.{did_you_mean(key, keys)}\n"
                f"Known are: {', '.join(keys)}."
            )
    for key in required:
        if key not in table:
            raise ConfigError(f"{key} is missing in {place}: expected {keys[key]}.")
    return {key: _check_value(key, value, place) for key, value in table.items()}


def _check_value(key: str, value: Any, place: str) -> Any:
    expected = _EXPECTED.get(key)
    if expected is None:  # the tables of machines are checked one by one
        return value
    types = _TYPES[expected]
    if not isinstance(value, types) or isinstance(value, bool) != (types is bool):
        raise ConfigError(f"{key} = {value!r} in {place}: expected {expected}.")
    if expected == _TEXT and not value.strip():
        raise ConfigError(f"{key} in {place} is empty: expected text.")
    if expected not in (_BOOL, _TEXT) and (
        not 0 <= value < float("inf") or (expected == _POSITIVE and not value)
    ):
        raise ConfigError(f"{key} = {value:g} in {place}: expected {expected}.")
    return float(value) if expected in (_NUMBER, _POSITIVE) else value
