"""What a tracker is, and which there are. Left out: how each is spoken to (`to_*.py`)."""

import abc
from collections.abc import Sequence
from typing import Any, Literal

from headrace.catalog import extras
from headrace.errors import ConfigError, MissingExtraError, did_you_mean, install_command
from headrace.storage.metrics import Row, is_number

TRACKERS = ("trackio", "mlflow", "wandb")
"""The trackers. Each has the name of its package, and of the extra that installs it."""

End = Literal["ended", "failed", "vanished", "running"]
"""State of a run when tracking ends: an error ended one that failed, and one that vanished was
killed, or crashed."""


class Tracker(abc.ABC):
    """A run at a tracker.

    Attributes:
        run_id: name of the run at the tracker, for the next process that sends rows.
        sent: env steps of the last row that the tracker has; 0 without one.
    """

    run_id: str
    sent: int

    @abc.abstractmethod
    def log(self, rows: Sequence[Row]) -> None:
        """Send rows. Their env steps are above `sent` and rise from row to row."""

    @abc.abstractmethod
    def close(self, end: End) -> None:
        """Wait until the tracker has all rows, and tell it how the run ended."""


def check(name: str) -> None:
    """Check that rows can be sent to a tracker.

    Raises:
        ConfigError: there is no such tracker.
        MissingExtraError: its package is not installed.
    """
    if name not in TRACKERS:
        hint = did_you_mean(name, TRACKERS)
        raise ConfigError(f"{name!r} is no tracker: expected one of {', '.join(TRACKERS)}.{hint}")
    # Not by an import: that takes seconds, and a folder `wandb` would pass for the package.
    if extras.version(name) is None:
        raise MissingExtraError(
            f"To send metrics to {name}, its package is needed, and it is not installed.\n"
            f"To install it: {install_command(name)}"
        )


def numbers(row: Row) -> dict[str, Any]:
    """Return the metrics of a row that are numbers: a value that was NaN or unknown is left out."""
    return {name: value for name, value in row.items() if is_number(value)}
