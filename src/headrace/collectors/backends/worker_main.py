"""A worker process: steps its vectors when it is told to, into memory that the learner gave it.

Left out: the learner's end (`worker_pool.py`), how orders are carried out (`worker_main.py`),
and stepping itself (`rollout.py`).
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import select
import signal
import socket
import struct
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import cloudpickle
import threadpoolctl
import torch
from torch import Tensor, nn

from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan, ShouldStop
from headrace.collectors.backends.api import WorkerMemory, WorkerSetup, WorkOrder
from headrace.collectors.backends.channel import Channel
from headrace.collectors.rollout import Rollout, RolloutResult, RolloutTask, RolloutWorker
from headrace.distributed import child_process
from headrace.errors import HeadraceError, WorkerError
from headrace.meter import Meter
from headrace.models.policy import Actor
from headrace.weights import Published

# A worker's orders, carried out: one after the other, or many in turns.
#
# Where the learner's process acts (`inference_server.py`), a vector waits for each of its actions;
# meanwhile another one is stepped. A request and its answer are a few bytes; observations, actions
# and what else the policy emits lie in the vector's fragment, which both ends see.


REQUEST = struct.Struct("=5q")
"""Act at: vector, which of its buffers, row t, steps that each env has taken before the fragment,
and version of the weights (or `NEWEST`)."""
ANSWER = struct.Struct("=2q")
"""It is done for: vector, and with which version."""
NEWEST = -1

_AT_ONCE = 1024  # answers, more than there can be
_BEAT_S = 0.1  # so long a worker may wait before it shows that it is alive


@dataclass(frozen=True)
class WorkerContext:
    """What a worker carries orders out with.

    Attributes:
        learner: orders come from it, and what was done goes to it.
        generation: of this worker.
        slot: its memory.
        sampler: its vectors.
        published: weights, and whether to stop.
        meter: of this process.
    """

    learner: Channel
    generation: int
    slot: WorkerMemory
    sampler: RolloutWorker
    published: Published
    meter: Meter

    def begin(self, order: WorkOrder) -> list[RolloutTask]:
        """An order came: what it wants."""
        self.slot.generation[0] = self.generation
        of = self.slot.fragments
        return [RolloutTask(v, of[v][buffer], steps) for v, buffer, steps in order.fragments]

    def stop(self) -> bool:
        """Whether to give up."""
        return self.published.stop[0] != 0

    def deliver(self, order: WorkOrder, filled: RolloutResult) -> None:
        """An order is carried out, or given up."""
        done = order, filled, self.meter.readings()
        self.learner.send(("done", self.generation, done))
        self.meter.lap("other")


def one_by_one(station: WorkerContext) -> None:
    """Carry orders out, acting here, until there are no more."""
    weights = LatestWeights(station.published, station.sampler, station.meter)
    while True:
        order: WorkOrder | None = station.learner.receive()
        station.meter.lap("wait")
        if order is None:
            return
        wanted = station.begin(order)
        station.deliver(order, weights.collect(order, wanted, station.stop))


class Numbered(Protocol):
    """Weights that a learner gives out, numbered by updates: see `Published`."""

    @property
    def newest(self) -> int:
        """The version that was published last."""

    def pull(self, module: nn.Module, version: int | None = None) -> int:
        """Copy a version into the module, and say which; None: the newest."""


class LatestWeights:
    """The learner's weights, as a sampler follows them: a `rollout.Weights`."""

    waits = False

    def __init__(self, published: Numbered, sampler: RolloutWorker, meter: Meter) -> None:
        self._published, self._worker, self._meter = published, sampler, meter
        self._actor: Actor | None = None
        self._pinned: int | None = None
        self.version = -1
        self.lag_sum = self.lag_max = 0

    def collect(
        self, order: WorkOrder, wanted: list[RolloutTask], stop: ShouldStop
    ) -> RolloutResult:
        """Fill what an order wants, acting with these."""
        self._pinned, self.lag_sum, self.lag_max = order.version, 0, 0
        filled = self._worker.collect(wanted, self, stop)
        filled.lag_sum, filled.lag_max = self.lag_sum, self.lag_max
        return filled

    def pull(self) -> list[Actor]:
        """See `Weights`."""
        wanted = self._published.newest if self._pinned is None else self._pinned
        if self._actor is None or self.version != wanted:
            self.version = self._published.pull(self._worker.policy, self._pinned)
            self._actor = self._worker.actor()
        self._meter.lap("publish")
        return [self._actor]

    def is_stale(self) -> bool:
        """See `Weights`."""
        lag = self._published.newest - self.version
        if lag:
            self.lag_sum, self.lag_max = self.lag_sum + lag, max(self.lag_max, lag)
        return lag > 0 and self._pinned is None


