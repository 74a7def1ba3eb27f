"""Workers as processes of this machine, over anonymous shared memory.

Weights and fragments lie there; a worker owns the fragments that it has an order for. Left out: a
worker's process (`worker_main.py`), and inference for all workers (`inference_server.py`).
"""

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from multiprocessing import connection
from typing import Any

import cloudpickle

from headrace.batch import Fragments
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends import worker_main
from headrace.collectors.backends.api import (
    Done,
    Exited,
    Failed,
    LostWork,
    Message,
    WorkerBackend,
    WorkerHandle,
    WorkerSetup,
    WorkOrder,
)
from headrace.collectors.backends.inference_server import InferenceServer
from headrace.collectors.backends.worker_main import WorkerMemory
from headrace.collectors.snapshots import EpisodeSnapshots, count_unwritten, mark_unwritten
from headrace.distributed.channel import pickled
from headrace.distributed.child_process import ChildProcess, file_in_memory
from headrace.errors import ConfigError
from headrace.meter import Timings
from headrace.models.policy import Policy
from headrace.weights import Published


class ProcessWorker(WorkerHandle):
    """A worker process and its piece of shared memory, which outlives the process.

    `fds` are inherited by the process (weights, memory, plan); `inference` is None where it acts.
    """

    def __init__(
        self,
        index: int,
        vectors: list[int],
        plan: SamplingPlan,
        memory: WorkerMemory,
        fds: Sequence[int],
        inference: InferenceServer | None,
    ) -> None:
        super().__init__(index, vectors)
        self._plan, self.memory, self._fds, self._inference = plan, memory, fds, inference
        self.child: ChildProcess | None = None
        self._laps_at_order = 0

    @property
    def is_running(self) -> bool:
        return self.child is not None

    def fragments(self, vector: int, buffer: int) -> Fragments:
        return self.memory.fragments[vector][buffer]

    def prepare(self, order: WorkOrder) -> None:
        mark_unwritten(chain(*self._ordered([order]).values()))

    def start(self, setup: WorkerSetup) -> None:
        orders = cloudpickle.dumps((setup, self.memory.offset))
        with contextlib.ExitStack() as stack:
            fds = list(self._fds)
            if self._inference is not None:
                requests = self._inference.admit(self.index, self.memory.fragments)
                fds.append(stack.enter_context(requests).fileno())
            self.child = ChildProcess(worker_main.main, orders, fds)

    def send(self, order: WorkOrder | None) -> None:
        self._laps_at_order = self.memory.laps[0]
        if self.child is not None:
            with contextlib.suppress(OSError):  # it is gone, which `poll` says
                self.child.channel.send(order)

    def poll(self) -> list[Message]:
        if self.child is None:
            return []
        has_ended = self.child.has_ended  # before reading: what it sent last is read
        messages: list[Message] = []
        try:
            messages = self.child.channel.take()
        except EOFError:
            has_ended = True
        # A fragment is done only if the process that reports it has written it.
        writer = self.memory.generation[0]
        messages = [m for m in messages if not isinstance(m, Done) or m.generation == writer]
        return [*messages, Exited(self.child.cause())] if has_ended else messages

    def progress(self, orders: list[WorkOrder]) -> tuple[int, int]:
        """Return laps, and rows that are not written: one step of a vector may be long."""
        return self.memory.laps[0], self._unwritten(orders)

    def stack(self) -> str:
        return "" if self.child is None else self.child.stack()

    def position(self, orders: list[WorkOrder], snapshots: EpisodeSnapshots) -> str:
        if not orders or self.memory.laps[0] == self._laps_at_order:
            return "between two fragments"
        if self._inference is None:  # one order after the other
            fragments = {v: of[0] for v, of in self._ordered(orders[:1]).items()}
        elif (turn := self.memory.turn[0]) >= 0:
            fragments = {turn: self._ordered(orders)[turn][0]}
        else:
            return "while waiting for actions"
        return snapshots.describe_position(fragments, self.name)

    def lose(self, orders: list[WorkOrder]) -> LostWork:
        """End the process before its memory is read, or another writes there."""
        self.end(deadline=0.0)
        if self._inference is not None:
            self._inference.dismiss(self.index)
        fragments, left = list(chain(*self._ordered(orders).values())), self._unwritten(orders)
        mark_unwritten(fragments)
        return LostWork(self._plan.env_steps_per_fragment * len(fragments) - left, left)

    def end(self, deadline: float) -> None:
        """End the process, by force at `deadline`. EnvError: an environment failed in closing."""
        if self.child is not None:
            try:
                messages = self.child.end(deadline)
            finally:
                self.child = None
            for message in messages:
                if isinstance(message, Failed) and message.closing:
                    raise message.error

    def _ordered(self, orders: Iterable[WorkOrder]) -> dict[int, list[Fragments]]:
        """Return the memory that the orders fill, by vector."""
        fragments: dict[int, list[Fragments]] = {}
        for v, buffer, _ in chain(*(order.fragments for order in orders)):
            fragments.setdefault(v, []).append(self.memory.fragments[v][buffer])
        return fragments

    def _unwritten(self, orders: list[WorkOrder]) -> int:
        fragments = chain(*self._ordered(orders).values())
        return sum(count_unwritten(self._plan, of) for of in fragments)


