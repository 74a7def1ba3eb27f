"""Where worker processes come from: a server that has torch imported, and forks on request.

Imports nothing heavy, so that the server can be started first and import beside the learner.
Left out: what a worker does (`worker_main.py`).
"""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""By these a user, a batch system or a closing terminal asks a whole group of processes to stop."""

_OPEN_FILES = 1024  # the usual limit

_ONE_AT_A_TIME = threading.Lock()  # what is changed below belongs to the whole process


def raise_open_files(wanted: int) -> int:
    """Let this process, and those that it starts, open so many files; how many it may then.

    What a process may ask for by itself (the soft limit) is often far below what it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return sys.maxsize if soft == resource.RLIM_INFINITY else soft
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


@contextlib.contextmanager
def context() -> Iterator[Any]:
    """A multiprocessing context to start workers from.

    While it is open, the user's `__main__` is hidden, so that multiprocessing does not run the
    user's script again in each child (the reason for `if __name__ == "__main__"` elsewhere), and
    `SIGNALS` are blocked, which children inherit: the learner alone decides what follows.
    """
    with _ONE_AT_A_TIME:
        raise_open_files(_OPEN_FILES)  # the server keeps one of each worker
        start_from = multiprocessing.get_context("forkserver")
        start_from.set_forkserver_preload(["headrace.collectors.backends.worker_main"])
        resource_tracker.ensure_running()  # here: starting it unblocks them
        main = sys.modules["__main__"]
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield start_from
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def ignore_signals() -> None:
    """In a worker: let `SIGNALS` come and do nothing.

    By handlers, not by a mask: programs that an environment starts would inherit the mask.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def cause_of_death(code: int) -> tuple[str, str]:
    """How a process ended, by its exit code; and what may have done it, if it left no word."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"died ({how})", _ADVICE.get(code, "")


_ADVICE = {
    -signal.SIGKILL: "If you did not kill it, the kernel's out-of-memory killer may have: try "
    "fewer workers or envs."
}


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with_learner() -> None:
    """In a worker: be killed when the learner is, even in the middle of an environment's step.

    The server ends when the learner's end of a pipe closes, and takes the workers with it (Linux's
    parent-death signal). But multiprocessing hands that end to every child too, in case it wants
    to start processes of its own: closed here, or a worker that is stuck would keep all alive.
    """
    end_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def warm_up() -> None:
    """Start the server now: its imports take as long as ours, on another core."""
    with context():
        forkserver.ensure_running()