class RemoteInference:
    """A policy in the learner's process, for one fragment: `rollout.Weights`, and their `Actor`."""

    waits = True

    def __init__(
        self,
        asks: socket.socket,
        of: tuple[int, int, int],
        pinned: int | None,
        published: Published,
    ) -> None:
        self._asks, self._of, self._published = asks, of, published
        self._pinned = NEWEST if pinned is None else pinned
        self.version = -1  # of the last answer
        self.lag_sum = self.lag_max = 0

    def pull(self) -> list[Actor]:
        """See `Weights`."""
        return [self]

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        """See `Actor`."""
        (vector, buffer, steps), pinned, ask = self._of, self._pinned, self._asks.sendall
        self._fragment = fragment

        def act(t: int) -> None:
            fragment.carry(t)
            ask(REQUEST.pack(vector, buffer, t, steps, pinned))

        return act

    def finish(self, rows: slice) -> None:
        """See `Actor`: the states are those that the next row begins with."""
        self._fragment.carry(rows.stop)

    def is_stale(self) -> bool:
        """See `Weights`: whoever acts takes newer ones by itself."""
        if lag := self._published.newest - self.version:
            self.lag_sum, self.lag_max = self.lag_sum + lag, max(self.lag_max, lag)
        return False


@dataclass
class _UnderWay:
    """An order, and how far it is."""

    order: WorkOrder
    left: int  # fragments that are not ended yet
    filled: RolloutResult = field(default_factory=RolloutResult)


@dataclass
class _Rollout:
    """One fragment of an order."""

    of: _UnderWay
    weights: RemoteInference
    steps: Rollout


class InterleavedRollouts:
    """Carries many orders out at a time, each vector's own in their order.

    Args:
        station: of this worker.
        asks: a socket to who acts.
    """

    def __init__(self, station: WorkerContext, asks: socket.socket) -> None:
        self._station, self._asks = station, asks
        self._next: dict[int, deque[_Rollout]] = {v: deque() for v in station.slot.fragments}
        self._waiting: dict[int, _Rollout] = {}  # by vector
        station.slot.turn[0] = -1

    def serve(self) -> None:
        """Until there are no more orders."""
        learner, meter = self._station.learner, self._station.meter
        poll = select.poll()
        poll.register(learner, select.POLLIN)
        poll.register(self._asks, select.POLLIN)
        while True:
            # It may wait for long (a large network), and is not stuck.
            ready = poll.poll(_BEAT_S * 1000 if self._waiting else None)
            meter.lap("infer" if self._waiting else "wait")
            for fd, _ in ready:
                if fd == self._asks.fileno():
                    for vector, version in self._answers():
                        self._waiting[vector].weights.version = version
                        self._go_on(vector)
                    continue
                for order in learner.take():
                    if order is None:
                        return
                    self._begin(order)

    def _answers(self) -> Iterator[tuple[int, int]]:
        """Those that are here; EOFError: nobody acts any more."""
        received = self._asks.recv(ANSWER.size * _AT_ONCE)
        if not received:
            raise EOFError
        return ANSWER.iter_unpack(received)

    def _begin(self, order: WorkOrder) -> None:
        station, under_way = self._station, _UnderWay(order, len(order.fragments))
        for of, wanted in zip(order.fragments, station.begin(order), strict=True):
            weights = RemoteInference(self._asks, of, order.version, station.published)
            steps = station.sampler.fill(wanted, weights, station.stop, under_way.filled)
            self._next[wanted.vector].append(_Rollout(under_way, weights, steps))
        for v, _, _ in order.fragments:
            self._start(v)

    def _start(self, v: int) -> None:
        """Begin a vector's next fragment, if it is wanted, and the vector has ended its last."""
        while v not in self._waiting and self._next[v]:
            self._waiting[v] = self._next[v].popleft()
            self._go_on(v)

    def _go_on(self, v: int) -> None:
        """Step a vector until it waits, or its fragment has ended."""
        self._station.slot.turn[0] = v
        try:
            next(self._waiting[v].steps)
        except StopIteration:
            self._end(self._waiting.pop(v))
            self._start(v)
        finally:
            self._station.slot.turn[0] = -1

    def _end(self, rollout: _Rollout) -> None:
        """A fragment has ended: full, or given up."""
        weights, of = rollout.weights, rollout.of
        of.left -= 1
        of.filled.lag_sum += weights.lag_sum
        of.filled.lag_max = max(of.filled.lag_max, weights.lag_max)
        if not of.left:
            of.filled.whole = len(of.filled.states) == len(of.order.fragments)
            self._station.meter.lap("rollout")
            self._station.deliver(of.order, of.filled)


