"""Workers on the machines of a Ray cluster.

Each machine that has room gets a host of this rank's workers there: an actor (`ray_host.py`), which
connects to the learner. A worker (`ray_worker.py`) leaves a machine that is about to be taken away.
"""

import contextlib
import math
import select
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.api import (
    Exited,
    Failed,
    WorkerBackend,
)
from headrace.collectors.backends.ray_host import own_address
from headrace.collectors.backends.ray_requests import (
    Needs,
    RequestedHost,
    described_end,
    machines_alive,
)
from headrace.collectors.backends.ray_worker import RayWorkerHandle
from headrace.collectors.backends.worker_host import (
    INSTALLED_THERE,
    AskStack,
    Beats,
    Close,
    Closed,
    Drop,
    Leave,
    Said,
    Stack,
    Stop,
    Weights,
)
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.distributed import ray_internals
from headrace.distributed.channel import Listener, pickled
from headrace.errors import HeadraceError, WorkerError
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.timeouts import RestartRate
from headrace.weights import FlatWeights

_UNREACHABLE_S = 20.0  # without a sign of life
_CHECK_EVERY_S = 2.0  # whether all hosts are alive, and machines stay
_STACK_WITHIN_S = 2.0
_CAUSE_WITHIN_S = 2.0  # until Ray knows why a connection has ended
_LEAVE_BEFORE_S = 10.0  # a machine is taken away; until then another may come
# Until a worker shares a host; at the start there is room, and imports take long.
_SHARE_AFTER_S, _FIRST_SHARE_AFTER_S = 0.5, 60.0
_SPLIT_AFTER_S = 5.0  # a host of many workers has found no machine: until smaller ones are tried


