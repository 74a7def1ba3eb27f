"""What a study asks of whoever runs its parts: `local.py`, or `cluster.py`."""

import abc
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.distributed import sessions
from headrace.tuning.runners.part import Part

STOP_TIMEOUT_S = 20.0
"""Seconds for a checkpoint, before a process that was asked to stop is killed."""
BY_NAME = "give the environment by a name, module:callable"
"""What to do if a part cannot be sent to another process."""


@dataclass(frozen=True)
class Ended:
    """The end of a part.

    Attributes:
        key: what the part was started with.
        outcome: `measured`; `stopped`: by a signal, and saved; or why it failed.
    """

    key: Any
    outcome: Literal["measured", "stopped"] | sessions.Failure
    measured: dict[str, Any] = field(default_factory=dict)
    why: str = ""


class Runner(abc.ABC):
    """Runs parts of runs, at most `slots` at a time; to be closed."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """How many parts run at a time."""

    @property
    @abc.abstractmethod
    def keys(self) -> list[Any]:
        """What the parts under way were started with."""

    @property
    def is_full(self) -> bool:
        """Whether no other part can be started now."""
        return len(self.keys) >= self.slots

    @abc.abstractmethod
    def start(self, key: Any, part: Part) -> None:
        """Start a part; UsageError if it cannot be sent to another process."""

    @abc.abstractmethod
    def wait(self, deadline: float) -> list[Ended]:
        """Wait until parts have ended, or until `deadline` (`time.monotonic`); return them.

        It may return none before, if there is room for more parts.
        """

    @abc.abstractmethod
    def stop(self) -> list[Ended]:
        """Ask all to save and end; return how they did. What does not end in time is killed."""

    @abc.abstractmethod
    def cancel(self, key: Any) -> None:
        """Kill a part that nobody needs any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """Kill all that is left, with its children."""
