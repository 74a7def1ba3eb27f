"""`headrace runs`: which runs are shown, in which order, as a table. Imports nothing heavy."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, did_you_mean
from headrace.storage.metrics import format_means
from headrace.storage.run_dir import STUDY
from headrace.tools.runs.records import STATES, RunRecord

_KEYS: dict[str, Callable[[RunRecord], Any]] = {
    "dir": lambda record: record.dir,
    "env": lambda record: record.env or None,
    "algo": lambda record: record.algo or None,
    "seed": lambda record: record.seed,
    "env_steps": lambda record: record.env_steps,
    "mean_return": lambda record: record.mean_return,
    "best_return": lambda record: record.best_return,
    "env_steps_per_s": lambda record: record.env_steps_per_s,
    "state": lambda record: STATES.index(record.state),
    "age": lambda record: -record.written_at,
}
COLUMNS = tuple(_KEYS)
_HEADS = (
    "directory", "environment", "algo", "seed", "env steps", "mean return", "best", "env steps/s",
    "state", "age",
)  # fmt: skip
_TO_THE_RIGHT = frozenset({3, 4, 5, 6, 7, 9})
NONE = "-"


def chosen(
    records: Iterable[RunRecord], *, env: str = "", algo: str = "", state: str = ""
) -> list[RunRecord]:
    """Return the records that pass all filters; "" lets all pass.

    Args:
        env, algo: patterns as of files: `*`, `?` and `[...]`.
        state: one of `STATES`.

    Raises:
        ConfigError: there is no such state.
    """
    if state and state not in STATES:
        raise ConfigError(
            f"--state {state}: there is no such state.{did_you_mean(state, STATES)}\n"
            f"Expected one of {', '.join(STATES)}."
        )
    return [
        record
        for record in records
        if fnmatchcase(record.env, env or "*")
        and fnmatchcase(record.algo, algo or "*")
        and state in ("", record.state)
    ]


def ordered(
    records: Iterable[RunRecord], column: str = "dir", *, reverse: bool = False
) -> list[RunRecord]:
    """Return the records in the order of a column. Those without a value there come last.

    Raises:
        ConfigError: there is no such column.
    """
    if column not in _KEYS:
        raise ConfigError(
            f"--sort {column}: there is no such column.{did_you_mean(column, COLUMNS)}\n"
            f"Expected one of {', '.join(COLUMNS)}."
        )
    key, records = _KEYS[column], list(records)
    known = [record for record in records if key(record) is not None]
    unknown = [record for record in records if key(record) is None]
    return sorted(known, key=key, reverse=reverse) + unknown


def describe(records: Sequence[RunRecord], folder: Path) -> str:
    """Return a table of records, and what is wrong with those that are damaged.

    The runs of a study have one row, unless `folder` is the study or a part of it.
    """
    if not records:
        return f"No runs of that kind below {folder}."
    rows: dict[Path, list[RunRecord]] = {}
    for record in records:
        rows.setdefault(_study_of(record, folder) or record.dir, []).append(record)
    cells = [
        _cells(each[0], folder) if path == each[0].dir else _cells_of_study(path, each, folder)
        for path, each in rows.items()
    ]
    lines = [format_table(_HEADS, cells, _TO_THE_RIGHT)]
    damaged = [record for record in records if record.damage]
    lines += [f"\n{_name(each, folder)} is damaged: {each.damage}" for each in damaged]
    return "\n".join(lines)


def to_json(records: Iterable[RunRecord], folder: Path) -> dict[str, Any]:
    """Return records as plain data. Their settings are left out: `config.json` has them."""
    names = [f.name for f in fields(RunRecord) if f.name not in ("dir", "settings")]
    runs = [
        {"dir": str(record.dir)} | {name: getattr(record, name) for name in names}
        for record in records
    ]
    return {"folder": str(folder), "runs": runs}


def _name(record: RunRecord, folder: Path) -> str:
    return str(record.dir.relative_to(folder))


def _study_of(record: RunRecord, folder: Path) -> Path | None:
    """Return the study below the folder that a run belongs to, if there is one."""
    between = record.dir.relative_to(folder).parents[:-1]
    return next((folder / each for each in between if (folder / each / STUDY).exists()), None)


def _cells_of_study(path: Path, records: list[RunRecord], folder: Path) -> list[str]:
    """Return the row of a study: from the least to the greatest value of its runs."""
    counts = Counter(record.state for record in records)

    def span(values: Iterable[float | None], text: Callable[[float], str]) -> str:
        ends = sorted({value for value in values if value is not None})
        return " to ".join(dict.fromkeys(map(text, (ends[0], ends[-1])))) if ends else NONE

    return [
        f"{path.relative_to(folder)} (study, {len(records)} runs)",
        records[0].env or NONE,
        records[0].algo or NONE,
        NONE,
        span((each.env_steps for each in records), "{:,}".format),
        span((each.mean_return for each in records), "{:.1f}".format),
        span((each.best_return for each in records), "{:.1f}".format),
        NONE,
        ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]),
        format_age(time.time() - max(each.written_at for each in records)),
    ]


def _cells(record: RunRecord, folder: Path) -> list[str]:
    rate = record.env_steps_per_s
    return [
        _name(record, folder),
        record.env or NONE,
        record.algo or NONE,
        NONE if record.seed is None else str(record.seed),
        _steps(record),
        format_means(record.mean_return, record.mean_return_by_policy, NONE),
        format_means(record.best_return, {}, NONE),
        NONE if rate is None else f"{rate:,.0f}",
        record.state,
        format_age(time.time() - record.written_at),
    ]


def _steps(record: RunRecord) -> str:
    """Return the env steps of a run, and its goal if it may go on to it."""
    steps, goal = record.env_steps, record.total_env_steps
    if record.state in ("imported", "pulled"):
        return f"{steps:,}"
    return f"{steps:,} of {goal:,}" if goal else NONE


def format_age(seconds: float) -> str:
    """Return an age in its largest whole unit: "12 s", "3 min", "5 h", "2 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], to_the_right: Iterable[int] = ()
) -> str:
    """Return a table as text.

    Args:
        to_the_right: indices of columns that are aligned to the right.
    """
    table, right = [heads, *rows], set(to_the_right)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
