"""Reads what a run has measured: `metrics.jsonl`, one object per update.

This file imports nothing heavy. Left out: writing (`training/log.py`).
"""

import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from headrace.errors import RunDirError
from headrace.storage.files import read_capped

FILE = "metrics.jsonl"
Row = dict[str, Any]
"""The metrics of an update by their names: numbers, or None."""
_MAX_BYTES = 1 << 30
_TAIL_BYTES, _MAX_TAIL_BYTES = 1 << 16, 1 << 24
_REQUIRED_KEYS = {"iteration", "env_steps"}
_OLD_KEY = re.compile(r"^(seconds/)?samplers(?=[_/])")  # a worker was called a sampler first


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a metric has a value: it is null where there was none, or NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def numbers_in(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that have a value, by their names."""
    return {name: float(value) for name, value in metrics.items() if is_number(value)}


def read_metrics(run_dir: Path) -> list[Row]:
    """Return the rows of `metrics.jsonl`, without damaged lines; or raise RunDirError."""
    path = run_dir / FILE
    if not path.exists():
        raise RunDirError(f"{run_dir} has no {FILE}: no update has been made there.")
    rows, damaged = [], []
    lines = read_capped(path, _MAX_BYTES, RunDirError).split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            damaged.append(number)
        else:
            rows.append(row)
    damaged = [number for number in damaged if number < len(lines)]  # the last has no end yet
    if damaged:
        listed = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        warnings.warn(f"{path} is damaged: left out line {listed}.", stacklevel=2)
    return rows


def read_last_metrics(run_dir: Path) -> list[Row]:
    """Return the last rows of `metrics.jsonl`, at least one if it has any; [] without the file.

    Only the file's end is read: 64 KiB, and more where no row ends in them.

    Raises:
        OSError: the file cannot be read.
    """
    path = run_dir / FILE
    if not path.exists():
        return []
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        size = _TAIL_BYTES
        while True:
            begin = max(0, end - size)
            file.seek(begin)
            lines = file.read(end - begin).split(b"\n")  # of the first, an end is no row
            rows = [row for row in map(parse_row, lines) if row is not None]
            if rows or begin == 0 or size >= _MAX_TAIL_BYTES:
                return rows
            size *= 4


def parse_row(line: bytes) -> Row | None:
    """Return a row; None if the line is damaged, or has no end yet."""
    try:
        row = json.loads(line)
        if all(is_number(row[key]) for key in _REQUIRED_KEYS):
            return {_OLD_KEY.sub(r"\1workers", key): value for key, value in row.items()}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        pass
    return None


def starts(rows: Sequence[Row]) -> list[bool]:
    """Return which rows are the first ones of a process."""
    found: list[bool] = []
    before = math.inf
    for row in rows:
        wall_s, start_s = row.get("wall_s"), row.get("seconds/learner/start")
        wall_s = wall_s if is_number(wall_s) else math.nan
        found.append(not found or (is_number(start_s) and start_s > 0) or wall_s < before)
        before = wall_s
    return found


def total_seconds(rows: Sequence[Row]) -> list[float]:
    """Return the wall time at each row, added up over all processes of the run."""
    found, earlier, before = [], 0.0, 0.0
    for row, is_start in zip(rows, starts(rows), strict=True):
        earlier += before if is_start else 0.0
        wall_s = row.get("wall_s")
        before = wall_s if is_number(wall_s) else 0.0
        found.append(earlier + before)
    return found


def returns_by_policy(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean return of each policy in a row of metrics; {} with one policy."""
    ending = "/mean_return"
    return {name.removesuffix(ending): v for name, v in row.items() if name.endswith(ending)}


def format_means(mean_return: float | None, by_policy: Mapping[str, float], none: str) -> str:
    """Return mean returns as text: of each policy, if there are several."""
    if by_policy:
        return ", ".join(f"{name} {mean:.1f}" for name, mean in by_policy.items())
    return none if mean_return is None else f"{mean_return:.1f}"
