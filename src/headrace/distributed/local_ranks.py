"""The other learners of `--num-learners N`: processes that this one, rank 0, starts and outlives.

Each is a fresh Python (it will start workers of its own) that gets what to run through an inherited
pipe, and reports through it what failed. They find each other over a port of the loopback that the
system chooses, so that two jobs never want the same one. The kernel ends them with rank 0.

Left out: ranks that torchrun starts (`torchrun.py`), and what a rank does.
"""

import contextlib
import datetime
import faulthandler
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, connection
from typing import Any

import cloudpickle
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.distributed.child_process import cause_of_death, end_with_parent
from headrace.distributed.ranks import Backend, JoinedRanks, RankInfo, device_of
from headrace.errors import HeadraceError, RankError, UsageError

_JOIN_WITHIN_S = 60.0  # a fresh Python and its imports
_NOTICE_WITHIN_S = 5.0  # that another rank is lost
_REPORT_WITHIN_S = 3.0  # between a rank's death as others see it, and its own words
_END_WITHIN_S = 10.0

Follow = Callable[..., None]
"""What another rank runs: `follow(job, *arguments)`."""


@contextlib.contextmanager
def launch_ranks(
    size: int,
    backend: Backend,
    device: str,
    limit_s: float,
    on_loss: Callable[[], None],
    follow: Follow,
    *arguments: Any,
) -> Iterator[tuple[JoinedRanks, list[int]]]:
    """Start ranks 1 to `size - 1`, and be rank 0; gives the job and their process ids.

    A rank 0 that neither meets the others nor stops when one of them is lost is stuck: the process
    ends then, with its stacks.

    Args:
        size: how many ranks, this one included.
        backend: see `JoinedRanks`.
        limit_s: see `JoinedRanks`.
        device: setting; each rank takes its own.
        on_loss: called, from a thread, when another rank is lost; is to stop this one's sampling.
        follow: run by each of the others.
        arguments: sent to them by cloudpickle.

    Raises:
        HeadraceError: the first that a rank raised, with its rank; RankError if one died.
    """
    own, *_ = [device_of(device, rank) for rank in range(size)]  # before anything is started
    others: list[_Other] = []
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(_loopback_only())
        store = host_store("127.0.0.1")
        orders = pickled((follow, store.port, size, backend, device, limit_s, arguments))
        others += (_Other(rank, size, orders) for rank in range(1, size))
        for other in others:
            other.wait_until_ready()
        job = JoinedRanks(RankInfo(0, size, 0), store, backend, own, limit_s)
        with contextlib.closing(job), _watched(others, on_loss):
            yield job, [other.process.pid for other in others]
        for other in others:
            other.finish()
    except RankError as error:
        raise _cause(others) or error from error
    finally:
        stack.close()
        for other in others:
            other.end()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Meanwhile, gloo and NCCL listen there, here and in processes that are started."""
    names = {f"{library}_SOCKET_IFNAME": "lo" for library in ("GLOO", "NCCL")}
    added = {name: value for name, value in names.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def pickled(orders: Any, to: str = "other learners") -> bytes:
    """What other processes are told, to be sent; UsageError if it cannot be."""
    try:
        return bytes(cloudpickle.dumps(orders))
    except Exception as error:
        raise UsageError(
            f"The run cannot be sent to {to}: {type(error).__name__}: {error}.\n"
            "What makes the environment must not carry open files, locks or devices."
        ) from error


class _Other:
    """Rank 0's end of another rank."""

    def __init__(self, rank: int, size: int, orders: bytes) -> None:
        self.rank, self._size = rank, size
        self.pipe, theirs = Pipe()
        code = f"from headrace.distributed.local_ranks import main; main({theirs.fileno()}, {rank})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # a Ctrl-C comes to rank 0, which passes it on
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.pipe.send(orders)

    def wait_until_ready(self) -> None:
        """Until it has its orders; RankError if it cannot."""
        said = self._receive(_JOIN_WITHIN_S)
        if said != "ready":
            raise RankError(f"Rank {self.rank} of {self._size} did not start.")

    def finish(self) -> None:
        """Wait for its end; RankError if it failed."""
        try:
            self.process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RankError(f"Rank {self.rank} has not ended.") from None
        if self.process.returncode:
            raise RankError(f"Rank {self.rank} failed.")

    def failure(self, deadline: float) -> tuple[float, HeadraceError] | None:
        """When it failed and of what, as it says itself; a death without words counts as last."""
        said = self._receive(deadline - time.monotonic())
        if isinstance(said, tuple):
            at, error = said
            return at, error.of_rank(self.rank, self._size)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        code = self.process.returncode
        if code is None:
            return None
        died, advice = cause_of_death(code)
        said = f"Rank {self.rank} of {self._size} {died}."
        return float("inf"), RankError("\n".join(filter(None, (said, advice))))

    def _receive(self, within_s: float) -> Any:
        try:
            return self.pipe.recv() if self.pipe.poll(max(0.0, within_s)) else None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


