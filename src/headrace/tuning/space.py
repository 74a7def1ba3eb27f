"""The search space: which settings vary, and in which ranges.

    lr = { log = [1e-5, 1e-2] }                         # evenly in the logarithm
    gamma = { one_minus_log = [1e-3, 0.1] }             # 0.9 to 0.999, evenly in that of 1 - gamma
    vf_coef = { uniform = [0.3, 1.0] }
    num_epochs = { int = [1, 20] }
    hidden_sizes = { choice = [[64, 64], [256, 256]] }

Left out: which point is tried next (`samplers.py`).
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, did_you_mean

KINDS = ("uniform", "log", "one_minus_log", "int", "choice")
_DIGITS = 4  # of a number that is drawn: it is read, typed, and exactly the same in a file


@dataclass(frozen=True)
class Parameter:
    """A setting that varies.

    Attributes:
        of: the options of a `choice`; else the least and the greatest number. Those of
            `one_minus_log` are of 1 - value.
    """

    name: str
    kind: str
    of: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """Return the value at a place between 0 (the first option or bound) and 1 (the last)."""
        if self.kind == "choice":
            return self.of[min(int(share * len(self.of)), len(self.of) - 1)]
        least, most = self.of
        if self.kind == "int":
            return least + min(int(share * (most - least + 1)), most - least)
        if self.kind == "uniform":
            return self.value(least + share * (most - least))
        return self.value(math.exp(math.log(least) + share * (math.log(most) - math.log(least))))

    def value(self, number: float) -> float:
        """Return the value that a number within the range stands for, in four digits."""
        rounded = float(f"{number:.{_DIGITS}g}")
        return round(1.0 - rounded, 12) if self.kind == "one_minus_log" else rounded

    def times(self, value: float, factor: float) -> float:
        """Return a number times a factor, kept within the range.

        With `one_minus_log`, 1 - value is multiplied.

        A number outside the range may stay there, but goes no farther.
        """
        number = round(1.0 - value, 12) if self.kind == "one_minus_log" else value
        least, most = min(self.of[0], number), max(self.of[1], number)
        return self.value(min(max(number * factor, least), most))

    def index(self, value: Any) -> int | None:
        """Return the index of a choice's option, or of the nearest number; None if none is near."""
        known: list[Any] = [list(x) if isinstance(x, tuple) else x for x in self.of]
        given = list(value) if isinstance(value, tuple) else value
        if given in known:
            return known.index(given)
        if not all(map(_is_number, [given, *known])):
            return None
        distances = [abs(each - given) for each in known]
        return distances.index(min(distances))

    def number(self, value: float) -> float:
        """Return the number within the range that stands for a value, or for the nearest."""
        least, most = self.of
        given = round(1.0 - value, 12) if self.kind == "one_minus_log" else value
        return float(min(max(given, least), most))

    def place(self, value: Any) -> float | None:
        """Return the place between 0 and 1 of a value, or of the nearest; None: none is near."""
        if self.kind == "choice":
            index = self.index(value)
            return None if index is None else (index + 0.5) / len(self.of)
        if not _is_number(value):
            return None
        number, (least, most) = self.number(value), self.of
        if self.kind == "int":
            return float((number - least + 0.5) / (most - least + 1))
        if self.kind == "uniform":
            return float((number - least) / (most - least))
        return math.log(number / least) / math.log(most / least)

    def grid(self, points: int = 3) -> list[Any]:
        """Return all options of a choice; of a range so many points, evenly."""
        if self.kind == "choice":
            return list(self.of)
        if self.kind == "int":
            points = min(points, self.of[1] - self.of[0] + 1)
        return [self.at(i / max(1, points - 1)) for i in range(points)]


Space = dict[str, Parameter]


def places(space: Space, values: Mapping[str, Any]) -> list[float] | None:
    """Return the places of values; None if one has no place, such as a word in the preset."""
    found = [each.place(values.get(name)) for name, each in space.items()]
    return None if None in found else [place for place in found if place is not None]


def parse_space(tables: Mapping[str, Any], source: str) -> Space:
    """Return a space from plain data, as in a TOML file; ConfigError says what is wrong."""
    if not tables:
        raise ConfigError(f"The space ({source}) has no setting: expected one or more.")
    return {name: _parameter(name, table, source) for name, table in tables.items()}


def read_space(path: Path) -> Space:
    """Read a space from a TOML file; ConfigError if it cannot be read, or is wrong."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The space {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The space {path} is not valid TOML: {error}.") from None
    return parse_space(tables, str(path))


def default_space(algo: str) -> Space:
    """Return the space that comes with an algorithm; ConfigError if it has none."""
    text = resources.files("headrace.tuning").joinpath("spaces.toml").read_text(encoding="utf-8")
    tables = {name: table for names, table in tomllib.loads(text).items() for name in names.split()}
    if algo not in tables:
        raise ConfigError(
            f"{algo} has no search space of its own: those with one are {', '.join(tables)}.\n"
            "Give one: --space FILE.toml"
        )
    return parse_space(tables[algo], f"the space of {algo}")


def to_json(space: Space) -> dict[str, Any]:
    """Return plain data that `parse_space` reads."""
    return {each.name: {each.kind: list(each.of)} for each in space.values()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parameter(name: str, table: Any, source: str) -> Parameter:
    example = f"{name} = {{ log = [1e-5, 1e-2] }}, or {{ choice = [1, 2] }}"
    if not isinstance(table, Mapping) or len(table) != 1:
        raise ConfigError(f"{name} ({source}): got {table!r}, expected one kind, as in {example}.")
    kind, of = next(iter(table.items()))
    if kind not in KINDS:
        raise ConfigError(
            f"{name} ({source}): there is no kind {kind!r}.{did_you_mean(kind, KINDS)} "
            f"Expected one of {', '.join(KINDS)}."
        )
    if not isinstance(of, list | tuple) or not of:
        raise ConfigError(f"{name} ({source}): {kind} = {of!r}: expected a list, as in {example}.")
    if kind == "choice":
        return Parameter(name, kind, tuple(of))
    numbers = int if kind == "int" else (int, float)
    are_numbers = all(isinstance(n, numbers) and not isinstance(n, bool) for n in of)
    if len(of) != 2 or not are_numbers or not of[0] < of[1]:
        whole = "whole " if kind == "int" else ""
        raise ConfigError(
            f"{name} ({source}): {kind} = {of!r}: expected two {whole}numbers, the least first."
        )
    if kind in ("log", "one_minus_log") and of[0] <= 0:
        raise ConfigError(f"{name} ({source}): {kind} = {of!r}: expected numbers above 0.")
    return Parameter(name, kind, tuple(of))
