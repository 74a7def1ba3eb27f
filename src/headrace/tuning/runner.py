"""Runs parts of runs at the same time, each in a process, and hears what becomes of them.

Left out: what is run next (`study.py`), and what a part does (`trial_process.py`).
"""

import contextlib
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.distributed import sessions
from headrace.distributed.channel import pickled
from headrace.tuning.trial_process import Part, run_part

_CHECK_EVERY_S = 0.5
"""Interval of memory checks."""
_STOP_TIMEOUT_S = 20.0  # for a checkpoint, before the process is killed
_MEMORY_SHARE = 0.8


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


@dataclass
class _Running:
    key: Any
    process: sessions.SessionProcess
    stack: contextlib.ExitStack


class Runner:
    """Processes of parts, at most `slots` at a time; to be closed.

    Args:
        max_bytes: memory of each; 0: its share of 80 % of what is free at the start.
    """

    def __init__(self, slots: int, max_bytes: int = 0) -> None:
        self.slots = slots
        self._running: list[_Running] = []
        share = int(_MEMORY_SHARE * sessions.available_bytes() / slots)
        self._max_bytes = max_bytes or share
        self._kills = sessions.out_of_memory_kills()

    @property
    def keys(self) -> list[Any]:
        """What the parts under way were started with."""
        return [each.key for each in self._running]

    @property
    def is_full(self) -> bool:
        """Whether no other part can be started now."""
        return len(self._running) >= self.slots

    def start(self, key: Any, part: Part) -> None:
        """Start a part; UsageError if it cannot be sent to another process."""
        orders = pickled(part, "another process", "give the environment by a name, module:callable")
        with contextlib.ExitStack() as stack:  # a signal may come before it is listed
            process = sessions.SessionProcess(run_part, orders, stack)
            self._running.append(_Running(key, process, stack.pop_all()))

    def wait(self, deadline: float) -> list[Ended]:
        """Wait until parts have ended, or until `deadline` (`time.monotonic`); return them."""
        ended: list[Ended] = []
        while self._running and not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            waitables = [w for each in self._running for w in each.process.waitables]
            select.select(waitables, [], [], min(left, _CHECK_EVERY_S))
            ended = [end for each in list(self._running) for end in self._ends(each)]
        return ended

    def stop(self) -> list[Ended]:
        """Ask all to save and end; return how they did. What does not end in 20 s is killed."""
        for each in self._running:
            each.process.stop(0.0)
        ends = time.monotonic() + _STOP_TIMEOUT_S
        ended: list[Ended] = []
        while self._running and time.monotonic() < ends:
            ended += self.wait(ends)
        self.close()
        return ended

    def cancel(self, key: Any) -> None:
        """Kill a part that nobody needs any more."""
        for each in [each for each in self._running if each.key == key]:
            self._remove(each)

    def close(self) -> None:
        """Kill all that is left, with its children."""
        for each in list(self._running):
            self._remove(each)

    def _remove(self, running: _Running) -> None:
        self._running.remove(running)
        running.stack.close()

    def _ends(self, running: _Running) -> Iterator[Ended]:
        """Yield how a part has ended, if it has."""
        end = self._message(running)
        if end is None and (used := self._memory(running)) > self._max_bytes:
            gib = 1 << 30
            why = f"it used {used / gib:.1f} of {self._max_bytes / gib:.1f} GiB"
            end = Ended(running.key, "memory", why=why)
        if end is not None:
            self._remove(running)
            yield end

    def _message(self, running: _Running) -> Ended | None:
        try:
            for message in running.process.received():
                if "measured" in message:
                    return Ended(running.key, "measured", message["measured"])
                if "stopped" in message:
                    return Ended(running.key, "stopped")
                kind, why = message["failed"]
                return Ended(running.key, kind, why=why)
        except EOFError:
            cause = running.process.cause()
            kills, self._kills = self._kills, sessions.out_of_memory_kills()
            if self._kills > kills:
                return Ended(running.key, "memory", why=f"{cause}: the kernel was out of memory")
            return Ended(running.key, "crashed", why=cause)
        return None

    def _memory(self, running: _Running) -> int:
        """Return the memory of a part's processes, exactly only if it may be too much."""
        pids = sessions.members(running.process.session)
        resident = sessions.resident_bytes(pids)
        return sessions.own_bytes(pids) if resident > self._max_bytes else resident
