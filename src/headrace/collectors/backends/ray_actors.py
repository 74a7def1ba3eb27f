"""Workers as Ray actors, on any machine of a cluster.

Each worker has its own actor, which starts when a machine has room. Until then, or if its machine
is lost, it runs in another worker's actor. A worker leaves a machine that is about to be taken
away. Fragments come straight from the worker's machine; each machine fetches each version of the
weights once. At most 1 + lag calls of each vector are under way. The actor: `ray_worker.py`.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import ray
from ray.exceptions import RayError

from headrace.batch import Fragments, unpack
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import (
    Done,
    Exited,
    LostWork,
    Message,
    WorkerBackend,
    WorkerHandle,
    WorkerSetup,
    WorkOrder,
)
from headrace.collectors.backends.ray_worker import INSTALLED_THERE, Beat, WorkerActor
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.distributed import ray_internals
from headrace.distributed.channel import pickled
from headrace.errors import WorkerError
from headrace.models.policy import Policy
from headrace.timeouts import LEAST_LIMIT_S, RestartRate, StallTimer
from headrace.weights import FlatWeights

_CONTROL = "control"  # calls that need not wait for a fragment
_UNREACHABLE_S = 20.0  # without a sign of life, where no step is known to take longer
_CHECK_EVERY_S = 2.0  # at the seldomest: whether all actors are alive
_STACK_WITHIN_S = 0.5
_WITH_A_CALL = 100 * 1024  # bytes: Ray's own limit for what it does not put into an object store
_LEAVE_BEFORE_S = 10.0  # a machine is taken away; until then another may come
# Until a worker shares an actor; at the start there is room, and imports take long.
_SHARE_AFTER_S, _FIRST_SHARE_AFTER_S = 5.0, 60.0


@dataclass(frozen=True)
class Needs:
    """Requirements of an actor on its machine.

    Attributes:
        resources: amounts of Ray's custom resources.
        at_once: number of this rank's actors that fit now. The others are requested one after
            the other, so that ranks share new machines.
    """

    num_cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    at_once: int = 1 << 30


class _Actor:
    """An actor, from when it is requested."""

    def __init__(self, needs: Needs, plan: Any) -> None:
        options: Any = {"concurrency_groups": {_CONTROL: 1}, "num_gpus": 0, "max_restarts": 0}
        options["enable_task_events"] = False  # a tenth of what a call takes
        actor_class: Any = ray.remote(**options)(WorkerActor)
        self.handle = actor_class.options(
            scheduling_strategy="SPREAD",
            num_cpus=needs.num_cpus,
            resources=needs.resources,
            **({"label_selector": needs.labels} if needs.labels else {}),
        ).remote(plan, os.getcwd())
        self.hello = self.handle.hello.remote()
        self.node = ""  # its machine, once it is up
        self.workers: list[RayWorkerHandle] = []  # that run here
        self.beats: dict[int, Beat] = {}  # by worker
        self.has_weights = False  # came with an order
        self._stall = StallTimer()
        self._request, self._num_answers = None, 0

    def control(self, method: str, *arguments: Any) -> Any:
        """Call a method that need not wait for a fragment."""
        return getattr(self.handle, method).options(concurrency_group=_CONTROL).remote(*arguments)

    def request_beats(self) -> None:
        """Read the signs of life, if they have come, and request the next ones."""
        if self._request is not None and ray.wait([self._request], timeout=0)[0]:
            with contextlib.suppress(RayError):  # it is lost, which other calls say as well
                self.beats = ray.get(self._request)
            self._request, self._num_answers = None, self._num_answers + 1
        if self._request is None:
            self._request = self.control("beat")

    def lost_machine(self) -> bool:
        """Return True if it died because its machine was lost, perhaps before it was up."""
        return ray_internals.died_with_its_node(self.handle)

    def silent_s(self, now: float) -> float:
        """Return for how long it has not answered."""
        return self._stall.lasts(now, self._num_answers) if self._request is not None else 0.0


def _exited(error: RayError, node: str) -> Exited:
    """Describe how an actor has ended, and whether its work may be the cause."""
    nodes: Any = ray.nodes  # it has no types
    alive = {each["NodeID"] for each in nodes() if each["Alive"]}
    if node not in alive or getattr(error, "preempted", False):
        return Exited("was on a machine that is gone", counts=False)
    if type(error).__name__ == "ActorUnavailableError":
        return Exited(f"cannot be reached\n{error}", counts=False)
    return Exited(f"died\n{error}")


class RayWorkerHandle(WorkerHandle):
    """A worker in an actor: its own, or for a while another worker's."""

    def __init__(self, index: int, vectors: list[int], backend: "RayBackend") -> None:
        super().__init__(index, vectors)
        self._backend = backend
        self.requested: _Actor | None = None  # its actor, until that is up
        self.actor: _Actor | None = None  # its actor, once that is up
        self.host: _Actor | None = None  # the actor in which it runs
        self.waiting: tuple[WorkerSetup, float] | None = None  # for an actor, since when
        self.messages: list[Message] = []  # not read yet
        self.filled: dict[tuple[int, int], Fragments] = {}  # by vector and buffer
        self.given_back: int | None = None  # env steps, because it moves; None: it stays

    @property
    def is_running(self) -> bool:
        return self.host is not None

    def fragments(self, vector: int, buffer: int) -> Fragments:
        return self.filled[vector, buffer]

    def start(self, setup: WorkerSetup) -> None:
        self.waiting = setup, time.monotonic()
        self._backend.place_workers()

    def send(self, order: WorkOrder) -> None:
        weights, host = self._backend.weights, self.host
        version = max(weights) if order.version is None else order.version
        has_weights = order.version is None and host is not None and host.has_weights
        self.call("fill", (order, version), None if has_weights else weights[version])
        if host is not None:
            host.has_weights = True

    def call(self, method: str, content: tuple[Any, ...], *arguments: Any) -> None:
        """Call a method for this worker, which returns a message."""
        if self.host is not None:  # else it is gone, which `poll` says
            packed = cloudpickle.dumps((self.index, *content))
            ref = getattr(self.host.handle, method).remote(packed, *arguments)
            self._backend.calls[ref] = self

    def poll(self) -> list[Message]:
        messages, self.messages = self.messages, []
        return messages

    def progress(self, orders: list[WorkOrder]) -> object:
        """Return the last sign of life. A worker that waits for a machine makes progress."""
        if self.waiting is not None:
            return object()
        return (beat := self._beat()) and (beat.laps, beat.taken)

    def stack(self) -> str:
        if self.host is None:
            return ""
        try:
            return str(ray.get(self.host.control("stack"), timeout=_STACK_WITHIN_S))
        except RayError:
            return ""

    def position(self, orders: list[WorkOrder], snapshots: EpisodeSnapshots) -> str:
        beat = self._beat()
        if beat is None or beat.order not in orders:
            return "between two fragments, or in the first seconds of one"
        plan = self._backend.plan
        n = plan.envs_per_vector
        vectors = [v for v, _, _ in beat.order.fragments]
        envs = ", ".join(f"{v * n} to {v * n + n - 1}" if n > 1 else f"{v}" for v in vectors)
        return (
            f"after about {beat.taken} env steps of a fragment of env {envs} of {plan.spec.id}, "
            f"{self.name}"
        )

    def lose(self, orders: list[WorkOrder]) -> LostWork:
        """End the actor, if the worker still runs there. Count the steps of the last beat."""
        beat, plan, backend = self._beat(), self._backend.plan, self._backend
        taken = self.given_back or 0
        if beat is not None and beat.order in orders:
            taken += beat.taken
        whole = plan.num_steps * plan.envs_per_vector
        left = whole * sum(len(order.fragments) for order in orders) - taken
        self.waiting = self.given_back = None
        backend.calls = {ref: worker for ref, worker in backend.calls.items() if worker is not self}
        if (host := self.host) is not None:
            self.host = None
            host.workers.remove(self)
            hung = f"shared its process with {self.name}, which hung"
            backend.lose_actor(host, Exited(hung, counts=False))  # unless that is known
        return LostWork(taken, left)

    def _beat(self) -> Beat | None:
        return self.host.beats.get(self.index) if self.host is not None else None