class ProcessBackend(WorkerBackend):
    """The worker processes of a rank.

    Raises:
        ConfigError: this platform has no anonymous shared memory.
        UsageError: the environment cannot be sent to another process.
    """

    workers: list[ProcessWorker]

    def __init__(self, plan: SamplingPlan, shares: list[list[int]]) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"num_workers={len(shares)} needs Linux (memfd), and this is {sys.platform}.\n"
                "Use num_workers=0: all environments are stepped in the learner's process."
            )
        policies = plan.build_policies()
        plan_fd = file_in_memory("plan", pickled(plan, "worker processes"))
        weights_fd, weights = shared_memory("weights", Published.num_bytes(policies))
        self._published = Published(policies, weights)
        sizes = [WorkerMemory.num_bytes(plan, len(share)) for share in shares]
        memory_fd, memory = shared_memory("fragments", sum(sizes))
        self._fds = [weights_fd, memory_fd, plan_fd]  # as `worker_main.main` takes them
        self._inference: InferenceServer | None = None
        if plan.inference_device is not None:
            self._inference = InferenceServer(plan, self._published)
        self.workers = []
        for i, share in enumerate(shares):
            piece = WorkerMemory(memory, sum(sizes[:i]), plan, share, fresh=True)
            self.workers.append(ProcessWorker(i, share, plan, piece, self._fds, self._inference))

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._published.publish(policies, version)

    def wait(self, wait_s: float) -> Iterable[ProcessWorker]:
        if self._inference is not None:
            self._inference.check()
        watched: dict[Any, ProcessWorker] = {}
        for worker in self.workers:
            if worker.child is not None:
                watched |= dict.fromkeys(worker.child.waitables, worker)
        ready = connection.wait(list(watched), wait_s)
        return sorted({watched[each] for each in ready}, key=lambda worker: worker.index)

    def check(self, now: float, limit_s: float) -> None:
        if self._inference is not None:
            self._inference.watch(now, limit_s)

    def stop(self) -> None:
        self._published.stop[0] = 1

    def timings(self) -> dict[str, Timings]:
        return {} if self._inference is None else {"inference": self._inference.timings()}

    def metrics(self) -> dict[str, float]:
        return {} if self._inference is None else self._inference.metrics()

    def close(self, within_s: float) -> None:
        for worker in self.workers:
            worker.send(None)
        deadline = time.monotonic() + within_s
        with contextlib.ExitStack() as stack:  # backwards, and goes on if one raises
            stack.callback(self._close_memory)
            for worker in self.workers:
                stack.callback(worker.end, deadline)

    def _close_memory(self) -> None:
        if self._inference is not None:
            self._inference.close()
            self._inference = None
        while self._fds:
            os.close(self._fds.pop())


def shared_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Make anonymous shared memory, which is gone with the last process that has it open."""
    fd = os.memfd_create(f"headrace {name}")
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)