@contextlib.contextmanager
def _watched(others: list[_Other], on_loss: Callable[[], None]) -> Iterator[None]:
    ended, waker = Pipe()

    def watch() -> None:
        deaths = {os.pidfd_open(other.process.pid): other for other in others}
        while ended not in (ready := connection.wait([ended, *deaths])):
            for fd in ready:
                other = deaths.pop(fd)  # type: ignore[arg-type]
                os.close(fd)  # type: ignore[arg-type]
                if other.process.poll():
                    on_loss()
                    if not ended.poll(_NOTICE_WITHIN_S):
                        _end_here(others)
        for fd in deaths:
            os.close(fd)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        waker.send(None)
        thread.join()
        waker.close()
        ended.close()


def _end_here(others: list[_Other]) -> None:
    """Say why, and what this process is stuck in; end it and the others."""
    print(f"{_cause(others)}\nRank 0 is stuck as well, here:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)
    for other in others:
        other.process.kill()
    os._exit(1)


def _cause(others: list[_Other]) -> HeadraceError | None:
    """What began it: the first error that is more than the loss of another rank."""
    deadline = time.monotonic() + _REPORT_WITHIN_S
    found = [failure for other in others if (failure := other.failure(deadline))]
    own = [failure for failure in found if type(failure[1]) is not RankError]
    died = [failure for failure in found if failure[0] == float("inf")]
    for candidates in (own, died, found):
        if candidates:
            return min(candidates, key=lambda failure: failure[0])[1]
    return None


def main(fd: int, rank: int) -> None:
    """Another rank's process, from its first line to its last."""
    faulthandler.enable()
    end_with_parent()
    pipe: Any = connection.Connection(fd)
    try:
        follow, port, size, backend, device, limit_s, arguments = cloudpickle.loads(pipe.recv())
        pipe.send("ready")
        store = connect_store("127.0.0.1", port)
        place = RankInfo(rank, size, rank)
        job = JoinedRanks(place, store, backend, device_of(device, rank), limit_s)
        with contextlib.closing(job):
            follow(job, *arguments)
    except EOFError:
        sys.exit(1)  # rank 0 is gone
    except HeadraceError as error:
        _report(pipe, error)
    except Exception:
        _report(pipe, RankError(traceback.format_exc()))


def _report(pipe: Any, error: HeadraceError) -> None:
    with contextlib.suppress(OSError):  # rank 0 is gone as well
        pipe.send((time.monotonic(), error))
    sys.exit(1)


def host_store(host: str) -> TCPStore:
    """A job's store, on a port of this address: TCPStore by itself listens on all addresses."""
    listening = socket.create_server((host, 0), backlog=128)
    port = listening.getsockname()[1]
    return _store(host, port, is_master=True, master_listen_fd=listening.detach())


def connect_store(host: str, port: int) -> TCPStore:
    """The same store, from another process."""
    return _store(host, port, is_master=False)


def _store(host: str, port: int, **how: Any) -> TCPStore:
    return TCPStore(
        host,
        port,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_JOIN_WITHIN_S),
        **how,
    )
