"""A worker process: carries out orders with its vectors, and writes to memory of the learner.

Without an inference server, the worker carries out one order after the other. With one, it steps
another vector while a vector waits for its actions.
"""

import contextlib
import gc
import mmap
import select
import socket
import struct
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import cloudpickle
import numpy as np
import threadpoolctl
import torch
from torch import Tensor

from headrace import batch
from headrace.batch import Fragment, Fragments
from headrace.collectors.api import SamplingPlan, ShouldStop
from headrace.collectors.backends.api import Done, Failed, Ready, WorkerSetup, WorkOrder
from headrace.collectors.rollout import (
    ActorSource,
    Rollout,
    RolloutResult,
    RolloutTask,
    RolloutWorker,
)
from headrace.distributed import child_process
from headrace.distributed.channel import Channel
from headrace.distributed.child_process import read_file
from headrace.errors import HeadraceError, WorkerError
from headrace.meter import Meter
from headrace.models.policy import Actor
from headrace.spec import Array
from headrace.weights import Published

REQUEST = struct.Struct("=5q")
"""A request for actions: vector, buffer, row t, steps that each env has taken before the fragment,
and version of the weights (or `NEWEST`)."""
ANSWER = struct.Struct("=2q")
"""Its answer: vector, and the version of the weights that acted."""
NEWEST = -1

_MOST_ANSWERS = 1024  # more than there can be
_ALIVE_EVERY_S = 0.1  # a worker that waits shows that it is alive


class WorkerMemory:
    """A worker's piece of shared memory: four numbers, then the fragments of its vectors.

    Attributes:
        laps: number of laps of the worker's meter, `[1]` as the next two.
        generation: generation of the process that writes.
        turn: the vector that is being stepped, if orders are interleaved; else -1.
        leave: 1: this worker is to give its orders back.
        fragments: buffers by vector.
    """

    _HEADER = 64

    def __init__(
        self, memory: mmap.mmap, offset: int, plan: SamplingPlan, vectors: list[int], *, fresh: bool
    ) -> None:
        self.offset = offset
        numbers = memoryview(memory)[offset : offset + self._HEADER].cast("q")
        self.laps, self.generation, self.turn = numbers[0:1], numbers[1:2], numbers[2:3]
        self.leave = numbers[3:4]
        layouts, size = plan.layouts, _num_bytes(plan)
        self.fragments: dict[int, list[Fragments]] = {v: [] for v in vectors}
        first = offset + self._HEADER
        self._pieces: dict[tuple[int, int], memoryview] = {}
        for v, buffers in self.fragments.items():
            for buffer in range(plan.num_buffers):
                piece = memoryview(memory)[first : first + size]
                self._pieces[v, buffer] = piece
                buffers.append(batch.allocate_all(layouts, piece, fresh=fresh))
                first += size

    def piece(self, vector: int, buffer: int) -> Array:
        """Return the bytes of a vector's fragments in one buffer."""
        return np.frombuffer(self._pieces[vector, buffer], np.uint8)

    @classmethod
    def num_bytes(cls, plan: SamplingPlan, num_vectors: int) -> int:
        """Return the size of a piece."""
        return cls._HEADER + num_vectors * plan.num_buffers * _num_bytes(plan)


def _num_bytes(plan: SamplingPlan) -> int:
    """Return the size of a buffer: of a vector's fragments."""
    return sum(map(batch.num_bytes, plan.layouts))


@dataclass(frozen=True)
class WorkerContext:
    """Everything that a worker needs to carry out orders."""

    learner: Channel
    generation: int
    memory: WorkerMemory
    worker: RolloutWorker
    published: Published  # weights, and the flag to stop
    meter: Meter

    def tasks(self, order: WorkOrder) -> list[RolloutTask]:
        """Return the fragments that an order wants, and claim the memory."""
        self.memory.generation[0] = self.generation
        fragments, changes, pool = self.memory.fragments, order.changes, order.pool
        return [
            RolloutTask(v, fragments[v][buffer], steps, changes, pool)
            for v, buffer, steps in order.fragments
        ]

    def should_stop(self) -> bool:
        """Return True if the worker is to give up."""
        return self.published.stop[0] != 0 or self.memory.leave[0] != 0

    def deliver(self, order: WorkOrder, result: RolloutResult) -> None:
        """Send what was done of an order."""
        self.learner.send(Done(self.generation, order, result, self.meter.readings()))
        self.meter.lap("other")


def run_in_sequence(context: WorkerContext) -> None:
    """Carry orders out one by one, with actions computed here, until there are no more."""
    weights = LatestWeights(context.published, context.worker, context.meter)
    while True:
        order: WorkOrder | None = context.learner.receive()
        context.meter.lap("wait")
        if order is None:
            return
        result = weights.collect(order, context.tasks(order), context.should_stop)
        context.deliver(order, result)