class RayBackend(WorkerBackend):
    """The actors of a rank. Raises UsageError if the environment cannot be sent to them."""

    workers: list[RayWorkerHandle]

    def __init__(
        self, plan: SamplingPlan, shares: list[list[int]], needs: Needs | None = None
    ) -> None:
        self.plan, self._needs = plan, needs or Needs()
        self._plan_ref, self._layouts = ray.put(pickled(plan, "worker processes")), plan.layouts
        policies = plan.build_policies()
        self._flat = np.zeros(FlatWeights.num_bytes(policies), np.uint8)
        self._to_send = FlatWeights(policies, self._flat)
        self.weights: dict[int, Any] = {}  # by version: the newest two
        self.workers = [RayWorkerHandle(i, share, self) for i, share in enumerate(shares)]
        self.calls: dict[Any, RayWorkerHandle] = {}  # under way
        self._num_requested = 0  # actors, so far
        self._leaving: list[_Actor] = []  # their machines are about to be taken away
        self._draining: dict[str, float] = {}  # machines, until when they are there (epoch, s)
        self._node = ray.get_runtime_context().get_node_id()
        self._checked_at, self._check_every_s = 0.0, _CHECK_EVERY_S
        self._newest_at = 0.0  # when the last actor came up
        self._failed_starts = RestartRate(plan.guards.max_restarts)
        self._num_bytes = dict.fromkeys(("fragments", "fragments_remote", "weights"), 0)

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._to_send.publish(policies)
        is_small = self._flat.nbytes <= _WITH_A_CALL
        self.weights[version] = self._flat.tobytes() if is_small else ray.put(self._flat)
        self.weights.pop(version - 2, None)
        self._num_bytes["weights"] += self._flat.nbytes
        if self.plan.asynchronous:
            for actor in self._hosts():
                self._send_newest(actor)

    def wait(self, wait_s: float) -> list[RayWorkerHandle]:
        now = time.monotonic()
        if now - self._checked_at >= self._check_every_s:
            self._checked_at = now
            self._request_beats()
        self.place_workers()
        coming = {w.requested.hello: w for w in self.workers if w.requested is not None}
        refs = [*self.calls, *coming]
        wait_s = 0.0 if any(worker.messages for worker in self.workers) else wait_s
        if not refs:
            time.sleep(wait_s)  # a back-off passes: there is nothing to wait for
        elif ray.wait(refs, timeout=wait_s)[0]:
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                if ref in coming:
                    self._on_ready(coming[ref], now)
                elif ref in self.calls:
                    self._receive(ref)
        return [worker for worker in self.workers if worker.messages]

    def departures(self) -> Iterator[tuple[RayWorkerHandle, int]]:
        for worker in self.workers:
            host = worker.host
            if host is None or worker.messages or not self._must_leave(worker, host):
                continue
            if worker not in self.calls.values():
                self._detach(worker, host)
                given_back, worker.given_back = worker.given_back or 0, None
                yield worker, given_back
            elif self.plan.asynchronous and worker.given_back is None:
                # Else there is a moment without orders, before the next batch.
                worker.given_back = 0
                host.control("leave", worker.index)

    def check(self, now: float, limit_s: float) -> None:
        self._check_every_s = min(_CHECK_EVERY_S, limit_s / 4)  # answers are read at the next one
        usual_s = limit_s if limit_s > LEAST_LIMIT_S else 0.0
        # A step that holds Python's lock gives no sign of life either.
        unreachable_s = max(_UNREACHABLE_S, self.plan.guards.env_timeout_s or usual_s)
        for actor in self._actors():
            starting = any(worker.index not in actor.beats for worker in actor.workers)
            longest_s = unreachable_s * (TIMES_AS_LONG_TO_START if starting else 1)
            if actor.silent_s(now) > longest_s:
                silent = f"has given no sign of life for {longest_s:g} s"
                self.lose_actor(actor, Exited(silent, counts=False))

    def stop(self) -> None:
        for actor in self._actors():
            actor.control("stop")

    def metrics(self) -> dict[str, float]:
        metrics = {f"{name}_bytes": float(count) for name, count in self._num_bytes.items()}
        self._num_bytes = dict.fromkeys(self._num_bytes, 0)
        return metrics | {"workers_up": float(len(self._hosts()))}

    def close(self, within_s: float) -> None:
        actors, failed = self._actors(), None
        closing = [actor.handle.close.remote() for actor in actors]
        try:
            if closing:
                closing, _ = ray.wait(closing, num_returns=len(closing), timeout=within_s)
            for ref in closing:
                with contextlib.suppress(RayError):  # it is gone already
                    failed = ray.get(ref) or failed
        finally:
            for actor in [*actors, *(w.requested for w in self.workers if w.requested)]:
                ray.kill(actor.handle)
            self._leaving, self.calls, self.weights = [], {}, {}
            for worker in self.workers:
                worker.requested = worker.actor = worker.host = worker.waiting = None
                worker.filled = {}
        if failed is not None:
            raise failed

    def place_workers(self) -> None:
        """Request actors, and have waiting workers start where they can."""
        num_coming = sum(worker.requested is not None for worker in self.workers)
        for worker in self.workers:
            may_request = self._num_requested < self._needs.at_once or not num_coming
            if worker.actor is None and worker.requested is None and may_request:
                worker.requested = _Actor(self._needs, self._plan_ref)
                self._num_requested, num_coming = self._num_requested + 1, num_coming + 1
        now, hosts = time.monotonic(), self._hosts()
        for worker in self.workers:
            if worker.waiting is None:
                continue
            setup, since = worker.waiting
            is_first = setup.generation == 1 and worker.index < self._needs.at_once
            share_after_s = _FIRST_SHARE_AFTER_S if is_first else _SHARE_AFTER_S
            if worker.actor is not None:
                self._start(worker, worker.actor, setup)
            elif hosts and now - max(since, self._newest_at) > share_after_s:
                self._start(worker, min(hosts, key=lambda actor: len(actor.workers)), setup)

    def lose_actor(self, actor: _Actor, exited: Exited) -> None:
        """Kill an actor, unless it is known to be lost, and report its workers as ended."""
        if actor not in self._actors():
            return
        ray.kill(actor.handle)
        for worker in actor.workers:
            worker.messages.append(exited)
        if actor in self._leaving:
            self._leaving.remove(actor)
        for worker in self.workers:
            if worker.actor is actor:
                worker.actor = None

    def _receive(self, ref: Any) -> None:
        worker = self.calls.pop(ref)
        host = worker.host
        assert host is not None
        try:
            packed, *parts = ray.get(ref)
        except RayError as error:
            self.lose_actor(host, _exited(error, host.node))
            return
        message, num_finals = cloudpickle.loads(packed)
        if isinstance(message, Done):
            if worker.given_back is not None and not message.result.whole:
                worker.given_back += message.result.taken
                return
            if message.result.whole:
                left, finals = iter(parts), iter(num_finals)
                for v, buffer, _ in message.order.fragments:
                    worker.filled[v, buffer] = tuple(
                        unpack(layout, next(finals), left) for layout in self._layouts
                    )
                size = sum(part.nbytes for part in parts)
                self._num_bytes["fragments"] += size
                self._num_bytes["fragments_remote"] += size * (host.node != self._node)
        worker.messages.append(message)

    def _on_ready(self, worker: RayWorkerHandle, now: float) -> None:
        """Note that the actor of a worker is up, or could not be made."""
        actor, worker.requested = worker.requested, None
        assert actor is not None
        try:
            actor.node, self._newest_at = ray.get(actor.hello), now
        except RayError as error:  # it is requested again
            failed = getattr(error, "actor_init_failed", False)
            if failed or not (actor.lost_machine() or self._failed_starts.again(now)):
                raise WorkerError(
                    f"{error}\nA worker did not start on a machine of the cluster. "
                    f"{INSTALLED_THERE}"
                ) from None
            return
        worker.actor = actor
        if self.plan.asynchronous and self.weights:
            self._send_newest(actor)

    def _send_newest(self, actor: _Actor) -> None:
        newest = max(self.weights)
        actor.control("newer", newest, self.weights[newest])

    def _must_leave(self, worker: RayWorkerHandle, host: _Actor) -> bool:
        """Return True if its actor is up elsewhere, or it must move to another machine."""
        if worker.actor not in (None, host):
            return True
        left_s = self._draining.get(host.node, math.inf) - time.time()
        return left_s < _LEAVE_BEFORE_S and host not in self._hosts()

    def _detach(self, worker: RayWorkerHandle, host: _Actor) -> None:
        worker.host = None
        host.workers.remove(worker)
        host.handle.drop.remote(worker.index)
        if host in self._leaving and not host.workers:
            self._leaving.remove(host)
            ray.kill(host.handle)

    def _start(self, worker: RayWorkerHandle, actor: _Actor, setup: WorkerSetup) -> None:
        worker.waiting, worker.host = None, actor
        actor.workers.append(worker)
        actor.beats.pop(worker.index, None)
        worker.call("start", (setup,))

    def _actors(self) -> list[_Actor]:  # that are up
        return [w.actor for w in self.workers if w.actor is not None] + self._leaving

    def _hosts(self) -> list[_Actor]:
        """Return where workers can run: on a machine that goes away only if there is no other."""
        return [w.actor for w in self.workers if w.actor is not None] or self._leaving

    def _request_beats(self) -> None:
        """Request signs of life of all actors; find the machines that are about to go away."""
        self._draining = ray_internals.draining_nodes()
        for worker in self.workers:
            if (actor := worker.actor) is not None and actor.node in self._draining:
                worker.actor = None
                self._leaving.append(actor)
        for actor in self._actors():
            actor.request_beats()
