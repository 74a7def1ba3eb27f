"""All processes of a session: which they are, the memory that they take, signals, and their end.

A trial begins a session of its own, and whatever it starts belongs to it: workers, other learners,
an environment's own programs. Left out: what a trial is (`trial.py`).
"""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from headrace.training.process import handle_signals

_PAGE = os.sysconf("SC_PAGE_SIZE")
_END_WITHIN_S = 10.0  # a killed process may still be in the middle of reading a disk


def members(session: int) -> list[int]:
    """The processes of a session, without those that only wait for burial."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(name))
    return found


def resident_bytes(pids: list[int]) -> int:
    """An upper limit of what processes take, quickly read: what they share counts for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def own_bytes(pids: list[int]) -> int:
    """What processes take: of a page that several share, each has its part (PSS).

    That is asked of the kernel's `smaps_rollup`, which looks at every page; where there is none,
    `resident_bytes` has to do.
    """
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(
                int(line.split()[1]) << 10
                for line in rollup.splitlines()
                if line.startswith("Pss:")
            )
        except (OSError, StopIteration):
            total += resident_bytes([pid])
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Time of processors that processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Memory that can be had without swapping: as the kernel estimates it, and a container may."""
    available = os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is no limit ("max"), or no such file
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def out_of_memory_kills() -> int:
    """How often the kernel has ended a process of this machine for want of memory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Within the `with`, the first signal that asks to stop raises KeyboardInterrupt."""
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        if not received:
            received.append(number)
            raise KeyboardInterrupt(number)

    return handle_signals(interrupt)


def end(session: int) -> None:
    """Kill all processes of a session, and wait until they are gone."""
    deadline = time.monotonic() + _END_WITHIN_S
    while (pids := members(session)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
                os.close(fd)
