"""Worker processes of one machine, for a learner that may be on another one.

The host forks them, and passes on what the learner and they say: orders and weights come over one
channel, fragments go back over it. Left out: starting the host (`ray_host.py`), the learner's end
(`ray_backend.py`), and a worker (`worker_main.py`).
"""

import contextlib
import os
import platform
import time
from collections import deque
from multiprocessing import connection
from typing import Any, NamedTuple

from headrace.batch import pack, split_memory
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import (
    Done,
    Exited,
    Failed,
    LostWork,
    Message,
    Ready,
    WorkerSetup,
    WorkOrder,
)
from headrace.collectors.backends.processes import ProcessWorker, shared_memory
from headrace.collectors.backends.worker_main import WorkerMemory, prepare_process
from headrace.distributed.channel import NetworkChannel, pickled
from headrace.distributed.child_process import file_in_memory, raise_open_files
from headrace.distributed.process import files_needed
from headrace.errors import HeadraceError, UsageError, WorkerError
from headrace.spec import Array
from headrace.weights import Published

_BEAT_EVERY_S = 0.25
_CLOSE_WITHIN_S = 2.5  # the learner waits a little longer
INSTALLED_THERE = "What the environment is made of must be installed there, in the same versions."


class Start(NamedTuple):
    """Start a worker."""

    worker: int
    setup: WorkerSetup


class Fill(NamedTuple):
    """Have a worker carry an order out."""

    worker: int
    order: WorkOrder


class Weights(NamedTuple):
    """Publish weights, `[bytes]` uint8."""

    version: int
    flat: Array


class Leave(NamedTuple):
    """Have a worker stop its orders, and return them unfinished."""

    worker: int


class Drop(NamedTuple):
    """End a worker: after closing its environments, or at once."""

    worker: int
    at_once: bool = False


class AskStack(NamedTuple):
    """Ask for the stack of a worker."""

    worker: int


class Stack(NamedTuple):
    """The stack of a worker; "": unknown."""

    worker: int
    text: str


class Stop(NamedTuple):
    """Have all workers give up where they are."""


class Close(NamedTuple):
    """End all workers and the host."""


class Closed(NamedTuple):
    """The host has ended its workers; with the error that closing an environment raised."""

    error: HeadraceError | None


class Said(NamedTuple):
    """A message of a worker. `Done` has its fragments, packed (see `batch.pack`)."""

    worker: int
    generation: int
    message: Message
    num_finals: tuple[int, ...] = ()
    parts: tuple[Array, ...] = ()
    lost: LostWork | None = None  # if it has exited


class Beat(NamedTuple):
    """A sign of life of a worker."""

    generation: int
    laps: int  # of its meter, so far
    fragments: Any  # of the order that it carries out (see `WorkOrder`); None: it has none
    taken: int  # env steps of the order, so far

    def is_of(self, orders: list[WorkOrder]) -> bool:
        """Return whether it is about one of these orders."""
        return any(self.fragments == order.fragments for order in orders)


class Beats(NamedTuple):
    """Signs of life of all workers, by index."""

    beats: dict[int, Beat]


