"""The other learners of `--num-learners N`: processes that rank 0 starts, watches and ends.

Each is a fresh Python (it starts workers of its own) that gets its task through an inherited pipe
and reports errors through it. Ranks meet on a port of the loopback that the system chooses, so two
jobs never collide. The kernel ends them with rank 0. One that dies without a report is replaced, if
the job can go on without what it had (`training/rejoin.py`); the ranks then form another *group*.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe, connection
from typing import Any, NamedTuple

import cloudpickle

from headrace.distributed.channel import pickled
from headrace.distributed.child_process import SIGNALS, cause_of_death, end_with_parent
from headrace.distributed.groups import JOIN_WITHIN_S, announce, connect_store, host_store, join
from headrace.distributed.ranks import Backend, JoinedRanks, RankInfo, device_of
from headrace.distributed.stuck import end_stuck
from headrace.errors import HeadraceError, RankError
from headrace.timeouts import RestartRate

_NOTICE_WITHIN_S = 5.0  # for rank 0, that another rank is lost
_REPORT_WITHIN_S = 3.0  # for a rank, to report its own error after others saw it end
_END_WITHIN_S = 60.0  # of a machine that is busy with other work


@contextlib.contextmanager
def launch_ranks(
    size: int,
    backend: Backend,
    device: str,
    limit_s: float,
    on_loss: Callable[[], None],
    max_replaced: int,
    follow: Callable[..., None],
    *arguments: Any,
) -> Iterator[tuple[JoinedRanks, list[int]]]:
    """Start ranks 1 to `size - 1`, and join them as rank 0; yield the ranks and process ids.

    The list of process ids changes when a rank is replaced. If another rank is lost for good and
    rank 0 neither notices nor stops, this process prints its stacks and ends.

    Args:
        on_loss: called by a thread when another rank is lost for good; must stop this rank's
            workers.
        max_replaced: how many lost ranks are replaced in 10 minutes.
        follow: each other rank runs `follow(ranks, *arguments)`; both are pickled by value.

    Raises:
        HeadraceError: the first error of a rank, with its rank; RankError if one died.
    """
    # All devices are checked before a process is started.
    first_device, *_ = [device_of(device, rank) for rank in range(size)]
    others = _Others(size, max_replaced)
    stack = contextlib.ExitStack()
    try:
        # gloo and NCCL listen there, in this process and those it starts.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        stack.enter_context(environment({name: os.environ.get(name, "lo") for name in names}))
        store = host_store("127.0.0.1")
        others.start(
            store.port,
            pickled(
                (follow, store.port, size, backend, device, limit_s, max_replaced > 0, arguments),
                "other learners",
            ),
        )
        ranks = join(
            store, RankInfo(0, size, 0), backend, first_device, limit_s, replaces=max_replaced > 0
        )
        with contextlib.closing(ranks), others.watched(on_loss):
            yield ranks, others.pids
        for other in others.ranks:
            other.finish()
    except RankError as error:
        raise others.error() or error from error
    finally:
        stack.close()
        others.end()


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
        is_loss = isinstance(failure.error, RankError)
        return is_loss + (is_loss and failure.at < float("inf")), failure.at, failure.rank

    return min(failures, key=precedence, default=None)


class _OtherRank:
    """Rank 0's end of another rank's process, which first joins this `group`."""

    def __init__(self, rank: int, size: int, task: bytes, group: int) -> None:
        self.rank, self._size = rank, size
        self.pipe, there = Pipe()
        arguments = f"{there.fileno()}, {rank}, {group}"
        code = f"from headrace.distributed.local_ranks import main; main({arguments})"
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                process_group=0,  # Ctrl-C reaches rank 0 alone, which passes it on
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._sentinel = -1
        self._report: Any = None
        self.pipe.send(task)

    def wait_until_ready(self) -> None:
        """Wait until it has its task; RankError if it does not come."""
        if self._receive(JOIN_WITHIN_S) != "ready":
            raise RankError(f"Rank {self.rank} of {self._size} did not start.")

    def finish(self) -> None:
        """Wait until it ends; RankError if it fails."""
        try:
            self.process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RankError(f"Rank {self.rank} has not ended.") from None
        if self.process.returncode:
            raise RankError(f"Rank {self.rank} failed.")

    @property
    def sentinel(self) -> int:
        """A file descriptor that is ready once the process has ended."""
        if self._sentinel < 0:
            self._sentinel = os.pidfd_open(self.process.pid)
        return self._sentinel

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def failure(self, deadline: float) -> Failure | None:
        """Return its failure, by its report or its exit code; None if it runs on."""
        report = self._report or self._receive(deadline - time.monotonic())
        if isinstance(report, tuple):
            self._report = report
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
        if self._sentinel >= 0:
            os.close(self._sentinel)
            self._sentinel = -1


class _Others:
    """The processes of ranks 1 to `size - 1`, started, watched and replaced by rank 0."""

    def __init__(self, size: int, max_replaced: int) -> None:
        self._size, self._max_replaced = size, max_replaced
        self._replaced = RestartRate(max_replaced)
        self._too_often = self._is_ending = False
        self._has_stopped, self._have_ended = threading.Event(), threading.Event()
        self._died: list[Failure] = []
        self.ranks: list[_OtherRank] = []
        self.pids: list[int] = []

    def start(self, port: int, task: bytes) -> None:
        """Start all, and wait until they have the task; RankError if one does not come."""
        self._task, self._group = task, 0
        # A connection of its own: another thread may wait on rank 0's.
        self._store = connect_store("127.0.0.1", port)
        self.ranks += (_OtherRank(rank, self._size, task, 0) for rank in range(1, self._size))
        self.pids += (other.process.pid for other in self.ranks)
        for other in self.ranks:
            other.wait_until_ready()

    @contextlib.contextmanager
    def watched(self, on_loss: Callable[[], None]) -> Iterator[None]:
        """Replace ranks that are lost within the `with`, or call `on_loss` and end all."""
        ended, waker = Pipe()

        def watch() -> None:
            # Successors inherit this while they import.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self._watch(ended, on_loss)
            finally:
                self._has_stopped.set()
                # The kernel ends the processes that a thread has started with that thread.
                self._have_ended.wait()

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # at once: it may be waiting for a successor
            self._is_ending = True
            for other in self.ranks:
                other.process.kill()
            raise
        finally:
            waker.send(None)
            self._has_stopped.wait()
            waker.close()
            ended.close()

    def end(self) -> None:
        """End all processes, whatever they do."""
        for other in self.ranks:
            other.end()
        self._have_ended.set()

    def _watch(self, ended: Any, on_loss: Callable[[], None]) -> None:
        while not ended.poll():
            running = [other.sentinel for other in self.ranks if not other.has_ended]
            lost = [other for other in self.ranks if other.process.returncode]
            if not lost:
                connection.wait([ended, *running])
            elif not self._replace(lost):
                on_loss()
                if not ended.poll(_NOTICE_WITHIN_S):
                    self._end_here()
                return

    def _replace(self, lost: list[_OtherRank]) -> bool:
        """Start successors, and have all form the next group; False: the job is to end."""
        self._group += 1
        words, replaced = [], set[int]()
        while lost and not self._is_ending:
            deadline = time.monotonic() + _REPORT_WITHIN_S
            failures = [other.failure(deadline) for other in lost]
            died = [each for each in failures if each is not None and each.at == float("inf")]
            self._too_often = not all([self._replaced.again(time.monotonic()) for _ in died])
            if len(died) < len(lost) or self._too_often:
                announce(self._store, self._group, None)
                return False
            words += [str(each.error) for each in died]
            self._died = died
            for other in lost:
                replaced.add(other.rank)
                other.end()
                successor = _OtherRank(other.rank, self._size, self._task, self._group)
                self.ranks[other.rank - 1] = successor
                self.pids[other.rank - 1] = successor.process.pid
            for other in lost:
                with contextlib.suppress(RankError):  # it has ended: found below
                    self.ranks[other.rank - 1].wait_until_ready()
            lost = [other for other in self.ranks if other.has_ended]
        announce(self._store, self._group, "\n".join(words), sorted(replaced))
        return True

    def _end_here(self) -> None:
        """Print the cause and the stacks of this process; end all ranks."""
        error = self.error()
        for other in self.ranks:
            other.process.kill()
        end_stuck(f"{error}\nRank 0 is stuck as well, here:")

    def error(self) -> HeadraceError | None:
        """Return the first cause of the job's end among these ranks; None: all run on."""
        deadline = time.monotonic() + _REPORT_WITHIN_S
        cause = first_cause(filter(None, (other.failure(deadline) for other in self.ranks)))
        if cause is None:  # one was lost where the others could not go on
            return self._died[0].error if self._died else None
        if self._max_replaced and self._too_often:
            limit = f"{self._max_replaced} times in 10 minutes (--max-worker-restarts)"
            return RankError(f"{cause.error}\nThat was more than {limit}.")
        return cause.error


def main(fd: int, rank: int, group: int) -> None:
    """Run the process of another rank, which joins this group first."""
    faulthandler.enable()
    end_with_parent()
    if group:  # until its handlers are there: a signal must not end a successor
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pipe: Any = connection.Connection(fd)
    failure: HeadraceError
    try:
        follow, port, size, backend, device, limit_s, replaces, arguments = cloudpickle.loads(
            pipe.recv()
        )
        pipe.send("ready")
        store, info = connect_store("127.0.0.1", port), RankInfo(rank, size, rank)
        own_device = device_of(device, rank)
        ranks = join(store, info, backend, own_device, limit_s, group=group, replaces=replaces)
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
