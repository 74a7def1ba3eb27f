"""The user's catalogue of machines for rent: a TOML file (`docs/plan.md`), read and checked."""

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from headrace.configclass import Between, Expected, NonNegative, NonNegativeInt, check_values
from headrace.errors import ConfigError, did_you_mean

Positive = Annotated[float, Between(1e-9), Expected("a number above 0")]
"""The type of a speed or rate."""


@dataclass(frozen=True)
class SpotTerms:
    """Terms on which a machine is cheaper, since it may be taken away at any moment.

    Attributes:
        price_per_h: price of one machine, in the currency of the catalogue.
        hours_between_losses: mean time after which a machine is taken away.
        minutes_to_replace: until another one is there.
    """

    kind: str
    price_per_h: NonNegative
    hours_between_losses: Positive
    minutes_to_replace: NonNegative = 5.0


@dataclass(frozen=True)
class MachineKind:
    """A kind of machine.

    Attributes:
        price_per_h: price of one machine, in the currency of the catalogue.
        memory_gib: main memory, shown beside the machine.
        cpu_speed: speed of a core, relative to one of the profiled machine.
        learner_speed: speed of a learner, relative to the profiled one; default: 1 if the machine
            and the profile both have a GPU, or neither.
        at_most: machines of this kind; default: no limit.
        note: shown beside the machine.
        spot: the terms of the kind's spot machines; None: it has none.
        is_spot: True for one that may be taken away, on these terms.
    """

    name: str
    price_per_h: NonNegative
    cpus: NonNegativeInt
    gpus: NonNegativeInt = 0
    memory_gib: Annotated[float | None, Between(0)] = None
    cpu_speed: Positive = 1.0
    learner_speed: Annotated[float | None, Between(1e-9), Expected("a number above 0")] = None
    at_most: Annotated[int | None, Between(0)] = None
    note: str = ""
    spot: SpotTerms | None = None
    is_spot: bool = False

    @property
    def hardware(self) -> str:
        """The machine's CPUs, GPUs and memory as text."""
        parts = [f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"]
        parts += [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts += [f"{self.memory_gib:g} GiB"] if self.memory_gib is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Catalogue:
    """All kinds of machines.

    Attributes:
        date: day of the prices.
        source: where the prices come from.
        is_example: True lets each plan begin with a warning.
        cpus_per_learner: CPU cores that a learner takes from workers.
        at_most: machines in all; default: no limit.
        checkpoint_s: seconds that learners stand still for a checkpoint.
    """

    kinds: tuple[MachineKind, ...]
    date: str
    source: str
    currency: str
    is_example: bool = False
    cpus_per_learner: NonNegativeInt = 1
    at_most: Annotated[int | None, Between(0)] = None
    checkpoint_s: Positive = 1.0

    def with_spot(self, *, learners: bool) -> "Catalogue":
        """Add the spot machines, as kinds of their own.

        Args:
            learners: whether learners may run on them.
        """
        spot = [
            replace(
                kind,
                name=f"{kind.name}-spot",
                price_per_h=kind.spot.price_per_h,
                is_spot=True,
                learner_speed=kind.learner_speed if learners else 0.0,
            )
            for kind in self.kinds
            if kind.spot is not None
        ]
        return replace(self, kinds=(*self.kinds, *spot))


def read_catalogue(path: Path | None = None) -> Catalogue:
    """Read the catalogue in `path` (None: the example that is shipped); ConfigError."""
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
    """Check a TOML table and build the catalogue; ConfigError, which names it by `place`."""
    kinds = table.get("machines")
    if not isinstance(kinds, dict) or not kinds:
        raise ConfigError(f"{place} has no machines: expected tables [machines.NAME].")
    values = {key: value for key, value in table.items() if key != "machines"}
    if isinstance(values.get("date"), datetime.date):
        values["date"] = values["date"].isoformat()
    machines = tuple(_parse_kind(name, kind, place) for name, kind in kinds.items())
    return Catalogue(machines, **_checked(Catalogue, values, place))


def _parse_kind(name: str, table: Any, file: str) -> MachineKind:
    place = f"machines.{name} in {file}"
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is {table!r}: expected a table, [machines.{name}].")
    spot = None
    if "spot" in table:
        spot_place = f"machines.{name}.spot in {file}"
        if not isinstance(table["spot"], dict):
            raise ConfigError(f"{spot_place} is no table: expected [machines.{name}.spot].")
        spot = SpotTerms(name, **_checked(SpotTerms, table["spot"], spot_place))
    own = {key: value for key, value in table.items() if key != "spot"}
    kind = MachineKind(name, **_checked(MachineKind, own, place), spot=spot)
    if not kind.price_per_h and kind.at_most is None:
        raise ConfigError(
            f"price_per_h of {place} is 0, so that no number of them is too many.\n"
            "Say with at_most how many there are."
        )
    return kind


def _checked(cls: Any, table: Mapping[str, Any], place: str) -> dict[str, Any]:
    # The first, and those that are made here, are no keys of the table.
    known = [field for field in fields(cls)[1:] if field.name not in ("spot", "is_spot")]
    names = [field.name for field in known]
    for key in table:
        if key not in names:
            raise ConfigError(
                f"There is no key {key!r} in {place}.{did_you_mean(key, names)}\n"
                f"Known are: {', '.join(names)}."
            )
    required = [field.name for field in known if field.default is MISSING]
    for name in required:
        if not str(table.get(name, "")).strip():
            raise ConfigError(f"{name} is missing in {place}: expected {', '.join(required)}.")
    return check_values(cls, table, place)
