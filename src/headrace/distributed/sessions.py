"""Processes that begin a session: started, heard, measured, and ended with all their children.

A session's processes are its first one and all that it starts: workers, other learners, an
environment's programs. Left out: what runs in them (`tools/autoscale/trial.py`,
`tuning/runners/part.py`).
"""

import contextlib
import os
import re
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from headrace.distributed import child_process
from headrace.errors import (
    CheckpointError,
    EnvError,
    HeadraceError,
    NonFiniteError,
    RunDirError,
    UsageError,
)

_PAGE = os.sysconf("SC_PAGE_SIZE")
_END_TIMEOUT_S = 10.0  # a killed process may still wait for a disk
_OUT_OF_MEMORY = re.compile(
    r"^([\w.]*(MemoryError|OutOfMemoryError)\b.*|.*(can't|[Cc]annot) allocate memory.*)$", re.M
)

Failure = Literal["memory", "env", "refused", "diverged", "disk", "crashed"]
"""Why a process failed: it ran out of memory, its environment raised, its settings are invalid, a
gradient was not finite, its directory cannot be written, or anything else."""


class SessionProcess:
    """The first process of a session, which the fork server starts.

    Args:
        main: runs in it as `main(orders, pipe)`, calls `begin_session` first, and sends messages.
        orders: a pickled object.
        stack: ends the session when it is closed.
    """

    def __init__(
        self, main: Callable[[bytes, Any], None], orders: bytes, stack: contextlib.ExitStack
    ) -> None:
        with child_process.context() as context:  # no signal comes before cleanup is registered
            self._pipe, child_pipe = context.Pipe(duplex=False)
            stack.callback(self._pipe.close)
            self._process = context.Process(target=main, args=(orders, child_pipe))
            self._process.start()
            self.session: int = self._process.pid
            stack.callback(self._end)
            child_pipe.close()

    @property
    def waitables(self) -> tuple[Any, int]:
        """Objects for `select.select`: ready when the process sends or ends."""
        return self._pipe, self._process.sentinel

    def received(self) -> Iterator[Any]:
        """Yield the messages that have come; EOFError after the last one of an ended process."""
        try:
            while self._pipe.poll():
                yield self._pipe.recv()
        except OSError as error:
            raise EOFError from error

    def cause(self) -> str:
        """Wait for the end, and describe it."""
        self._process.join()
        return child_process.cause_of_death(self._process.exitcode)[0]

    def stop(self, wait_s: float) -> None:
        """Ask it to stop as a user would, and wait for the end for at most so long."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.session, signal.SIGTERM)
        self._process.join(wait_s)

    def _end(self) -> None:
        self._process.kill()
        end(self.session)
        self._process.join()
        self._process.close()


def begin_session() -> None:
    """Begin a session in the process that `SessionProcess` started; it ends with its parent."""
    os.setsid()
    child_process.end_with_learner()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, child_process.SIGNALS)
    write_output(os.devnull)


def write_output(path: str) -> None:
    """Append what this process prints to a file from now on."""
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(written, standard)
    os.close(written)


def failure(error: BaseException) -> tuple[Failure, str]:
    """Return the kind of an error, and its reason: of an environment's error the whole text."""
    text = str(error) if isinstance(error, HeadraceError) else traceback.format_exc()
    if match := _OUT_OF_MEMORY.search(text):
        return "memory", match[0].strip().partition(". ")[0]
    if isinstance(error, EnvError):
        return "env", text
    if isinstance(error, RunDirError) and not isinstance(error, CheckpointError):
        return "disk", text
    lines = [line for line in text.splitlines() if line.strip()]
    if isinstance(error, UsageError):
        return "refused", lines[0]
    # The error is the last line of a traceback, and the first line of our own errors.
    reason = lines[-1] if text.startswith("Traceback") else lines[0]
    return "diverged" if isinstance(error, NonFiniteError) else "crashed", reason


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


def out_of_memory_kills() -> int:
    """Return how many processes of this machine the kernel has killed to free memory."""
    return _number("/proc/vmstat", "oom_kill") or 0


def _number(path: str, name: str) -> int | None:
    """Return the number after a name at the beginning of a line of a file."""
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{name}\s+(\d+)", Path(path).read_text(), re.MULTILINE):
            return int(match[1])
    return None


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
