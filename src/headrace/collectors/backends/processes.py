"""Samplers as processes of this machine, over anonymous shared memory.

What they write and read lies there: weights, and a *slot* for each with the fragments of its
vectors, which whoever has an order for them owns. Where they do not act themselves, a thread here
does (`inference_server.py`).

Left out: who is started and told when (`worker_pool.py`); one process (`processes.py`,
`worker_main.py`); other machines (`ray_actors.py`).
"""

import contextlib
import mmap
import os
import select
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.reduction import DupFd
from typing import Any

import cloudpickle

from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends import worker_main
from headrace.collectors.backends.api import Heard, WorkerMemory, WorkerSetup, WorkOrder
from headrace.collectors.backends.channel import Channel
from headrace.collectors.backends.inference_server import Inference
from headrace.collectors.snapshots import EpisodeSnapshots, count_unwritten, unwritten
from headrace.distributed import child_process
from headrace.distributed.child_process import cause_of_death
from headrace.errors import ConfigError, UsageError, WorkerError
from headrace.meter import Laps
from headrace.models import policy as policies
from headrace.models.policy import Policy
from headrace.weights import Published

# A worker process as the learner holds it: started, listened to, ended.


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
        orders: WorkerSetup,
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
            WorkerError: it cannot be killed.
            EnvError: an environment failed in closing.
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


class Worker:
    """A slot, and the process in it, if there is one."""

    def __init__(
        self, memory: mmap.mmap, offset: int, plan: SamplingPlan, vectors: list[int]
    ) -> None:
        self.offset = offset
        self.slot = WorkerMemory(memory, offset, plan, vectors, fresh=True)
        self.handle: Handle | None = None
        self.beats_at_order = 0

    def tell(self, order: WorkOrder | None) -> None:
        """Send who is here an order; None: to end."""
        if self.handle is not None:
            with contextlib.suppress(OSError):  # it is gone, which shows when it is listened to
                self.handle.channel.send(order)

    def end(self, deadline: float) -> None:
        """End who is here, if anybody is; see `Handle.end`."""
        if self.handle is not None:
            try:
                self.handle.end(deadline)
            finally:
                self.handle = None

    def ordered(self, orders: Iterable[WorkOrder]) -> dict[int, list[Fragment]]:
        """The memory that is to be filled, by vector."""
        found: dict[int, list[Fragment]] = {}
        for order in orders:
            for v, buffer, _ in order.fragments:
                found.setdefault(v, []).append(self.slot.fragments[v][buffer])
        return found