class RayBackend(WorkerBackend):
    """The hosts of a rank. Raises UsageError if the environment cannot be sent to them."""

    workers: list[RayWorkerHandle]

    def __init__(
        self, plan: SamplingPlan, shares: list[list[int]], needs: Needs | None = None
    ) -> None:
        self.plan, self._needs = plan, needs or Needs()
        self._plan_ref = ray.put(pickled(plan, "worker processes"))
        policies = plan.build_policies()
        self._flat = np.zeros(FlatWeights.num_bytes(policies), np.uint8)
        self._to_send = FlatWeights(policies, self._flat)
        self._weights: dict[int, Array] = {}  # by version: the newest two
        self.workers = [
            RayWorkerHandle(i, share, plan, self._stack) for i, share in enumerate(shares)
        ]
        self._listener = Listener(own_address())
        self._poll = select.poll()
        self._hosts: dict[int, RequestedHost] = {}  # that are up, by descriptor
        self._num_requested = 0  # hosts, so far
        self._next_places = 1  # of the next host: doubled where one was found, else halved
        self._leaving: list[RequestedHost] = []  # their machines are about to be taken away
        self._draining: dict[str, float] = {}  # machines, until when they are there (epoch, s)
        self._node = ray.get_runtime_context().get_node_id()
        self._checked_at = 0.0
        self._newest_at = 0.0  # when the last host came up
        self._failed_starts = RestartRate(plan.guards.max_restarts)
        self._weights_bytes = 0  # sent in this update
        self._is_closing = False
        self._close_error: HeadraceError | None = None
        groups: dict[str, list[RayWorkerHandle]] = {}
        alive = machines_alive()
        machines = [machine for machine in self._needs.machines if machine in alive]
        for worker, machine in zip(self.workers, machines, strict=False):
            groups.setdefault(machine, []).append(worker)
        for machine, workers in groups.items():
            self._request(workers, machine)

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._to_send.publish(policies)
        self._weights[version] = self._flat.copy()
        self._weights.pop(version - 2, None)
        for host in self._hosts.values():
            # Where workers take the newest weights, a slow machine may leave out a version.
            if not (self.plan.asynchronous and host.is_behind):
                self._send_weights(host, version)

    def wait(self, wait_s: float) -> list[RayWorkerHandle]:
        now = time.monotonic()
        self._find_hosts(now)
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            self._find_departures()
            self._find_ended()
        self.place_workers()
        wait_s = 0.0 if any(worker.messages for worker in self.workers) else wait_s
        for descriptor, _ in self._poll.poll(1000 * wait_s):
            if (host := self._hosts.get(descriptor)) is not None:
                self._read(host)
        return [worker for worker in self.workers if worker.messages]

    def departures(self) -> Iterator[tuple[RayWorkerHandle, int]]:
        for worker in self.workers:
            host = worker.host
            leaves = worker.given_back is not None or (host and self._must_leave(worker, host))
            if host is None or worker.messages or not leaves:
                continue
            if not worker.num_pending:
                worker.leave_host()
                host.send(Drop(worker.index))
                if host in self._leaving and not host.workers:
                    self._leaving.remove(host)
                    host.send(Close())
                given_back, worker.given_back = worker.given_back or 0, None
                yield worker, given_back
            elif self.plan.asynchronous and worker.given_back is None:
                # Else there is a moment without orders, before the next batch.
                worker.given_back = 0
                host.send(Leave(worker.index))

    def check(self, now: float, limit_s: float) -> None:
        for host in list(self._hosts.values()):
            starting = any(index not in host.beats for index in host.workers)
            longest_s = _UNREACHABLE_S * (TIMES_AS_LONG_TO_START if starting else 1)
            if host.silent_s(now) > longest_s:
                silent = f"has given no sign of life for {longest_s:g} s"
                self._lose(host, Exited(silent, counts=False))

    def stop(self) -> None:
        for host in self._hosts.values():
            host.send(Stop())

    def metrics(self) -> dict[str, float]:
        received = sum((worker.received for worker in self.workers), Counter[str]())
        metrics = {
            "fragments_bytes": float(received.total()),
            "fragments_remote_bytes": float(received.total() - received[self._node]),
            "weights_bytes": float(self._weights_bytes),
            "workers_up": float(sum(w.home is not None and w.home is w.host for w in self.workers)),
        }
        self._weights_bytes = 0
        for worker in self.workers:
            worker.received.clear()
        return metrics

    def close(self, within_s: float) -> None:
        deadline, self._is_closing = time.monotonic() + within_s, True
        try:
            for host in self._hosts.values():
                host.send(Close())
            while self._hosts and (left_s := deadline - time.monotonic()) > 0:
                for descriptor, _ in self._poll.poll(1000 * left_s):
                    self._read(self._hosts[descriptor])
        finally:
            self._listener.close()
            for host in {*self._hosts.values(), *self._coming()}:
                self._forget(host)
            self._leaving, self._weights = [], {}
            for worker in self.workers:
                worker.requested = worker.home = worker.host = worker.waiting = None
                worker.filled = {}
        if self._close_error is not None:
            raise self._close_error

    def place_workers(self) -> None:
        """Request places, and have waiting workers start where they can."""
        now = time.monotonic()
        for host in self._coming():
            patience_s = _FIRST_SHARE_AFTER_S if host.machine else _SPLIT_AFTER_S
            # Smaller ones, or one elsewhere, may find room.
            if (host.places > 1 or host.machine) and now - host.since > patience_s:
                self._next_places = max(1, host.places // 2)
                self._forget(host)
        if not self._coming():
            homeless = [worker for worker in self.workers if worker.home is None]
            if homeless:
                self._request(homeless[: self._next_places])
        hosts = self._where_to_run()
        for worker in self.workers:
            if worker.waiting is None:
                continue
            setup, since = worker.waiting
            is_first = setup.generation == 1 and worker.index < len(self._needs.machines)
            share_after_s = _FIRST_SHARE_AFTER_S if is_first else _SHARE_AFTER_S
            if worker.home is not None:
                worker.start_in(worker.home)
            elif hosts and now - max(since, self._newest_at) > share_after_s:
                worker.start_in(min(hosts, key=lambda host: len(host.workers) / host.places))

    def _stack(self, host: RequestedHost, index: int) -> str:
        """Return the stack of a worker in a host; "": unknown."""
        host.send(AskStack(index))
        deadline = time.monotonic() + _STACK_WITHIN_S
        while host.channel is not None and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(1000 * left_s):
                for message in self._read(self._hosts[descriptor]):
                    if isinstance(message, Stack) and message.worker == index:
                        return message.text
        return ""

    def _request(self, workers: list[RayWorkerHandle], machine: str = "") -> None:
        """Request a host with places for these workers."""
        self._num_requested += 1
        door = self._listener.door
        host = RequestedHost(self._needs, len(workers), machine, door, self._num_requested)
        for worker in workers:
            worker.requested = host

    def _coming(self) -> list[RequestedHost]:
        return list(dict.fromkeys(w.requested for w in self.workers if w.requested is not None))

    def _where_to_run(self) -> list[RequestedHost]:
        """Return hosts; one on a machine that goes away only if there is no other."""
        homes = dict.fromkeys(w.home for w in self.workers if w.home is not None)
        return list(homes) or self._leaving

    def _find_hosts(self, now: float) -> None:
        """Find the requested hosts that are up, or could not be made."""
        if not (coming := {host.connected: host for host in self._coming()}):
            return
        for ref in ray.wait(list(coming), num_returns=len(coming), timeout=0)[0]:
            host = coming[ref]
            try:
                host.node, host.channel = ray.get(ref), self._listener.accept(host.number)
            except (RayError, OSError) as error:
                self._on_failed_start(host, error, now)
                continue
            host.served, self._newest_at = host.handle.serve.remote(self._plan_ref), now
            if not host.machine:
                self._next_places = max(self._next_places, 2 * host.places)
            self._hosts[host.channel.fileno()] = host
            self._poll.register(host.channel, select.POLLIN)
            for worker in self.workers:
                if worker.requested is host:
                    worker.requested, worker.home = None, host
            for version in sorted(self._weights):
                self._send_weights(host, version)

    def _on_failed_start(self, host: RequestedHost, error: Exception, now: float) -> None:
        """Have it requested again, or raise WorkerError."""
        is_lost = ray_internals.died_with_its_node(host.handle)
        is_lost |= bool(host.machine) and host.machine not in machines_alive()
        self._forget(host)
        cause = error.cause if isinstance(error, RayTaskError) else error
        remedy = INSTALLED_THERE
        if isinstance(cause, OSError):
            name = ":".join(map(str, self._listener.door.address))
            remedy = f"It must reach the learner at {name}: let machines reach each other."
        failed = getattr(error, "actor_init_failed", False)
        if failed or not (is_lost or self._failed_starts.again(now)):
            raise WorkerError(
                f"{error}\nWorkers did not start on a machine of the cluster. {remedy}"
            ) from None

    def _find_departures(self) -> None:
        """Find the machines that are about to go away."""
        self._draining = ray_internals.draining_nodes()
        for worker in self.workers:
            if (home := worker.home) is not None and home.node in self._draining:
                worker.home = None
                if home not in self._leaving:
                    self._leaving.append(home)

    def _find_ended(self) -> None:
        """Find the hosts whose processes have ended, which their connections may not tell."""
        served = {host.served: host for host in self._hosts.values()}
        if served:
            for ref in ray.wait(list(served), num_returns=len(served), timeout=0)[0]:
                self._on_ended(served[ref])

    def _on_ended(self, host: RequestedHost) -> None:
        """Report a host that has ended, once Ray knows why."""
        if self._is_closing:
            self._forget(host)
            return
        with contextlib.suppress(EOFError):
            self._hear(host, host.take())  # what came before the end
        exited = Exited("has lost its connection to the learner", counts=False)
        if ray.wait([host.served], timeout=_CAUSE_WITHIN_S)[0]:
            try:
                ray.get(host.served)
            except RayTaskError as error:
                text = f"{error}\nWorkers failed on a machine of the cluster. {INSTALLED_THERE}"
                if not host.workers:
                    raise WorkerError(text) from None
                for index in host.workers:
                    self.workers[index].messages.append(Failed(WorkerError(text)))
            except RayError as error:
                exited = described_end(error, host.node)
        self._lose(host, exited)

    def _lose(self, host: RequestedHost, exited: Exited) -> None:
        """End a host, and report its workers as ended. `wait` has places requested for them."""
        num_places = sum(worker.home is host for worker in self.workers)
        self._next_places = max(self._next_places, num_places)
        for index in sorted(host.workers):
            self.workers[index].leave_host()
            self.workers[index].messages.append(exited)
        self._forget(host)

    def _forget(self, host: RequestedHost) -> None:
        """End a host that has no workers, or was not up."""
        if host.channel is not None:
            self._poll.unregister(host.channel)
            del self._hosts[host.channel.fileno()]
        host.end()
        if host in self._leaving:
            self._leaving.remove(host)
        for worker in self.workers:
            worker.requested = None if worker.requested is host else worker.requested
            worker.home = None if worker.home is host else worker.home

    def _read(self, host: RequestedHost) -> list[Any]:
        """Read what has come from a host, and return it."""
        try:
            messages = host.take()
        except EOFError:
            self._on_ended(host)
            return []
        self._hear(host, messages)
        return messages

    def _hear(self, host: RequestedHost, messages: list[Any]) -> None:
        for message in messages:
            match message:
                case Said(worker=index):
                    worker = self.workers[index]
                    if worker.host is host and worker.generation == message.generation:
                        worker.hear(message)
                case Beats():
                    host.beats = message.beats
                case Closed():
                    self._close_error = message.error or self._close_error
                    self._forget(host)

    def _send_weights(self, host: RequestedHost, version: int) -> None:
        flat = self._weights[version]
        host.send(Weights(version, flat))
        self._weights_bytes += flat.nbytes

    def _must_leave(self, worker: RayWorkerHandle, host: RequestedHost) -> bool:
        """Return True if its place is up elsewhere, or it must move to another machine."""
        if worker.home not in (None, host):
            return True
        left_s = self._draining.get(host.node, math.inf) - time.time()
        return left_s < _LEAVE_BEFORE_S and host not in self._where_to_run()
