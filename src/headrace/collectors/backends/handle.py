"""A worker process as the learner holds it: started, listened to, ended.

Left out: when (`supervisor.py`, `synchronous.py`), and what it does (`worker_main.py`).
"""

import contextlib
import os
import select
import socket
import time
from multiprocessing.reduction import DupFd
from typing import Any

import cloudpickle

from headrace.collectors.backends import worker_main
from headrace.collectors.backends.channel import Channel
from headrace.collectors.backends.orders import Orders
from headrace.distributed.child_process import cause_of_death
from headrace.errors import SamplerError

_BURY_WITHIN_S = 10.0  # a killed process may still be in the middle of reading a disk
_STACK_WITHIN_S = 0.5
_QUIET_S = 0.05  # there is no end mark


class _Passed:
    """A file descriptor that the child inherits: it gets the number as it is there.

    Sent in any other way, multiprocessing would open a socket for the child to fetch it through.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _number_there, (DupFd(self._fd),)


def _number_there(passed: Any) -> int:
    return int(passed.detach())


class Handle:
    """Of one process.

    Args:
        context: of `forkserver.context`.
        orders: to it.
        weights, memory, plan, asks: file descriptors, see `worker.main`.
    """

    def __init__(
        self,
        context: Any,
        orders: Orders,
        weights: int,
        memory: int,
        plan: int,
        asks: int | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._words, their_words = os.pipe()
        orders_fd = in_memory("orders", cloudpickle.dumps(orders))
        try:
            given = [theirs.fileno(), weights, memory, their_words, plan, orders_fd]
            given += [] if asks is None else [asks]
            self.process = context.Process(
                target=worker_main.main, args=[_Passed(fd) for fd in given], daemon=True
            )
            self.process.start()
        except BaseException:
            ours.close()
            os.close(self._words)
            raise
        finally:
            theirs.close()
            os.close(their_words)
            os.close(orders_fd)
        os.set_blocking(self._words, False)

    @property
    def has_ended(self) -> bool:
        """Whether the process is no more."""
        return not self.process.is_alive()

    def stack(self) -> str:
        """Where a process that is stuck is; "" if it cannot say (it is stopped, or not Python)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, worker_main.STACK_SIGNAL)
        said, wait_s = "", _STACK_WITHIN_S
        while select.select([self._words], [], [], wait_s)[0]:
            if not (more := self._read_words()):
                break
            said, wait_s = said + more, _QUIET_S
        return said

    def cause(self) -> str:
        """How it ended, with the stack that it left if it crashed; waits for its end."""
        self.process.join(_BURY_WITHIN_S)
        code = self.process.exitcode
        if code is None:
            return "is ending"
        return "\n".join(filter(None, (*cause_of_death(code), self._read_words())))

    def end(self, deadline: float) -> None:
        """Wait for its end until `deadline` (monotonic), or kill it; raise what failed in it.

        Raises:
            SamplerError: it cannot be killed.
            EnvError: an environment failed in closing.
        """
        try:
            self.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C interrupts the waiting, not this
            self.process.kill()
            self.process.join(_BURY_WITHIN_S)
        if self.process.exitcode is None:
            raise SamplerError(
                f"Process {self.process.pid} cannot be killed: it waits for a device."
            )
        failed = None
        with contextlib.suppress(EOFError):  # it has said everything
            while messages := self.channel.take():
                failed = next((what for kind, _, what in messages if kind == "closing"), failed)
        self.channel.close()
        os.close(self._words)
        if failed is not None:
            raise failed

    def _read_words(self) -> str:
        said = b""
        with contextlib.suppress(BlockingIOError):  # that was all
            while piece := os.read(self._words, 1 << 16):
                said += piece
        lines = said.decode(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("Extension modules:"))


def in_memory(name: str, data: bytes) -> int:
    """A file in memory that holds `data`: its descriptor."""
    fd = os.memfd_create(f"headrace {name}")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd
