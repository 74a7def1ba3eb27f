"""A worker on a machine of a Ray cluster, as the learner holds it.

It has a place in a host. Until that host is up, or if its machine is lost, the worker runs in
another host. Left out: which hosts there are, and in which one it runs (`ray_backend.py`).
"""

import time
from collections import Counter
from collections.abc import Callable

from headrace.batch import Fragments, unpack
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import (
    Done,
    Exited,
    LostWork,
    Message,
    Ready,
    WorkerHandle,
    WorkerSetup,
    WorkOrder,
)
from headrace.collectors.backends.ray_requests import RequestedHost
from headrace.collectors.backends.worker_host import Beat, Drop, Fill, Said, Start
from headrace.collectors.snapshots import EpisodeSnapshots


class RayWorkerHandle(WorkerHandle):
    """A worker in a host: where it has its place, or for a while in another one.

    Args:
        ask_stack: returns the stack of a worker in a host.
    """

    def __init__(
        self,
        index: int,
        vectors: list[int],
        plan: SamplingPlan,
        ask_stack: Callable[[RequestedHost, int], str],
    ) -> None:
        super().__init__(index, vectors)
        self._plan, self._ask_stack = plan, ask_stack
        self.requested: RequestedHost | None = None  # where its place will be
        self.home: RequestedHost | None = None  # where its place is, once that is up
        self.host: RequestedHost | None = None  # in which it runs
        self.waiting: tuple[WorkerSetup, float] | None = None  # for a host, since when
        self.generation = 0
        self.num_pending = 0  # requests that are not answered
        self.messages: list[Message] = []  # not read yet
        self.filled: dict[tuple[int, int], Fragments] = {}  # by vector and buffer
        self.received = Counter[str]()  # bytes of fragments from each machine, of this update
        self.given_back: int | None = None  # env steps, because it moves; None: it stays
        self._last_beat: Beat | None = None  # of a process that is lost
        self._lost: LostWork | None = None  # by a process whose host has counted it

    @property
    def is_running(self) -> bool:
        return self.host is not None

    def fragments(self, vector: int, buffer: int) -> Fragments:
        return self.filled[vector, buffer]

    def start(self, setup: WorkerSetup) -> None:
        self.waiting = setup, time.monotonic()

    def start_in(self, host: RequestedHost) -> None:
        """Start in a host."""
        assert self.waiting is not None
        setup, _ = self.waiting
        self.waiting, self.host, self.generation, self.num_pending = None, host, setup.generation, 0
        self._last_beat = self._lost = None
        host.workers.add(self.index)
        host.beats.pop(self.index, None)
        self._request(Start(self.index, setup))

    def send(self, order: WorkOrder) -> None:
        self._request(Fill(self.index, order))

    def poll(self) -> list[Message]:
        messages, self.messages = self.messages, []
        return messages

    def progress(self, orders: list[WorkOrder]) -> object:
        """Return the last sign of life. A worker that waits for a machine makes progress."""
        if self.waiting is not None:
            return object()
        return (beat := self._beat()) and (beat.laps, beat.taken)

    def stack(self) -> str:
        return "" if self.host is None else self._ask_stack(self.host, self.index)

    def position(self, orders: list[WorkOrder], snapshots: EpisodeSnapshots) -> str:
        beat = self._beat()
        if beat is None or not beat.is_of(orders):
            return "between two fragments, or in the first moments of one"
        plan = self._plan
        n = plan.envs_per_vector
        vectors = [v for v, _, _ in beat.fragments]
        envs = ", ".join(f"{v * n} to {v * n + n - 1}" if n > 1 else f"{v}" for v in vectors)
        return (
            f"after about {beat.taken} env steps of a fragment of env {envs} of {plan.spec.id}, "
            f"{self.name}"
        )

    def hear(self, said: Said) -> None:
        """Take a message of the process that does its work now."""
        message = said.message
        if isinstance(message, Ready | Done):
            self.num_pending -= 1
        if isinstance(message, Exited):
            self._lost = said.lost
            self.leave_host()
        elif isinstance(message, Done) and message.result.whole:
            self._unpack(message.order, said)
        elif isinstance(message, Done) and self.given_back is not None:
            self.given_back += message.result.taken
            return
        self.messages.append(message)

    def lose(self, orders: list[WorkOrder]) -> LostWork:
        """End the process, if there is one. Count what is known of its steps."""
        beat, plan = self._beat(), self._plan
        taken = self.given_back or 0
        if self._lost is not None:
            taken += self._lost.taken
        elif beat is not None and beat.is_of(orders):
            taken += beat.taken
        left = plan.env_steps_per_fragment * sum(len(each.fragments) for each in orders) - taken
        self.waiting = self.given_back = None
        self.messages = []  # of the process that is lost
        if (host := self.leave_host()) is not None:
            host.send(Drop(self.index, at_once=True))
        return LostWork(taken, left)

    def leave_host(self) -> RequestedHost | None:
        """Note that it runs nowhere. Return where it ran."""
        host, self._last_beat, self.host = self.host, self._beat(), None
        if host is not None:
            host.workers.remove(self.index)
        return host

    def _unpack(self, order: WorkOrder, said: Said) -> None:
        """Take the fragments that fill an order."""
        parts, num_finals = iter(said.parts), iter(said.num_finals)
        for v, buffer, _ in order.fragments:
            self.filled[v, buffer] = tuple(
                unpack(layout, next(num_finals), parts) for layout in self._plan.layouts
            )
        if self.host is not None:
            self.received[self.host.node] += sum(part.nbytes for part in said.parts)

    def _request(self, message: Start | Fill) -> None:
        if self.host is not None:  # else it is gone, which `poll` says
            self.num_pending += 1
            self.host.send(message)

    def _beat(self) -> Beat | None:
        beat = self._last_beat if self.host is None else self.host.beats.get(self.index)
        return beat if beat is not None and beat.generation == self.generation else None
