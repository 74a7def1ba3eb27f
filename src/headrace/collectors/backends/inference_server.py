"""Inference for all workers of a rank, in a thread of the learner's process, on its device.

All vectors that are ready make one batch. Rows lie in the fragments, in shared memory: a worker
reads a row's actions only after the answer (the system calls in between order that). The thread
has a copy of the policy, so that the learner can change its weights meanwhile. A round holds a
lock: a dead worker is removed between two rounds, before another writes to its fragments.
"""

import contextlib
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, Fragments, each
from headrace.collectors.api import SamplingPlan
from headrace.collectors.backends.worker_main import ANSWER, NEWEST, REQUEST
from headrace.errors import WorkerError
from headrace.meter import Meter, Timings
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.timeouts import LEAST_LIMIT_S, StallTimer
from headrace.weights import Published

_ALIVE_EVERY_S = 1.0  # a thread that waits shows that it is alive
_MOST_BYTES = 1 << 16  # of requests, more than a worker can have
_END_WITHIN_S = 10.0
_SILENT = "The network has not given actions for {:g} s (--inference learner)."


class _Rows:
    """A fragment's columns as arrays, to act in."""

    def __init__(self, fragment: Fragment) -> None:
        self.obs = each(Tensor.numpy, fragment.obs)
        outs = {"action": fragment.action} | fragment.stored_outputs
        self.outs: dict[str, Array] = {name: column.numpy() for name, column in outs.items()}
        self.state: Array = fragment.recurrent_state[1].numpy()  # of a recurrent core, now
        self.version: Array = fragment.policy_version.numpy()
        self.noise: Array | None = None  # [T, n, draws]; made at row 0


class _Request(NamedTuple):
    """A request for actions at row t, of all policies."""

    worker: socket.socket
    vector: int
    rows: list[_Rows]
    t: int
    version: int


