"""Child processes: forked by a server that has torch imported, heard through a channel, and ended.

Imports nothing heavy, so that the server can be started first and import beside the learner.
Left out: what a worker does (`collectors/backends/worker_main.py`), and the evaluation process
(`evaluation/process.py`).
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import operator
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any

from headrace.errors import WorkerError

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""By these a user, a batch system or a closing terminal asks a group of processes to stop."""
STACK_SIGNAL = signal.SIGUSR1
"""Asks a child for its stack; Python's fault handler answers, even in a child that hangs."""

_OPEN_FILES = 1024  # the usual limit
_BURY_WITHIN_S = 10.0  # a killed process may still be in the middle of reading a disk
_STACK_WITHIN_S = 1.0  # a busy machine takes long to run the handler
_STACK_ENDS_S = 0.05  # a stack has no end mark: so long a silence ends it
_ONE_AT_A_TIME = threading.Lock()  # what is changed below belongs to the whole process
_PRELOADED = ["headrace.collectors.backends.worker_main"]  # what the server imports at its start


def raise_open_files(count: int) -> int:
    """Let this process and its children open `count` files. Return how many they may open then."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in limits)
    if soft < count:  # often far below the hard limit
        soft = min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    return soft


@contextlib.contextmanager
def context() -> Iterator[Any]:
    """Give a multiprocessing context to start workers from.

    While it is open, the user's `__main__` is hidden: multiprocessing would run the user's script
    again in each child (the reason for `if __name__ == "__main__"` elsewhere). `SIGNALS` are
    blocked, which children inherit: the learner alone decides what follows.
    """
    with _ONE_AT_A_TIME:
        raise_open_files(_OPEN_FILES)  # the server keeps one of each worker
        start_from = multiprocessing.get_context("forkserver")
        start_from.set_forkserver_preload(_PRELOADED)
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
    """Let `SIGNALS` come to this worker and do nothing.

    By handlers, not by a mask: programs that an environment starts would inherit the mask.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def cause_of_death(code: int) -> tuple[str, str]:
    """Describe how a process ended, by its exit code, and what may have ended it ("": unknown)."""
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"died ({reason})", _KILLED if code == -signal.SIGKILL else ""


_KILLED = (
    "If you did not kill it, the kernel's out-of-memory killer may have: try fewer workers or envs."
)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with_learner() -> None:
    """Have this worker killed when the learner is, even in the middle of an environment's step.

    The server ends when the learner's end of a pipe closes, and takes the workers with it (Linux's
    parent-death signal). Multiprocessing hands that end to every child too, to start processes of
    its own: it is closed here, or a worker that is stuck would keep all alive.
    """
    end_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    learner = multiprocessing.parent_process()
    if learner is not None and not learner.is_alive():  # before the server could pass that on
        os.kill(os.getpid(), signal.SIGKILL)


def begin(stack: int) -> None:
    """Begin as a child of the learner: end with it, and write stacks to its pipe when asked."""
    ignore_signals()
    end_with_learner()
    os.set_blocking(stack, False)
    faulthandler.enable(stack)
    faulthandler.register(STACK_SIGNAL, stack)


def warm_up(*modules: str) -> None:
    """Start the server now: its imports take as long as this process's, on another core.

    Args:
        modules: that it imports as well, unless it runs already.
    """
    _PRELOADED.extend(module for module in modules if module not in _PRELOADED)
    with context():
        forkserver.ensure_running()


class _Inherited:
    """A file descriptor for the child, which gets its number there.

    Sent in any other way, multiprocessing would open a socket for the child to fetch it through.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return operator.methodcaller("detach"), (DupFd(self._fd),)


class ChildProcess:
    """A process that the server forks, with a channel to it and a pipe for its stack.

    Args:
        main: runs in it, with file descriptors: `main(channel, stack, orders, *fds)`.
        orders: a pickled object, which the child reads from a file in memory.
        fds: file descriptors that the child inherits.
    """

    def __init__(self, main: Callable[..., None], orders: bytes, fds: Sequence[int]) -> None:
        from headrace.distributed.channel import Channel  # pickling by value takes long to import

        here, there = socket.socketpair()
        self.channel = Channel(here)
        self._stack, stack = os.pipe()
        orders_fd = file_in_memory("orders", orders)
        inherited = [_Inherited(fd) for fd in (there.fileno(), stack, orders_fd, *fds)]
        try:
            with context() as start_from:
                self.process = start_from.Process(target=main, args=inherited, daemon=True)
                self.process.start()
        except BaseException:
            here.close()
            os.close(self._stack)
            raise
        finally:
            there.close()
            os.close(stack)
            os.close(orders_fd)
        os.set_blocking(self._stack, False)

    @property
    def waitables(self) -> tuple[Any, int]:
        """Objects for `multiprocessing.connection.wait`: ready when the child sends or ends."""
        return self.channel, self.process.sentinel

    def wait(self, wait_s: float) -> None:
        """Wait at most so long for the child to send or end."""
        connection.wait(self.waitables, wait_s)

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return not self.process.is_alive()

    def stack(self) -> str:
        """Ask a child that hangs for its stack; "" if it is stopped, or not in Python."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        text, wait_s = "", _STACK_WITHIN_S
        ready = select.poll()  # select takes no descriptor above 1023
        ready.register(self._stack, select.POLLIN)
        while ready.poll(wait_s * 1000):
            if not (more := self._read_stack()):
                break
            text, wait_s = text + more, _STACK_ENDS_S
        return text

    def cause(self) -> str:
        """Wait for the end, and describe it, with the stack of a child that crashed."""
        self.process.join(_BURY_WITHIN_S)
        code = self.process.exitcode
        if code is None:
            return "is ending"
        return "\n".join(filter(None, (*cause_of_death(code), self._read_stack())))

    def end(self, deadline: float) -> list[Any]:
        """Wait for the end until `deadline` (monotonic), then kill the child.

        Returns:
            Messages that were not read.

        Raises:
            WorkerError: it cannot be killed.
        """
        try:
            self.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C interrupts the waiting, not this
            self.process.kill()
            self.process.join(_BURY_WITHIN_S)
        if self.process.exitcode is None:
            raise WorkerError(
                f"Process {self.process.pid} cannot be killed: it waits for a device."
            )
        unread: list[Any] = []
        with contextlib.suppress(EOFError):  # it has sent everything
            while messages := self.channel.take():
                unread += messages
        self.channel.close()
        os.close(self._stack)
        return unread

    def _read_stack(self) -> str:
        text = b""
        with contextlib.suppress(BlockingIOError):  # that was all
            while piece := os.read(self._stack, 1 << 16):
                text += piece
        lines = text.decode(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("Extension modules:"))


def file_in_memory(name: str, data: bytes) -> int:
    """Make an anonymous file that holds `data`. Return its descriptor."""
    fd = os.memfd_create(f"headrace {name}")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def read_file(fd: int) -> bytes:
    """Read all of an anonymous file, wherever others have read to. Close it."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return data
