"""The processes of a session: list, memory, CPU time, end.

A trial begins a session. All processes that it starts belong to it: workers, other learners, an
environment's programs.
"""

import contextlib
import os
import re
import select
import signal
import time
from pathlib import Path

from headrace.training.process import handle_signals

_PAGE = os.sysconf("SC_PAGE_SIZE")
_END_TIMEOUT_S = 10.0  # a killed process may still wait for a disk


def members(session: int) -> list[int]:
    """Return the processes of a session, without zombies."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            fields = _stat(int(name))
            if int(fields[3]) == session and fields[0] not in "ZX":
                pids.append(int(name))
    return pids


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's `stat` from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def resident_bytes(pids: list[int]) -> int:
    """Return an upper bound of the memory; shared pages count for each process. This is fast."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def own_bytes(pids: list[int]) -> int:
    """Return the proportional memory (PSS): a shared page is divided among its processes.

    The kernel's `smaps_rollup` looks at every page. Where it is missing, use `resident_bytes`.
    """
    total = 0
    for pid in pids:
        kib = _number(f"/proc/{pid}/smaps_rollup", "Pss:")
        total += resident_bytes([pid]) if kib is None else kib << 10
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds that processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _stat(pid)[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def available_bytes() -> int:
    """Return the memory that is available without swapping, within a container's limit."""
    kib = _number("/proc/meminfo", "MemAvailable:")
    available = os.sysconf("SC_AVPHYS_PAGES") * _PAGE if kib is None else kib << 10
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # there is no limit ("max"), or no such file
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available


def out_of_memory_kills() -> int:
    """Return how many processes of this machine the kernel has killed to free memory."""
    return _number("/proc/vmstat", "oom_kill") or 0


def _number(path: str, name: str) -> int | None:
    """Return the number after a name at the beginning of a line of a file."""
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{name}\s+(\d+)", Path(path).read_text(), re.MULTILINE):
            return int(match[1])
    return None


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt within the `with` at the first signal that asks to stop."""
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        if not received:
            received.append(number)
            raise KeyboardInterrupt(number)

    return handle_signals(interrupt)


def end(session: int) -> None:
    """Kill all processes of a session, and wait until they have ended."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (pids := members(session)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
                os.close(fd)
