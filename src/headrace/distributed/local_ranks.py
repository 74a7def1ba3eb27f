"""The other learners of `--num-learners N`: processes that rank 0 starts, watches and ends.

Each is a fresh Python (it starts workers of its own) that gets its task through an inherited pipe
and reports errors through it. Ranks meet on a port of the loopback that the system chooses, so two
jobs never collide. The kernel ends them with rank 0.
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
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe, connection
from typing import Any, NamedTuple

import cloudpickle
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.distributed.channel import pickled
from headrace.distributed.child_process import cause_of_death, end_with_parent
from headrace.distributed.ranks import Backend, JoinedRanks, RankInfo, device_of
from headrace.distributed.stuck import end_stuck
from headrace.errors import HeadraceError, RankError

_JOIN_WITHIN_S = 60.0  # a fresh Python and its imports
_NOTICE_WITHIN_S = 5.0  # for rank 0, that another rank is lost
_REPORT_WITHIN_S = 3.0  # for a rank, to report its own error after others saw it end
_END_WITHIN_S = 10.0


@contextlib.contextmanager
def launch_ranks(
    size: int,
    backend: Backend,
    device: str,
    limit_s: float,
    on_loss: Callable[[], None],
    follow: Callable[..., None],
    *arguments: Any,
) -> Iterator[tuple[JoinedRanks, list[int]]]:
    """Start ranks 1 to `size - 1`, and join them as rank 0; yield the ranks and process ids.

    If another rank is lost and rank 0 neither notices nor stops, this process prints its stacks
    and ends.

    Args:
        on_loss: called by a thread when another rank is lost; must stop this rank's workers.
        follow: each other rank runs `follow(ranks, *arguments)`; both are pickled by value.

    Raises:
        HeadraceError: the first error of a rank, with its rank; RankError if one died.
    """
    # All devices are checked before a process is started.
    first_device, *_ = [device_of(device, rank) for rank in range(size)]
    others: list[_OtherRank] = []
    stack = contextlib.ExitStack()
    try:
        # gloo and NCCL listen there, in this process and those it starts.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        stack.enter_context(environment({name: os.environ.get(name, "lo") for name in names}))
        store = host_store("127.0.0.1")
        task = pickled(
            (follow, store.port, size, backend, device, limit_s, arguments), "other learners"
        )
        others += (_OtherRank(rank, size, task) for rank in range(1, size))
        for other in others:
            other.wait_until_ready()
        ranks = JoinedRanks(RankInfo(0, size, 0), store, backend, first_device, limit_s)
        with contextlib.closing(ranks), _watched(others, on_loss):
            yield ranks, [other.process.pid for other in others]
        for other in others:
            other.finish()
    except RankError as error:
        raise _error_of(others) or error from error
    finally:
        stack.close()
        for other in others:
            other.end()


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the `with`."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Failure(NamedTuple):
    """The failure of a rank; `at` is infinite if it died without a report."""

    at: float
    rank: int
    error: HeadraceError


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that caused the others.

    It is the first error that is more than the loss of another rank; else a death; else the first
    report of a loss.
    """

    def precedence(failure: Failure) -> tuple[int, float, int]:
        is_loss = type(failure.error) is RankError
        return is_loss + (is_loss and failure.at < float("inf")), failure.at, failure.rank

    return min(failures, key=precedence, default=None)


class _OtherRank:
    """Rank 0's end of another rank's process."""

    def __init__(self, rank: int, size: int, task: bytes) -> None:
        self.rank, self._size = rank, size
        self.pipe, there = Pipe()
        code = f"from headrace.distributed.local_ranks import main; main({there.fileno()}, {rank})"
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C reaches rank 0 alone, which passes it on
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.pipe.send(task)

    def wait_until_ready(self) -> None:
        """Wait until it has its task; RankError if it does not come."""
        if self._receive(_JOIN_WITHIN_S) != "ready":
            raise RankError(f"Rank {self.rank} of {self._size} did not start.")

    def finish(self) -> None:
        """Wait until it ends; RankError if it fails."""
        try:
            self.process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RankError(f"Rank {self.rank} has not ended.") from None
        if self.process.returncode:
            raise RankError(f"Rank {self.rank} failed.")

    def failure(self, deadline: float) -> Failure | None:
        """Return its failure, by its report or its exit code; None if it runs on."""
        report = self._receive(deadline - time.monotonic())
        if isinstance(report, tuple):
            at, error = report
            return Failure(at, self.rank, error.of_rank(self.rank, self._size))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        if (code := self.process.returncode) is None:
            return None
        died, advice = cause_of_death(code)
        text = f"Rank {self.rank} of {self._size} {died}."
        return Failure(float("inf"), self.rank, RankError("\n".join(filter(None, (text, advice)))))

    def _receive(self, within_s: float) -> Any:
        try:
            return self.pipe.recv() if self.pipe.poll(max(0.0, within_s)) else None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


@contextlib.contextmanager
def _watched(others: list[_OtherRank], on_loss: Callable[[], None]) -> Iterator[None]:
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


def _end_here(others: list[_OtherRank]) -> None:
    """Print the cause and the stacks of this process; end all ranks."""
    error = _error_of(others)
    for other in others:
        other.process.kill()
    end_stuck(f"{error}\nRank 0 is stuck as well, here:")


def _error_of(others: list[_OtherRank]) -> HeadraceError | None:
    deadline = time.monotonic() + _REPORT_WITHIN_S
    cause = first_cause(filter(None, (other.failure(deadline) for other in others)))
    return cause.error if cause else None


def main(fd: int, rank: int) -> None:
    """Run the process of another rank."""
    faulthandler.enable()
    end_with_parent()
    pipe: Any = connection.Connection(fd)
    failure: HeadraceError
    try:
        follow, port, size, backend, device, limit_s, arguments = cloudpickle.loads(pipe.recv())
        pipe.send("ready")
        store = connect_store("127.0.0.1", port)
        info = RankInfo(rank, size, rank)
        ranks = JoinedRanks(info, store, backend, device_of(device, rank), limit_s)
        with contextlib.closing(ranks):
            follow(ranks, *arguments)
        return
    except EOFError:
        sys.exit(1)  # rank 0 is gone
    except HeadraceError as error:
        failure = error
    except Exception:
        failure = RankError(traceback.format_exc())
    with contextlib.suppress(OSError):  # rank 0 is gone as well
        pipe.send((time.monotonic(), failure))
    sys.exit(1)


def host_store(host: str) -> TCPStore:
    """Open a job's store on a port of this address; TCPStore alone listens on all addresses."""
    listening = socket.create_server((host, 0), backlog=128)
    port, fd = listening.getsockname()[1], listening.detach()
    return connect_store(host, port, is_master=True, master_listen_fd=fd)


def connect_store(host: str, port: int, **options: Any) -> TCPStore:
    """Connect to the store of another process."""
    limit = datetime.timedelta(seconds=_JOIN_WITHIN_S)
    return TCPStore(host, port, wait_for_workers=False, timeout=limit, **options)
