"""Rows of `metrics.jsonl`, one JSON object a line. Left out: writing them (`training/log.py`)."""

import json
import math
import re
from typing import Any

Row = dict[str, Any]
"""The metrics of an update by their names: numbers, or None."""

_REQUIRED_KEYS = {"iteration", "env_steps"}
_OLD_KEY = re.compile(r"^(seconds/)?samplers(?=[_/])")  # a worker was called a sampler first


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def parse_row(line: bytes) -> Row | None:
    """Return the row of a line, with today's names; None if the line is damaged."""
    try:
        row = json.loads(line)
        if not all(is_number(row[key]) for key in _REQUIRED_KEYS):
            return None
        return {_OLD_KEY.sub(r"\1workers", key): value for key, value in row.items()}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