class InferenceServer:
    """The thread, as the backend of the workers holds it."""

    def __init__(self, plan: SamplingPlan, published: Published) -> None:
        assert plan.inference_device is not None
        self._plan, self._device, self._published = plan, plan.inference_device, published
        self._policies = plan.build_policies()
        for policy in self._policies.values():
            policy.to(self._device)
        self._version: int | None = None  # of the weights that it has
        self._meter, self._timings = Meter(keeps_laps=plan.timeline), Timings()
        self._stall = StallTimer()
        self._limit_s = max(plan.guards.env_timeout_s, LEAST_LIMIT_S)  # of a round
        self._num_rounds = self._num_vectors = 0
        self._counted = (0, 0)  # of these, in metrics
        self._rows: dict[tuple[int, int], list[_Rows]] = {}  # by vector and buffer
        self._sockets: dict[int, socket.socket] = {}  # by worker
        self._by_fd: dict[int, socket.socket] = {}  # those that are read
        # The thread passes the door before each round: the lock alone might go to it forever.
        self._door, self._round = threading.Lock(), threading.Lock()
        self._closing = False
        self._error: BaseException | None = None
        self._epoll, self._wake = select.epoll(), os.eventfd(0)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="headrace inference", daemon=True)
        self._num_threads = torch.get_num_threads()
        self._thread.start()

    def admit(self, worker: int, fragments: dict[int, list[Fragments]]) -> socket.socket:
        """Accept a worker that is about to start, with the buffers of its vectors.

        Returns:
            The socket for its requests, which the caller closes.
        """
        here, there = socket.socketpair()
        here.setblocking(False)
        rows = {
            (v, b): list(map(_Rows, of))
            for v, buffers in fragments.items()
            for b, of in enumerate(buffers)
        }
        with self._between_rounds():
            self._rows |= rows
            self._sockets[worker] = self._by_fd[here.fileno()] = here
            self._epoll.register(here, select.EPOLLIN)
        return there

    def dismiss(self, worker: int) -> None:
        """Remove a worker that has ended: nothing more is written for it."""
        with self._between_rounds():
            if here := self._sockets.pop(worker, None):
                self._stop_reading(here)
                here.close()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def watch(self, now: float, limit_s: float) -> None:
        """Raise WorkerError if the thread makes no progress: the network does not answer."""
        self._limit_s = max(limit_s, LEAST_LIMIT_S)
        if self._stall.lasts(now, self._meter.beats[0]) > self._limit_s:
            frame = sys._current_frames().get(self._thread.ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            raise WorkerError(f"{stack}\n{_SILENT.format(self._limit_s)}")

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        now = self._num_rounds, self._num_vectors
        rounds, vectors = (a - b for a, b in zip(now, self._counted, strict=True))
        self._counted = now
        return {"inference_batch": vectors / rounds} if rounds else {}

    def timings(self) -> Timings:
        """Return what the thread has measured so far."""
        with self._between_rounds():
            self._meter.lap("wait")
            self._timings.read(self._meter.readings())
        return self._timings

    def close(self) -> None:
        """End the thread, after the workers."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_END_WITHIN_S)
        if self._thread.is_alive():  # stuck in the user's network: it ends with the process
            return
        for worker in self._sockets.values():
            worker.close()
        self._sockets, self._by_fd = {}, {}
        self._epoll.close()
        os.close(self._wake)

    @contextlib.contextmanager
    def _between_rounds(self) -> Iterator[None]:
        with self._door:
            if not self._round.acquire(timeout=self._limit_s):
                raise WorkerError(_SILENT.format(self._limit_s))
            try:
                yield
            finally:
                self._round.release()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._num_threads)  # OpenMP counts them for each thread
            with torch.no_grad(), self._stream():
                while not self._closing:
                    ready = self._epoll.poll(_ALIVE_EVERY_S)
                    with self._door:
                        pass
                    with self._round:
                        self._serve(fd for fd, _ in ready)
        except BaseException as error:  # whatever it is, `check` raises it
            self._error = error

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a stream that does not wait for what the learner has queued on the device."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)

    def _serve(self, ready: Iterable[int]) -> None:
        """Do a round: take all requests, act, answer."""
        self._meter.lap("wait")
        by_version: dict[int, list[_Request]] = {}
        for fd in ready:
            # One may have been dismissed, and its number be another's, since that was seen.
            if (worker := self._by_fd.get(fd)) is not None:
                for request in self._take(worker):
                    by_version.setdefault(request.version, []).append(request)
        for version, requests in by_version.items():
            self._pull(version)
            self._act(requests)
            self._num_rounds += 1
            self._num_vectors += len(requests)
            self._meter.lap("infer")
            answers: dict[socket.socket, bytes] = {}
            for request in requests:
                answer = ANSWER.pack(request.vector, self._version)
                answers[request.worker] = answers.get(request.worker, b"") + answer
            for worker, answer in answers.items():
                with contextlib.suppress(ConnectionError):  # the learner's loop sees its death
                    worker.send(answer)
        self._meter.lap("rollout")

    def _take(self, worker: socket.socket) -> list[_Request]:
        try:
            received = worker.recv(_MOST_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            received = b""
        if not received:
            self._stop_reading(worker)
        requests = []
        for vector, buffer, t, steps, version in REQUEST.iter_unpack(received):
            rows = self._rows[vector, buffer]
            if t == 0:  # as a worker would make it
                n = self._plan.envs_per_vector
                draws = [policy.num_draws for policy in self._policies.values()]
                env_id = np.arange(vector * n, (vector + 1) * n)
                drawn = self._plan.action_noise(env_id, steps, draws)
                for of_policy, noise in zip(rows, drawn, strict=True):
                    of_policy.noise = noise
            requests.append(_Request(worker, vector, rows, t, version))
        return requests

    def _stop_reading(self, worker: socket.socket) -> None:
        if self._by_fd.pop(worker.fileno(), None) is not None:
            self._epoll.unregister(worker)

    def _pull(self, version: int) -> None:
        """Copy the weights of a version, unless they are here."""
        if self._version != (self._published.newest if version == NEWEST else version):
            pinned = None if version == NEWEST else version
            self._version = self._published.pull(self._policies, pinned)
            self._meter.lap("publish")

    def _act(self, requests: list[_Request]) -> None:
        for i, policy in enumerate(self._policies.values()):
            self._act_for(policy, [(request.rows[i], request.t) for request in requests])

    def _act_for(self, policy: Policy, requests: list[tuple[_Rows, int]]) -> None:
        def on_device(*rows: Array) -> Tensor:
            return torch.from_numpy(np.concatenate(rows)).to(self._device)

        obs = each(on_device, *(each(lambda o, t=t: o[t], rows.obs) for rows, t in requests))
        noise = on_device(*(rows.noise[t] for rows, t in requests))  # type: ignore[index]
        memory = [on_device(*(rows.state for rows, _ in requests))] if policy.state_size else []
        out = policy.act(obs, noise, *memory)
        outs = {name: out[name].cpu().numpy() for name in requests[0][0].outs}
        after = out["state"].cpu().numpy() if memory else None
        first = 0
        for rows, t in requests:
            mine = slice(first, first + len(rows.state))
            for name, column in rows.outs.items():
                column[t] = outs[name][mine]
            rows.version[t] = self._version
            if after is not None:
                rows.state[:] = after[mine]
            first = mine.stop