class ProcessBackend:
    """`Seats` for worker processes.

    Args:
        plan: what to sample.
        shares: the vectors of each.
        names: theirs.

    Raises:
        ConfigError: this platform has no anonymous shared memory.
        UsageError: the environment cannot be sent to another process.
    """

    def __init__(self, plan: SamplingPlan, shares: list[list[int]], names: list[str]) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"num_workers={len(shares)} needs Linux (memfd), and this is {sys.platform}.\n"
                "Use num_workers=0: all environments are stepped in the learner's process."
            )
        self._names = names
        template = policies.build(plan.spec, plan.network, 0, plan.model)
        plan_fd = in_memory("plan", pickled(plan))
        weights_fd, weights = _shared("weights", Published.num_bytes(template))
        self._published = Published(template, weights)
        sizes = [WorkerMemory.num_bytes(plan, len(share)) for share in shares]
        memory_fd, memory = _shared("fragments", sum(sizes))
        self._fds = [weights_fd, memory_fd, plan_fd]  # as `worker.main` takes them
        self.workers = [
            Worker(memory, sum(sizes[:i]), plan, share) for i, share in enumerate(shares)
        ]
        self._inference: Inference | None = None
        if plan.inference_device is not None:
            self._inference = Inference(plan, self._published)

    def publish(self, policy: Policy, version: int) -> None:
        """See `Seats`."""
        self._published.publish(policy, version)

    def fragment(self, i: int, vector: int, buffer: int) -> Fragment:
        """See `Seats`."""
        return self.workers[i].slot.fragments[vector][buffer]

    def prepare(self, i: int, order: WorkOrder) -> None:
        """See `Seats`."""
        for of in self.workers[i].ordered([order]).values():
            unwritten(of)

    def start(self, i: int, orders: WorkerSetup) -> None:
        """See `Seats`."""
        worker = self.workers[i]
        with contextlib.ExitStack() as stack:
            files = list(self._fds)
            if self._inference is not None:
                asks = stack.enter_context(self._inference.admit(i, worker.slot.fragments))
                files.append(asks.fileno())
            context = stack.enter_context(child_process.context())
            worker.handle = Handle(context, replace(orders, offset=worker.offset), *files)

    def tell(self, i: int, order: WorkOrder) -> None:
        """See `Seats`."""
        worker = self.workers[i]
        worker.beats_at_order = worker.slot.beats[0]
        worker.tell(order)

    def listen(self, wait_s: float) -> list[Heard]:
        """See `Seats`."""
        if self._inference is not None:
            self._inference.check()
        watched: dict[Any, int] = {}
        for i, worker in enumerate(self.workers):
            if worker.handle is not None:
                watched |= {worker.handle.channel: i, worker.handle.process.sentinel: i}
        ready = connection.wait(list(watched), wait_s)
        return [self._heard(i) for i in {watched[each] for each in ready}]

    def _heard(self, i: int) -> Heard:
        worker = self.workers[i]
        assert worker.handle is not None
        ended = worker.handle.has_ended  # before listening: what it said last is heard
        messages: list[tuple[str, int, Any]] = []
        try:
            for kind, generation, what in worker.handle.channel.take():
                if kind != "done" or worker.slot.generation[0] == generation:
                    messages.append((kind, generation, what))
        except EOFError:
            ended = True
        return Heard(i, messages, worker.handle.cause() if ended else None)

    def leaving(self) -> Iterable[tuple[int, int]]:
        """See `Seats`: a process stays where it is."""
        return ()

    def watch(self, now: float, limit_s: float) -> None:
        """See `Seats`."""
        if self._inference is not None:
            self._inference.watch(now, limit_s)

    def progress(self, i: int, orders: list[WorkOrder]) -> Any:
        """See `Seats`: rows that are written count, as one step of a vector may be long."""
        return self.workers[i].slot.beats[0], sum(map(count_unwritten, self._ordered(i, orders)))

    def stack(self, i: int) -> str:
        """See `Seats`."""
        handle = self.workers[i].handle
        return "" if handle is None else handle.stack()

    def where(self, i: int, orders: list[WorkOrder], journals: EpisodeSnapshots) -> str:
        """See `Seats`."""
        worker, name = self.workers[i], self._names[i]
        if not orders or worker.slot.beats[0] == worker.beats_at_order:
            return f"between two fragments, sampler {name}"
        if self._inference is None:  # one after the other
            of_first = worker.ordered(orders[:1])
            under_way = {v: fragments[0] for v, fragments in of_first.items()}
        else:
            turn = worker.slot.turn[0]
            if turn < 0:
                return f"while waiting for actions, sampler {name}"
            under_way = {turn: worker.ordered(orders)[turn][0]}
        return journals.describe_position(under_way, name)

    def lose(self, i: int, orders: list[WorkOrder]) -> tuple[int, int]:
        """See `Seats`: the process is buried before its memory is read, or another's."""
        self.workers[i].end(deadline=0.0)
        if self._inference is not None:
            self._inference.dismiss(i)
        fragments = self._ordered(i, orders)
        left = sum(map(count_unwritten, fragments))
        unwritten(fragments)
        return sum(fragment.reward.numel() for fragment in fragments) - left, left

    def _ordered(self, i: int, orders: list[WorkOrder]) -> list[Fragment]:
        return [f for of in self.workers[i].ordered(orders).values() for f in of]

    def stop(self) -> None:
        """See `Seats`."""
        self._published.stop[0] = 1

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Seats`."""
        return {} if self._inference is None else {"inference": self._inference.seconds()}

    def laps(self) -> dict[str, Laps]:
        """See `Seats`."""
        laps = None if self._inference is None else self._inference.laps()
        return {"inference": laps} if laps else {}

    def metrics(self) -> dict[str, float]:
        """See `Seats`."""
        return {} if self._inference is None else self._inference.metrics()

    def is_taken(self, i: int) -> bool:
        """See `Seats`."""
        return self.workers[i].handle is not None

    def close(self, within_s: float) -> None:
        """See `Seats`."""
        for worker in self.workers:
            worker.tell(None)
        deadline = time.monotonic() + within_s
        with contextlib.ExitStack() as stack:  # backwards, and goes on if one raises
            stack.callback(self._close_memory)
            for worker in self.workers:
                stack.callback(worker.end, deadline)

    def _close_memory(self) -> None:
        """What workers share; they have ended."""
        if self._inference is not None:
            self._inference.close()
            self._inference = None
        while self._fds:
            os.close(self._fds.pop())


def _shared(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Anonymous shared memory: it is gone with the last process that has it open."""
    fd = os.memfd_create(f"headrace {name}")
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


def pickled(plan: SamplingPlan) -> bytes:
    """Lambdas and classes of a script or notebook travel by value; nothing goes through a file.

    Raises:
        UsageError: what makes the environment cannot travel.
    """
    try:
        return bytes(cloudpickle.dumps(plan))
    except Exception as error:
        raise UsageError(
            f"The environment cannot be sent to worker processes: {type(error).__name__}: "
            f"{error}.\nWhat makes it must not carry open files, locks or devices: open them "
            "inside, or use num_workers=0."
        ) from error