STACK_SIGNAL = signal.SIGUSR1
"""By this a worker is asked where it is stuck; Python's fault handler answers in any case."""


def main(
    channel: int,
    weights: int,
    memory: int,
    words: int,
    plan: int,
    orders: int,
    asks: int | None = None,
) -> None:
    """The process, from its first line to its last; arguments are file descriptors.

    Args:
        channel: to the learner.
        weights: shared memory: `Published`.
        memory: shared memory of all slots.
        words: a pipe for the stacks of a process that crashes or is stuck.
        plan: a file with the pickled plan.
        orders: a file with the pickled orders.
        asks: a socket for asking the learner's process to act; None: this one does.
    """
    # A collection would look at each of torch's objects, and so copy pages that workers share.
    gc.freeze()
    child_process.ignore_signals()
    child_process.end_with_learner()
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    os.set_blocking(words, False)
    faulthandler.enable(words)
    faulthandler.register(STACK_SIGNAL, words)
    learner = Channel(socket.socket(fileno=channel))
    actions = None if asks is None else socket.socket(fileno=asks)
    name = "a worker"
    try:
        told: WorkerSetup = cloudpickle.loads(read_whole(orders))
        name = told.name
        _run(learner, weights, memory, read_whole(plan), told, actions)
    except (EOFError, ConnectionError):
        pass  # the learner is gone
    except HeadraceError as error:
        _last_word(learner, error)
    except (Exception, KeyboardInterrupt):  # signals do nothing here: an environment raised it
        _last_word(learner, WorkerError(f"{traceback.format_exc()}\n{name} failed."))
    finally:
        learner.close()


def read_whole(fd: int) -> bytes:
    """All of a file in memory, wherever somebody else has read to; closes it."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return data


def _last_word(learner: Channel, error: HeadraceError) -> None:
    with contextlib.suppress(ConnectionError):  # the learner is gone as well
        learner.send(("error", 0, error))


def _run(
    learner: Channel,
    weights_fd: int,
    memory_fd: int,
    pickled: bytes,
    told: WorkerSetup,
    actions: socket.socket | None,
) -> None:
    """Answer commands until told to close."""
    weights, memory = mmap.mmap(weights_fd, 0), mmap.mmap(memory_fd, 0)
    plan: SamplingPlan = cloudpickle.loads(pickled)
    slot = WorkerMemory(memory, told.offset, plan, told.vectors, fresh=False)
    slot.turn[0] = -1
    meter = Meter(beats=slot.beats, keeps_laps=plan.timeline)
    sampler = RolloutWorker(plan, told.vectors, meter, told.name, acts=actions is None)
    published = Published(sampler.policy if actions is None else None, weights)
    restored = sampler.restore(told.state, told.begin_after)
    states = sampler.states() if told.begin_after else {}
    learner.send(("ready", told.generation, (restored, states)))
    meter.lap("start")
    station = WorkerContext(learner, told.generation, slot, sampler, published, meter)
    if actions is None:
        one_by_one(station)
    else:
        InterleavedRollouts(station, actions).serve()
    try:
        sampler.close()
    except HeadraceError as error:
        learner.send(("closing", told.generation, error))
