"""A worker process: steps its vectors when it is told to, into memory that the learner gave it.

Left out: the learner's end (`workers.py`), and stepping itself (`rollout.py`).
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
import traceback
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle
import threadpoolctl
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.collect import forkserver
from headrace.collect.api import Plan
from headrace.collect.channel import Channel
from headrace.collect.rollout import Sampler, Wanted
from headrace.errors import HeadraceError, SamplerError
from headrace.meter import Meter
from headrace.models.policy import Actor
from headrace.spec import Array
from headrace.weights import Published

STACK_SIGNAL = signal.SIGUSR1
"""By this a worker is asked where it is stuck; Python's fault handler answers in any case."""


@dataclass(frozen=True)
class Orders:
    """What one worker is told at its start, besides the plan.

    Attributes:
        name: in messages.
        generation: of its slot.
        vectors: which are its own, by their index in the run.
        offset: where its slot begins in the memory of all (bytes).
        state: of its vectors; {}: they begin.
        begin_after: see `Sampler.restore`.
    """

    name: str
    generation: int
    vectors: list[int]
    offset: int
    state: dict[str, Array]
    begin_after: int


class Order(NamedTuple):
    """To fill fragments, one after the other.

    Attributes:
        fragments: the vector of each, which of its buffers, and the steps that each env of the
            vector has taken before.
        version: of the weights; None: the newest at each step.
    """

    fragments: tuple[tuple[int, int, int], ...]
    version: int | None


class Slot:
    """A worker's piece of shared memory: two counters, then the fragments of its vectors.

    Args:
        memory: of all slots.
        offset: where this one begins.
        plan: the run's.
        vectors: whose fragments these are.
        fresh: poison them.

    Attributes:
        beats: counts what the worker does (its meter's laps), as a sequence of one number.
        generation: of the worker that writes, as a sequence of one number.
        fragments: by vector, the buffers of each.
    """

    _HEADER = 64

    def __init__(
        self, memory: mmap.mmap, offset: int, plan: Plan, vectors: list[int], *, fresh: bool
    ) -> None:
        numbers = memoryview(memory)[offset : offset + self._HEADER].cast("q")
        self.beats, self.generation = numbers[0:1], numbers[1:2]
        size = batch.num_bytes(plan.layout)
        self.fragments: dict[int, list[Fragment]] = {v: [] for v in vectors}
        first = offset + self._HEADER
        for buffers in self.fragments.values():
            for _ in range(plan.num_buffers):
                piece = memoryview(memory)[first : first + size]
                buffers.append(batch.allocate(plan.layout, piece, fresh=fresh))
                first += size

    @classmethod
    def num_bytes(cls, plan: Plan, num_vectors: int) -> int:
        """How much memory a slot takes."""
        return cls._HEADER + num_vectors * plan.num_buffers * batch.num_bytes(plan.layout)


class _Shared:
    """The learner's weights, as a sampler follows them: a `rollout.Weights`."""

    def __init__(self, published: Published, sampler: Sampler, meter: Meter) -> None:
        self._published, self._sampler, self._meter = published, sampler, meter
        self._actor: Actor | None = None
        self._pinned: int | None = None
        self.version = -1
        self.lag_sum = self.lag_max = 0

    def begin(self, pinned: int | None) -> None:
        """An order for these is carried out: see `Order.version`."""
        self._pinned, self.lag_sum, self.lag_max = pinned, 0, 0

    def pull(self) -> Actor:
        """See `Weights`."""
        wanted = self._published.newest if self._pinned is None else self._pinned
        if self._actor is None or self.version != wanted:
            self.version = self._published.pull(self._sampler.policy, self._pinned)
            self._actor = self._sampler.actor()
        self._meter.lap("publish")
        return self._actor

    def are_old(self) -> bool:
        """See `Weights`."""
        lag = self._published.newest - self.version
        if lag:
            self.lag_sum, self.lag_max = self.lag_sum + lag, max(self.lag_max, lag)
        return lag > 0 and self._pinned is None


def main(channel: int, weights: int, memory: int, words: int, plan: int, orders: int) -> None:
    """The process, from its first line to its last; arguments are file descriptors.

    Args:
        channel: to the learner.
        weights: shared memory: `Published`.
        memory: shared memory of all slots.
        words: a pipe for the stacks of a process that crashes or is stuck.
        plan: a file with the pickled plan.
        orders: a file with the pickled orders.
    """
    # A collection would look at each of torch's objects, and so copy pages that workers share.
    gc.freeze()
    forkserver.ignore_signals()
    forkserver.end_with_learner()
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    os.set_blocking(words, False)
    faulthandler.enable(words)
    faulthandler.register(STACK_SIGNAL, words)
    learner = Channel(socket.socket(fileno=channel))
    name = "a worker"
    try:
        told: Orders = cloudpickle.loads(read_whole(orders))
        name = told.name
        _run(learner, weights, memory, read_whole(plan), told)
    except (EOFError, ConnectionError):
        pass  # the learner is gone
    except HeadraceError as error:
        _last_word(learner, error)
    except (Exception, KeyboardInterrupt):  # signals do nothing here: an environment raised it
        _last_word(learner, SamplerError(f"{traceback.format_exc()}\n{name} failed."))
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


def _run(learner: Channel, weights_fd: int, memory_fd: int, pickled: bytes, told: Orders) -> None:
    """Answer commands until told to close."""
    weights, memory = mmap.mmap(weights_fd, 0), mmap.mmap(memory_fd, 0)
    plan: Plan = cloudpickle.loads(pickled)
    slot = Slot(memory, told.offset, plan, told.vectors, fresh=False)
    meter = Meter(beats=slot.beats)
    sampler = Sampler(plan, told.vectors, meter, told.name)
    published = Published(sampler.policy, weights)
    shared = _Shared(published, sampler, meter)
    restored = sampler.restore(told.state, told.begin_after)
    states = sampler.states() if told.begin_after else {}
    learner.send(("ready", told.generation, (restored, states)))
    meter.lap("start")
    while True:
        order: Order | None = learner.receive()
        meter.lap("wait")
        if order is None:  # no more
            break
        slot.generation[0] = told.generation
        wanted = [Wanted(v, slot.fragments[v][i], steps) for v, i, steps in order.fragments]
        shared.begin(order.version)
        filled = sampler.collect(wanted, shared, lambda: published.stop[0] != 0)
        filled.lag_sum, filled.lag_max = shared.lag_sum, shared.lag_max
        learner.send(("done", told.generation, (filled, meter.seconds(), meter.usual_s())))
        meter.lap("other")
    try:
        sampler.close()
    except HeadraceError as error:
        learner.send(("closing", told.generation, error))
