"""Process-wide settings of a run: signals, thread counts, freed memory, limit of open files."""

import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import threadpoolctl
import torch

from headrace.distributed.child_process import SIGNALS, raise_open_files
from headrace.errors import ConfigError

_FILES_PER_WORKER = 7  # memory, pipes, a socket, and what a worker needs while it starts
SAME_WITHIN_S = 0.5
"""A second signal of the kind within this time is the same request: `timeout` sends two."""
_SAVES = "saving after this step. Again: stop without saving."
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MIB = 2**20
_OTHER_FILES = 24  # the server, the log, a checkpoint, and some of the user's files


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP within the `with`, if this is Python's main thread.

    Ignored signals stay ignored: `nohup` lets a job outlive its terminal. Signals that were blocked
    while the process started come now.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heeded}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Raise KeyboardInterrupt within the `with` at the first signal that asks to stop."""
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        if not received:
            received.append(number)
            raise KeyboardInterrupt(number)

    return handle_signals(interrupt)


class StopSignals:
    """Whether the run is to stop: signals set it, the loop asks.

    A second signal interrupts at once, unless it comes within `SAME_WITHIN_S`.

    Args:
        says: what happens at the first signal, and at another one.
        patient: ignore a second signal, since rank 0 decides.

    Attributes:
        pass_on_to: process ids of other ranks, which get the first signal too.
    """

    def __init__(self, says: str = _SAVES, *, patient: bool = False) -> None:
        self.received, self._says, self._patient = 0, says, patient
        self._received_at = -math.inf
        self.pass_on_to: list[int] = []

    def __call__(self) -> bool:
        return self.received != 0

    def stop(self) -> None:
        """Request a stop as SIGTERM does."""
        self.received = self.received or signal.SIGTERM

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """Handle the signals within a `with`."""
        return handle_signals(self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        if self._patient:
            self.received = number
            return
        now = time.monotonic()
        if number == self.received and now - self._received_at < SAME_WITHIN_S:
            return
        if self.received:
            raise KeyboardInterrupt(number)
        self.received, self._received_at = number, now
        for pid in self.pass_on_to:
            with contextlib.suppress(ProcessLookupError):  # a rank that has ended
                os.kill(pid, number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\nStopping: {self._says}\n".encode())


@contextlib.contextmanager
def math_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads within the `with`, and NumPy's libraries one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let malloc keep what is freed within the `with`, instead of giving it back to the system.

    A gradient step allocates and frees the same arrays again and again. glibc gives back those of
    32 MiB or more at once, and what is free at the end of its heap soon; the system then clears
    each page anew when it is used, which shows with images. The memory is given back at the end.
    Other C libraries than glibc are left as they are.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # only glibc has it
        yield
        return
    # Larger arrays, as a replay buffer's, stay apart: they are few, and pages come when used.
    # An old glibc takes no more than 32 MiB.
    if not libc.mallopt(_M_MMAP_THRESHOLD, 256 * _MIB):
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # what glibc itself arrives at
        libc.mallopt(_M_TRIM_THRESHOLD, 64 * _MIB)
        libc.malloc_trim(0)


def files_needed(num_workers: int) -> int:
    """Return how many open files this process has, and will have beside them for more workers."""
    return len(os.listdir("/proc/self/fd")) + _FILES_PER_WORKER * num_workers + _OTHER_FILES


def check_open_files(num_workers: int) -> None:
    """Raise ConfigError if this process may not open the files that the workers need."""
    needed = files_needed(num_workers)
    allowed = raise_open_files(needed)
    if allowed < needed:
        most = max(0, num_workers - -(-(needed - allowed) // _FILES_PER_WORKER))
        raise ConfigError(
            f"num_workers={num_workers} needs {needed} open files in this process, and it may have "
            f"{allowed}.\nUse at most {most} workers, or raise the limit: ulimit -n {needed}"
        )
