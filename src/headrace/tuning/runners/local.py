"""Runs parts of runs on this machine, each in a process, and hears what becomes of them.

Left out: what is run next (`tuning/study.py`), and what a part does (`part.py`).
"""

import contextlib
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.distributed import sessions
from headrace.distributed.channel import pickled
from headrace.machine.limits import available_bytes
from headrace.tuning.runners.api import BY_NAME, STOP_TIMEOUT_S, Ended, Runner
from headrace.tuning.runners.part import Part, run_part

_CHECK_EVERY_S = 0.5
"""Interval of memory checks."""
MEMORY_SHARE = 0.8
"""Of what is free at the start, which all parts together may take."""


@dataclass
class _Running:
    key: Any
    process: sessions.SessionProcess
    stack: contextlib.ExitStack


class LocalRunner(Runner):
    """Processes of parts, at most `slots` at a time; to be closed.

    Args:
        max_bytes: memory of each; 0: its share of 80 % of what is free at the start.
    """

    def __init__(self, slots: int, max_bytes: int = 0) -> None:
        self._slots = slots
        self._running: list[_Running] = []
        share = int(MEMORY_SHARE * available_bytes() / slots)
        self._max_bytes = max_bytes or share
        self._kills = sessions.out_of_memory_kills()

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def keys(self) -> list[Any]:
        return [each.key for each in self._running]

    def start(self, key: Any, part: Part) -> None:
        self.start_pickled(key, pickled(part, "another process", BY_NAME))

    def start_pickled(self, key: Any, orders: bytes) -> None:
        """Start a part that is pickled."""
        with contextlib.ExitStack() as stack:  # a signal may come before it is listed
            process = sessions.SessionProcess(run_part, orders, stack)
            self._running.append(_Running(key, process, stack.pop_all()))

    def wait(self, deadline: float) -> list[Ended]:
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
        for each in self._running:
            each.process.stop(0.0)
        ends = time.monotonic() + STOP_TIMEOUT_S
        ended: list[Ended] = []
        while self._running and time.monotonic() < ends:
            ended += self.wait(ends)
        self.close()
        return ended

    def cancel(self, key: Any) -> None:
        for each in [each for each in self._running if each.key == key]:
            self._remove(each)

    def close(self) -> None:
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