class WorkerHost:
    """Hosts the workers. Pickles `plan` again for them: a script's classes have no module here."""

    def __init__(self, plan: SamplingPlan, channel: NetworkChannel) -> None:
        prepare_process()
        self._plan, self._learner = plan, channel
        policies = plan.build_policies()
        plan_fd = file_in_memory("plan", pickled(plan, "worker processes"))
        weights_fd, weights = shared_memory("weights", Published.num_bytes(policies))
        self._published = Published(policies, weights)
        self._fds = weights_fd, plan_fd
        self._workers: dict[int, ProcessWorker] = {}
        self._orders: dict[int, deque[WorkOrder]] = {}
        self._generations: dict[int, int] = {}
        # Workers that close their environments, and when they are killed.
        self._ending: list[tuple[ProcessWorker, float]] = []
        self._beat_at = 0.0

    def run(self) -> None:
        """Serve the learner until it closes the host, or is gone."""
        try:
            while self._run_once():
                pass
        except (EOFError, ConnectionError):
            pass  # the learner is gone
        finally:
            for worker in [*self._workers.values(), *(worker for worker, _ in self._ending)]:
                self._end(worker, 0.0)

    def _run_once(self) -> bool:
        """Wait for the learner and the workers, and hear them. False: the host is closed."""
        watched: dict[Any, int] = {}
        for index, worker in self._workers.items():
            assert worker.child is not None
            watched |= dict.fromkeys(worker.child.waitables, index)
        ending = [worker.child.process.sentinel for worker, _ in self._ending if worker.child]
        wait_s = max(0.0, self._beat_at - time.monotonic())
        waitables: list[Any] = [self._learner, *watched, *ending]
        ready = connection.wait(waitables, wait_s)
        for index in sorted({watched[each] for each in ready if each in watched}):
            for message in self._workers[index].poll():
                if index in self._workers:
                    self._pass_on(index, message)
        now = time.monotonic()
        for worker, deadline in list(self._ending):
            if worker.child is None or worker.child.has_ended or now > deadline:
                self._ending.remove((worker, deadline))
                self._end(worker, now)
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_EVERY_S
            if not self._learner.has_unsent:
                self._learner.send(Beats({index: self._beat(index) for index in self._workers}))
        for request in self._learner.take():
            if isinstance(request, Close):
                self._close()
                return False
            self._carry_out(request)
        return True

    def _carry_out(self, request: Any) -> None:
        match request:
            case Start():
                self._start(request.worker, request.setup)
            case Weights():
                self._published.publish_copy(request.flat, request.version)
            case Stop():
                self._published.stop[0] = 1
            case Fill() if request.worker in self._workers:
                worker = self._workers[request.worker]
                worker.prepare(request.order)
                worker.send(request.order)
                self._orders[request.worker].append(request.order)
            case Leave() if request.worker in self._workers:
                self._workers[request.worker].memory.leave[0] = 1
            case AskStack() if request.worker in self._workers:
                text = self._workers[request.worker].stack()
                self._learner.send(Stack(request.worker, text))
            case Drop() if request.worker in self._workers:
                self._drop(request.worker, at_once=request.at_once)

    def _start(self, index: int, setup: WorkerSetup) -> None:
        raise_open_files(files_needed(1))
        size = WorkerMemory.num_bytes(self._plan, len(setup.vectors))
        memory_fd, memory = shared_memory("fragments", size)
        piece = WorkerMemory(memory, 0, self._plan, setup.vectors, fresh=True)
        weights_fd, plan_fd = self._fds
        fds = [weights_fd, memory_fd, plan_fd]
        worker = ProcessWorker(index, setup.vectors, self._plan, piece, fds, None)
        self._generations[index] = setup.generation
        try:
            worker.start(setup)
        except (EOFError, OSError) as error:  # no memory, for example
            exited = Exited(f"could not be started: {error or type(error).__name__}")
            self._learner.send(self._said(index, exited))
            return
        finally:
            os.close(memory_fd)
        self._workers[index], self._orders[index] = worker, deque()

    def _pass_on(self, index: int, message: Message) -> None:
        """Send the learner what a worker has said."""
        match message:
            case Done():
                self._orders[index].popleft()
                num_finals, parts = self._packed(index, message)
                said = self._said(index, message)
                self._learner.send(said._replace(num_finals=num_finals, parts=parts))
            case Exited():
                worker, orders = self._workers.pop(index), list(self._orders.pop(index))
                said = self._said(index, message)
                with contextlib.suppress(HeadraceError):  # it cannot be killed
                    said = said._replace(lost=worker.lose(orders))
                self._learner.send(said)
            case Failed(error=UsageError() as error):  # where the run was started it was none
                name = f"worker {index}"
                text = f"{error}\nThat was {name}, on the machine {platform.node()}."
                failed = Failed(WorkerError(f"{text} {INSTALLED_THERE}"))
                self._learner.send(self._said(index, failed))
            case Ready() | Failed():
                self._learner.send(self._said(index, message))

    def _said(self, index: int, message: Message) -> Said:
        return Said(index, self._generations[index], message)

    def _packed(self, index: int, done: Done) -> tuple[tuple[int, ...], tuple[Array, ...]]:
        """Return how many final observations each fragment has, and the parts of all.

        They lie in the worker's memory, which the worker writes to again only for the next order.
        """
        if not done.result.whole:
            return (), ()
        layouts, memory = self._plan.layouts, self._workers[index].memory
        packed = [
            pack(layout, piece)
            for v, buffer, _ in done.order.fragments
            for layout, piece in zip(
                layouts, split_memory(layouts, memory.piece(v, buffer)), strict=True
            )
        ]
        return tuple(n for n, _ in packed), tuple(part for _, parts in packed for part in parts)

    def _beat(self, index: int) -> Beat:
        worker, orders = self._workers[index], self._orders[index]
        generation = self._generations[index]
        laps, left = worker.progress(list(orders)[:1])
        if not orders:
            return Beat(generation, laps, None, 0)
        fragments = orders[0].fragments
        taken = self._plan.env_steps_per_fragment * len(fragments) - left
        return Beat(generation, laps, fragments, taken)

    def _drop(self, index: int, *, at_once: bool) -> None:
        worker = self._workers.pop(index)
        del self._orders[index]
        if at_once:
            self._end(worker, 0.0)
        else:
            worker.send(None)
            self._ending.append((worker, time.monotonic() + _CLOSE_WITHIN_S))

    def _end(self, worker: ProcessWorker, deadline: float) -> None:
        with contextlib.suppress(HeadraceError):  # it has left, and closing it failed
            worker.end(deadline)

    def _close(self) -> None:
        failed, deadline = None, time.monotonic() + _CLOSE_WITHIN_S
        for worker in self._workers.values():
            worker.send(None)
        for index in list(self._workers):
            try:
                self._workers.pop(index).end(deadline)
            except HeadraceError as error:
                failed = error
        self._learner.send(Closed(failed))