class LatestWeights(ActorSource):
    """The actors of the newest weights, or of the version that an order names."""

    def __init__(self, published: Published, worker: RolloutWorker, meter: Meter) -> None:
        self._published, self._worker, self._meter = published, worker, meter
        self._actors: list[Actor] = []
        self._pinned: int | None = None
        self._result = RolloutResult()
        self.version = -1

    def collect(
        self, order: WorkOrder, tasks: list[RolloutTask], stop: ShouldStop
    ) -> RolloutResult:
        """Fill the fragments of an order."""
        self._pinned, self._result = order.version, RolloutResult()
        self._worker.collect(tasks, self, stop, self._result)
        return self._result

    def pull(self) -> list[Actor]:
        """Copy the weights, unless the worker has them."""
        version = self._published.newest if self._pinned is None else self._pinned
        if not self._actors or self.version != version:
            self.version = self._published.pull(self._worker.policies, self._pinned)
            self._actors = self._worker.actors()
        self._meter.lap("publish")
        return self._actors

    def is_stale(self) -> bool:
        """Measure the lag. True if newer weights are to act."""
        lag = self._published.newest - self.version
        if lag:
            self._result.add_lag(lag)
        return lag > 0 and self._pinned is None


@dataclass
class _OpenOrder:
    """An unfinished order, and its number of unfinished fragments."""

    order: WorkOrder
    num_left: int
    result: RolloutResult = field(default_factory=RolloutResult)


class _ActorOfServer(Actor):
    """One policy's actor where the inference server acts; it carries recurrent states over.

    Args:
        ask: asks for the actions of row t, of all policies; called by one of the actors.
    """

    def __init__(self, ask: Callable[[int], None] | None) -> None:
        self._ask = ask

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        """Return a function that has row t acted on."""
        self._fragment, ask = fragment, self._ask

        def act(t: int) -> None:
            fragment.carry(t)
            if ask is not None:
                ask(t)

        return act

    def finish(self, rows: slice) -> None:
        """Carry over the recurrent states, with which the next row begins."""
        self._fragment.carry(rows.stop)


class RemoteInference(ActorSource):
    """A source of actors for the fragments of one vector: the inference server acts.

    Args:
        num_policies: that act there.
        published: weights, of which the newest version is read.
    """

    deferred = True
    steps: Rollout

    def __init__(
        self,
        requests: socket.socket,
        fragment: tuple[int, int, int],
        open_order: _OpenOrder,
        published: Published,
        num_policies: int,
    ) -> None:
        self._requests, self._indices, self._published = requests, fragment, published
        self.open_order, version = open_order, open_order.order.version
        self._requested_version = NEWEST if version is None else version
        self.version = -1  # of the last answer
        # The last one to act asks: then all have carried their states over.
        others: list[Actor] = [_ActorOfServer(None) for _ in range(num_policies - 1)]
        self._actors = [*others, _ActorOfServer(self._request)]

    def pull(self) -> list[Actor]:
        return self._actors

    def _request(self, t: int) -> None:
        vector, buffer, steps = self._indices
        self._requests.sendall(REQUEST.pack(vector, buffer, t, steps, self._requested_version))

    def is_stale(self) -> bool:
        """Measure the lag. The server takes newer weights by itself."""
        if lag := self._published.newest - self.version:
            self.open_order.result.add_lag(lag)
        return False


class InterleavedRollouts:
    """Carries out many orders at a time; those of one vector in their order."""

    def __init__(self, context: WorkerContext, requests: socket.socket) -> None:
        self._context, self._requests = context, requests
        self._next: dict[int, deque[RemoteInference]] = {
            v: deque() for v in context.memory.fragments
        }
        self._waiting: dict[int, RemoteInference] = {}  # by vector

    def run(self) -> None:
        """Carry orders out until there are no more."""
        learner, meter = self._context.learner, self._context.meter
        poll = select.poll()
        poll.register(learner, select.POLLIN)
        poll.register(self._requests, select.POLLIN)
        while True:
            # It may wait for long (a large network), and does not hang.
            ready = poll.poll(_ALIVE_EVERY_S * 1000 if self._waiting else None)
            meter.lap("infer" if self._waiting else "wait")
            for fd, _ in ready:
                if fd == self._requests.fileno():
                    for vector, version in self._answers():
                        self._waiting[vector].version = version
                        self._step(vector)
                    continue
                for order in learner.take():
                    if order is None:
                        return
                    self._begin(order)

    def _answers(self) -> Iterator[tuple[int, int]]:
        """Return the answers that are here. Raise EOFError if the server has ended."""
        received = self._requests.recv(ANSWER.size * _MOST_ANSWERS)
        if not received:
            raise EOFError
        return ANSWER.iter_unpack(received)

    def _begin(self, order: WorkOrder) -> None:
        context, open_order = self._context, _OpenOrder(order, len(order.fragments))
        for fragment, task in zip(order.fragments, context.tasks(order), strict=True):
            source = RemoteInference(
                self._requests, fragment, open_order, context.published, len(task.fragments)
            )
            source.steps = context.worker.fill(task, source, context.should_stop, open_order.result)
            self._next[task.vector].append(source)
        for v, _, _ in order.fragments:
            self._start(v)

    def _start(self, v: int) -> None:
        """Begin a vector's next fragment, if there is one and the last has ended."""
        while v not in self._waiting and self._next[v]:
            self._waiting[v] = self._next[v].popleft()
            self._step(v)

    def _step(self, v: int) -> None:
        """Step a vector until it waits, or its fragment has ended."""
        self._context.memory.turn[0] = v
        try:
            next(self._waiting[v].steps)
        except StopIteration:
            self._end(self._waiting.pop(v))
            self._start(v)
        finally:
            self._context.memory.turn[0] = -1

    def _end(self, source: RemoteInference) -> None:
        """End a fragment that is full, or was given up."""
        open_order = source.open_order
        order, result = open_order.order, open_order.result
        open_order.num_left -= 1
        if not open_order.num_left:
            result.whole = len(result.states) == len(order.fragments)
            self._context.meter.lap("rollout")
            self._context.deliver(order, result)


