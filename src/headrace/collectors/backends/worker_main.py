"""A worker process: steps its vectors when it is told to, into memory that the learner gave it.

Left out: the learner's end (`worker_pool.py`), how orders are carried out (`carry_out.py`),
and stepping itself (`rollout.py`).
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
import traceback

import cloudpickle
import threadpoolctl
import torch

from headrace.collectors.api import Plan
from headrace.collectors.backends import carry_out
from headrace.collectors.backends.channel import Channel
from headrace.collectors.backends.orders import Orders, Slot
from headrace.collectors.rollout import Sampler
from headrace.distributed import child_process
from headrace.errors import HeadraceError, SamplerError
from headrace.meter import Meter
from headrace.weights import Published

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
        told: Orders = cloudpickle.loads(read_whole(orders))
        name = told.name
        _run(learner, weights, memory, read_whole(plan), told, actions)
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


def _run(
    learner: Channel,
    weights_fd: int,
    memory_fd: int,
    pickled: bytes,
    told: Orders,
    actions: socket.socket | None,
) -> None:
    """Answer commands until told to close."""
    weights, memory = mmap.mmap(weights_fd, 0), mmap.mmap(memory_fd, 0)
    plan: Plan = cloudpickle.loads(pickled)
    slot = Slot(memory, told.offset, plan, told.vectors, fresh=False)
    slot.turn[0] = -1
    meter = Meter(beats=slot.beats, keeps_laps=plan.timeline)
    sampler = Sampler(plan, told.vectors, meter, told.name, acts=actions is None)
    published = Published(sampler.policy if actions is None else None, weights)
    restored = sampler.restore(told.state, told.begin_after)
    states = sampler.states() if told.begin_after else {}
    learner.send(("ready", told.generation, (restored, states)))
    meter.lap("start")
    station = carry_out.Station(learner, told.generation, slot, sampler, published, meter)
    if actions is None:
        carry_out.one_by_one(station)
    else:
        carry_out.InTurns(station, actions).serve()
    try:
        sampler.close()
    except HeadraceError as error:
        learner.send(("closing", told.generation, error))
