"""The user's catalogue of machines that can be rented: a TOML file, read and checked.

    date = 2026-11-23                   # of the prices
    source = "our provider's list"
    currency = "USD"
    [machines.small-gpu]
    price_per_h = 0.1578
    cpus = 4
    gpus = 1

`KEYS` and `MACHINE_KEYS` have all keys. Left out: which machines to take (`planner.py`).
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
    "date": "the day that the prices are of",
    "source": "where they are from",
    "currency": "what they are in, such as USD",
    "is_example": "true: said at the head of each plan; default: false",
    "cpus_per_learner": "CPU cores that a learner takes from samplers; default: 1",
    "at_most": "machines in all; default: no limit",
    "machines": "the kinds, each a table [machines.NAME]",
}
MACHINE_KEYS = {
    "price_per_h": "of one machine, in the currency",
    "cpus": "CPU cores",
    "gpus": "GPUs; default: 0",
    "memory_gib": "main memory, shown beside the machine; default: not known",
    "cpu_speed": "of a core, relative to one of the profiled machine; default: 1",
    "learner_speed": "of a learner there, relative to the profiled one; default: 1 on what was "
    "profiled, a CPU or a GPU",
    "at_most": "machines of this kind; default: no limit",
    "note": "shown beside the machine",
}
_NEEDED = ("date", "source", "currency", "machines")
_NEEDED_OF_MACHINE = ("price_per_h", "cpus")


@dataclass(frozen=True)
class Kind:
    """One kind of machine; `MACHINE_KEYS` says what its fields are."""

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
    def has(self) -> str:
        """What is in it, in words."""
        parts = [f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"]
        parts += [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts += [f"{self.memory_gib:g} GiB"] if self.memory_gib is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Catalogue:
    """All kinds, and what holds for each; `KEYS` says what the fields are."""

    kinds: tuple[Kind, ...]
    date: str
    source: str
    currency: str
    is_example: bool = False
    cpus_per_learner: int = 1
    at_most: int | None = None


def read_catalogue(path: Path | None = None) -> Catalogue:
    """The catalogue in `path`; None: the example that comes with Headrace.

    Raises:
        ConfigError: there is no such file, it is no TOML, or `catalogue` refuses it.
    """
    if path is None:
        text = resources.files("headrace.tools.plan").joinpath("example_machines.toml").read_text()
        return catalogue(tomllib.loads(text), "the example catalogue")
    try:
        return catalogue(tomllib.loads(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"--machines {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML file: {error}.") from None


def catalogue(given: Mapping[str, Any], where: str) -> Catalogue:
    """The catalogue that these tables describe; `where` names it in errors.

    Raises:
        ConfigError: a key is unknown, missing, or has a value that cannot be.
    """
    _known(given, KEYS, where)
    _there(given, _NEEDED, KEYS, where)
    kinds = given["machines"]
    if not isinstance(kinds, dict) or not kinds:
        raise ConfigError(f"{where} has no machines: expected tables [machines.NAME].")
    day = given["date"]
    date = day.isoformat() if isinstance(day, datetime.date) else _text(given, "date", where)
    return Catalogue(
        tuple(_kind(name, of, where) for name, of in kinds.items()),
        date=date,
        source=_text(given, "source", where),
        currency=_text(given, "currency", where),
        is_example=_of_type(given, "is_example", bool, "true or false", where, False),
        cpus_per_learner=_whole(given, "cpus_per_learner", where, 1),
        at_most=_whole(given, "at_most", where, None),
    )


def _kind(name: str, given: Any, file: str) -> Kind:
    where = f"machines.{name} in {file}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {given!r}: expected a table, [machines.{name}].")
    _known(given, MACHINE_KEYS, where)
    _there(given, _NEEDED_OF_MACHINE, MACHINE_KEYS, where)
    kind = Kind(
        name,
        price_per_h=_number(given, "price_per_h", where),
        cpus=_whole(given, "cpus", where, 0),
        gpus=_whole(given, "gpus", where, 0),
        memory_gib=_number(given, "memory_gib", where) if "memory_gib" in given else None,
        cpu_speed=_number(given, "cpu_speed", where, above_0=True) if "cpu_speed" in given else 1.0,
        learner_speed=_number(given, "learner_speed", where, above_0=True)
        if "learner_speed" in given
        else None,
        at_most=_whole(given, "at_most", where, None),
        note=_text(given, "note", where) if "note" in given else "",
    )
    if not kind.price_per_h and kind.at_most is None:
        raise ConfigError(
            f"price_per_h of {where} is 0, so that no number of them is too many.\n"
            "Say with at_most how many there are."
        )
    return kind


def _known(given: Mapping[str, Any], keys: Mapping[str, str], where: str) -> None:
    for key in given:
        if key not in keys:
            raise ConfigError(
                f"There is no key {key!r} in {where}.{did_you_mean(key, keys)}\n"
                f"Known are: {', '.join(keys)}."
            )


def _there(given: Mapping[str, Any], needed: tuple[str, ...], keys: Any, where: str) -> None:
    for key in needed:
        if key not in given:
            raise ConfigError(f"{key} is missing in {where}: expected {keys[key]}.")


def _of_type(
    given: Mapping[str, Any], key: str, wanted: Any, words: str, where: str, default: Any
) -> Any:
    value = given.get(key, default)
    if key in given and (
        not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool)
    ):
        raise ConfigError(f"{key} = {value!r} in {where}: expected {words}.")
    return value


def _whole(given: Mapping[str, Any], key: str, where: str, default: int | None) -> Any:
    value = _of_type(given, key, int, "a whole number, 0 or more", where, default)
    if value is not None and value < 0:
        raise ConfigError(f"{key} = {value} in {where}: expected a whole number, 0 or more.")
    return value


def _number(given: Mapping[str, Any], key: str, where: str, above_0: bool = False) -> float:
    words = "a number above 0" if above_0 else "a number, 0 or more"
    value = float(_of_type(given, key, (int, float), words, where, 0.0))
    if not 0 <= value < float("inf") or (above_0 and not value):
        raise ConfigError(f"{key} = {value:g} in {where}: expected {words}.")
    return value


def _text(given: Mapping[str, Any], key: str, where: str) -> str:
    value = _of_type(given, key, str, "text in quotes", where, "")
    if not value.strip():
        raise ConfigError(f"{key} in {where} is empty: expected text.")
    return str(value)
