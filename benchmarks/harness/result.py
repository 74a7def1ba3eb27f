"""The line that a driver prints last: JSON, with or without `RESULT ` before it."""

import json
from typing import Any


def read_result(line: str) -> dict[str, Any]:
    """The object in the line; ValueError or TypeError if there is none."""
    return dict(json.loads(line.removeprefix("RESULT ")))
