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

import cloudpickle
import threadpoolctl
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.collect import forkserver
from headrace.collect.api import Plan
from headrace.collect.channel import Channel
from headrace.collect.rollout import Sampler
from headrace.errors import HeadraceError, SamplerError
from headrace.meter import Meter
from headrace.spec import Array
from headrace.weights import FlatWeights

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


class Slot:
    """A worker's piece of shared memory: two counters, then a fragment of each of its vectors.

    Args:
        memory: of all slots.
        offset: where this one begins.
        plan: the run's.
        vectors: whose fragments these are.
        fresh: poison them.

    Attributes:
        beats: counts what the worker does (its meter's laps), as a sequence of one number.
        generation: of the worker that writes, as a sequence of one number.
        fragments: by vector.
    """

    _HEADER = 64

    def __init__(
        self, memory: mmap.mmap, offset: int, plan: Plan, vectors: list[int], *, fresh: bool
    ) -> None:
        numbers = memoryview(memory)[offset : offset + self._HEADER].cast("q")
        self.beats, self.generation = numbers[0:1], numbers[1:2]
        size = batch.num_bytes(plan.layout)
        self.fragments: dict[int, Fragment] = {}
        first = offset + self._HEADER
        for v in vectors:
            piece = memoryview(memory)[first : first + size]
            self.fragments[v] = batch.allocate(plan.layout, piece, fresh=fresh)
            first += size

    @classmethod
    def num_bytes(cls, plan: Plan, num_vectors: int) -> int:
        """How much memory a slot takes."""
        return cls._HEADER + num_vectors * batch.num_bytes(plan.layout)


def main(channel: int, weights: int, memory: int, words: int, plan: int, orders: int) -> None:
    """The process, from its first line to its last; arguments are file descriptors.

    Args:
        channel: to the learner.
        weights: shared memory; its last byte says that workers are to stop.
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
    fragments = list(slot.fragments.values())
    sampler = Sampler(plan, told.vectors, fragments, meter, told.name)
    published = FlatWeights(sampler.policy, weights)
    restored = sampler.restore(told.state, told.begin_after)
    states = sampler.states() if told.begin_after else {}
    learner.send(("ready", told.generation, (restored, states)))
    meter.lap("start")
    while True:
        command, argument = learner.receive()
        meter.lap("wait")
        if command == "close":
            break
        slot.generation[0] = told.generation
        published.pull(sampler.policy)
        meter.lap("publish")
        steps, version = argument
        filled = sampler.collect(steps, version, lambda: weights[-1] != 0)
        learner.send(("done", told.generation, (filled, meter.seconds(), meter.usual_s())))
        meter.lap("other")
    try:
        sampler.close()
    except HeadraceError as error:
        learner.send(("closing", told.generation, error))
