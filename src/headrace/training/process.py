"""What a run changes of its process: signal handlers, thread counts (put back), open files."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import threadpoolctl
import torch

from headrace.distributed.child_process import SIGNALS, raise_open_files
from headrace.errors import ConfigError

_FILES_PER_WORKER = 7  # memory, pipes, its end, and what lies ready for it while it starts
_OTHER_FILES = 24  # the server and the tracker, the log, a checkpoint, and some of the user's own


class StopSignals:
    """Ctrl-C, SIGTERM and SIGHUP as a question that the loop asks; a second one interrupts.

    Args:
        patient: a second one does nothing: rank 0 decides.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.received, self._patient = 0, patient
        self.pass_on_to: list[int] = []
        """Processes (other ranks) that get the first one as well."""

    def __call__(self) -> bool:
        """Whether the run is to stop."""
        return self.received != 0

    def give_up(self) -> None:
        """Stop as if told to: nothing that is sampled can be used any more."""
        self.received = self.received or signal.SIGTERM

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals meanwhile (only Python's main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN  # a job that is to outlive its terminal
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: object) -> None:
        if self._patient:
            self.received = number
            return
        if self.received:
            raise KeyboardInterrupt(number)
        self.received = number
        for pid in self.pass_on_to:
            os.kill(pid, number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nStopping after this step, and saving. Once more: stop at once.\n")


@contextlib.contextmanager
def math_threads(count: int) -> Iterator[None]:
    """Give torch `count` threads and NumPy's libraries one, and put it back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def check_open_files(num_workers: int) -> None:
    """ConfigError if this process may not open the files that so many workers take."""
    needed = len(os.listdir("/proc/self/fd")) + _FILES_PER_WORKER * num_workers + _OTHER_FILES
    allowed = raise_open_files(needed)
    if allowed < needed:
        most = max(0, num_workers - -(-(needed - allowed) // _FILES_PER_WORKER))
        raise ConfigError(
            f"num_workers={num_workers} needs {needed} open files in this process, and it may have "
            f"{allowed}.\nUse at most {most} workers, or raise the limit: ulimit -n {needed}"
        )