def start_worker(
    plan: SamplingPlan, setup: WorkerSetup, meter: Meter, *, acts: bool = True
) -> tuple[RolloutWorker, Ready]:
    """Make the environments of a worker, and restore their states. Return what to report, too."""
    worker = RolloutWorker(plan, setup.vectors, meter, setup.name, acts=acts)
    restored = worker.restore(setup.state, setup.begin_after, setup.changes, setup.pool)
    states = worker.states() if setup.begin_after else {}
    return worker, Ready(setup.generation, restored, states)


def prepare_process() -> None:
    """Compute on one core, and leave pages alone that processes share."""
    gc.freeze()  # a collection would look at each of torch's objects, and so copy their pages
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)


def failure(error: BaseException, name: str) -> Failed:
    """Return the message on an error of the worker `name`. Called while it is handled."""
    if isinstance(error, HeadraceError):
        return Failed(error)
    return Failed(WorkerError(f"{traceback.format_exc()}\n{name} failed."))


def learner_channel(channel: int, stack: int) -> contextlib.closing[Channel]:
    """Make this process one of the learner's, and return its channel, given descriptors."""
    prepare_process()
    child_process.begin(stack)
    return contextlib.closing(Channel(socket.socket(fileno=channel)))


@contextlib.contextmanager
def reports_errors(learner: Channel, name: str) -> Iterator[None]:
    """Send the learner what is raised within the `with`, as an error of the process `name`."""
    try:
        yield
    except (EOFError, ConnectionError):
        pass  # the learner is gone
    except (Exception, KeyboardInterrupt) as error:  # signals do nothing: an environment raised it
        with contextlib.suppress(ConnectionError):  # the learner is gone as well
            learner.send(failure(error, name))


def main(
    channel: int,
    stack: int,
    orders: int,
    weights: int,
    memory: int,
    plan: int,
    requests: int | None = None,
) -> None:
    """Run a worker process.

    Arguments are file descriptors: of the channel to the learner, the pipe for the stack of a
    process that hangs, a file with the pickled `WorkerSetup` and the offset in `memory`, shared
    memory with weights and fragments, a file with the plan, a socket to the inference server.
    """
    with learner_channel(channel, stack) as learner, reports_errors(learner, "a worker"):
        server = None if requests is None else socket.socket(fileno=requests)
        setup: WorkerSetup
        setup, offset = cloudpickle.loads(read_file(orders))
        with reports_errors(learner, setup.name):
            sampling: SamplingPlan = cloudpickle.loads(read_file(plan))
            fragments = mmap.mmap(memory, 0)
            piece = WorkerMemory(fragments, offset, sampling, setup.vectors, fresh=False)
            _run(learner, mmap.mmap(weights, 0), piece, sampling, setup, server)


def _run(
    learner: Channel,
    weights: mmap.mmap,
    memory: WorkerMemory,
    plan: SamplingPlan,
    setup: WorkerSetup,
    server: socket.socket | None,
) -> None:
    """Carry orders out until there are no more, and close the environments."""
    memory.turn[0] = -1
    meter = Meter(beats=memory.laps, keeps_laps=plan.timeline)
    worker, ready = start_worker(plan, setup, meter, acts=server is None)
    published = Published(worker.policies if server is None else None, weights)
    learner.send(ready)
    meter.lap("start")
    context = WorkerContext(learner, setup.generation, memory, worker, published, meter)
    if server is None:
        run_in_sequence(context)
    else:
        InterleavedRollouts(context, server).run()
    try:
        worker.close()
    except HeadraceError as error:
        learner.send(Failed(error, closing=True))
