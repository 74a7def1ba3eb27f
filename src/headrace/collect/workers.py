"""Sampling in worker processes of this machine: the hybrid of processes and vectors.

Each worker steps its own vectors for T steps with its own copy of the policy; nobody waits for
anybody inside a fragment. Fragments and weights lie in anonymous shared memory; commands and
replies go through a pipe, one each per batch, and whoever has the turn owns the memory.

Left out: starting a worker again that died (the run ends with a clear error), other machines.
"""

import atexit
import contextlib
import mmap
import os
import signal
import sys
import time
import traceback
from multiprocessing import connection
from multiprocessing.reduction import DupFd
from typing import Any

import cloudpickle
import numpy as np
import threadpoolctl
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.collect import forkserver
from headrace.collect.api import Collected, Plan, ShouldStop
from headrace.collect.rollout import Sampler
from headrace.envs.api import Episode, Restored
from headrace.errors import ConfigError, HeadraceError, SamplerError, UsageError
from headrace.meter import Meter
from headrace.models import policy as policies
from headrace.models.policy import Policy
from headrace.spec import Array
from headrace.weights import FlatWeights

_ADVICE = {
    -signal.SIGKILL: "If you did not kill it, the kernel's out-of-memory killer may have: try "
    "fewer workers or envs."
}
_STOP_WITHIN_S = 5.0  # how long a worker that was told to stop may take for the step under way
_CLOSE_WITHIN_S = 3.0


class WorkersCollector:
    """A `Collector` over worker processes.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors, which they take in turns.
        stop: asked while waiting whether to give up.

    Raises:
        ConfigError: this platform has no anonymous shared memory.
        EnvError: an environment could not be made.
    """

    def __init__(self, plan: Plan, num_workers: int, stop: ShouldStop) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                f"num_workers={num_workers} needs Linux (memfd), and this is {sys.platform}.\n"
                "Use num_workers=0: all environments are stepped in the learner's process."
            )
        self._plan, self._stop = plan, stop
        self._version = 0
        self._steps = 0  # of each env, in whole batches
        self._whole = True  # every worker filled its fragments in the last batch
        self.lost_env_steps = self.restarts = 0
        template = policies.build(plan.spec, plan.network, 0, plan.model)
        pickled = _pickled(plan)
        weights_fd, weights_map = _shared("weights", 1 + FlatWeights.num_bytes(template))
        self._flag = weights_map  # its last byte: workers are to stop
        self._weights = FlatWeights(template, weights_map)
        self._workers: list[_Worker] = []
        # multiprocessing's own way at exit is SIGTERM, which workers ignore, and then to wait.
        atexit.register(self.close)
        try:
            with forkserver.context() as context:
                for index in range(num_workers):
                    vectors = list(plan.vectors)[index::num_workers]
                    worker = _Worker(context, plan, pickled, index, vectors, weights_fd)
                    self._workers.append(worker)
            self._gather(range(num_workers))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(weights_fd)

    def publish(self, policy: Policy, version: int) -> None:
        """See `Collector`."""
        self._weights.publish(policy)
        self._version = version

    def collect(self) -> Collected | None:
        """See `Collector`."""
        for worker in self._workers:
            worker.send("collect", self._version)
        replies = self._gather(range(len(self._workers)))
        episodes: list[Episode] = []
        by_vector: dict[int, Fragment] = {}
        taken = 0
        self._whole = len(replies) == len(self._workers)
        for index, (ended, steps) in replies.items():
            taken += steps
            if ended is None:
                self._whole = False
            else:
                episodes += ended
                by_vector |= self._workers[index].fragments
        if not self._whole:
            self.lost_env_steps += taken
            return None
        self._steps += self._plan.num_steps
        return Collected([by_vector[v] for v in sorted(by_vector)], episodes)

    def give_up(self) -> None:
        """See `Collector`."""
        self._whole = False
        self._steps -= self._plan.num_steps

    def state(self) -> dict[str, Array]:
        """See `Collector`. A worker that was ended has none: its envs will begin new episodes."""
        state: dict[str, Array] = {}
        for reply in self._ask_all("state", self._whole).values():
            state |= reply
        return state | {"steps": np.array(self._steps)}

    def restore(self, state: dict[str, Array]) -> Restored:
        """See `Collector`."""
        self._steps = int(state["steps"])
        restored = Restored()
        for reply in self._ask_all("restore", state).values():
            restored.add(reply)
        return restored

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        return {
            self._workers[index].name: seconds
            for index, seconds in self._ask_all("meter", None).items()
        }

    def close(self) -> None:
        """See `Collector`."""
        self._flag[-1] = 1  # a fragment under way is of no use any more
        for worker in self._workers:
            worker.send("close", None)
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        with contextlib.ExitStack() as stack:  # goes on with the rest if one raises
            for worker in self._workers:
                stack.callback(worker.end, deadline)
        self._workers = []
        atexit.unregister(self.close)

    def _ask_all(self, command: str, argument: Any) -> dict[int, Any]:
        """The same command to every worker that was not ended; its reply by index."""
        asked = [i for i, worker in enumerate(self._workers) if not worker.connection.closed]
        for index in asked:
            self._workers[index].send(command, argument)
        return self._gather(asked)

    def _gather(self, indices: Any) -> dict[int, Any]:
        """One reply of each worker; after a stop, of those that answer in time (the rest is ended).

        Raises the first error that a worker reports, and SamplerError if one dies.
        """
        waiting = {self._workers[i].connection: i for i in indices}
        replies: dict[int, Any] = {}
        give_up_at = float("inf")
        while waiting:
            # The pipe of a process that died is readable too: it is at its end.
            for ready in connection.wait(list(waiting), timeout=0.1):
                index = waiting.pop(ready)
                replies[index] = self._workers[index].receive()
            if self._stop() and give_up_at == float("inf"):
                self._flag[-1] = 1
                give_up_at = time.monotonic() + _STOP_WITHIN_S
            if time.monotonic() > give_up_at:
                for index in waiting.values():
                    self._workers[index].end(deadline=0.0)
                break
        return replies


class _Worker:
    """The learner's end of one worker process."""

    def __init__(
        self,
        context: Any,
        plan: Plan,
        pickled: bytes,
        index: int,
        vectors: list[int],
        weights_fd: int,
    ) -> None:
        self.name = f"worker {index}"
        self._num_envs = len(vectors) * plan.envs_per_vector
        layout = batch.columns(plan.spec, plan.policy_out, plan.num_steps, plan.envs_per_vector)
        size = batch.num_bytes(layout)
        fd, memory = _shared(self.name, size * len(vectors))
        self.fragments = {
            vector: batch.allocate(layout, memoryview(memory)[i * size : (i + 1) * size])
            for i, vector in enumerate(vectors)
        }
        self.connection, theirs = context.Pipe()
        try:
            self.process = context.Process(
                target=_worker_main,
                args=(theirs, DupFd(weights_fd), DupFd(fd), pickled, vectors, self.name),
                daemon=True,
            )
            self.process.start()
        finally:
            theirs.close()
            os.close(fd)

    def send(self, command: str, argument: Any) -> None:
        """Send a command; a death shows when the reply is read."""
        with contextlib.suppress(OSError):
            self.connection.send((command, argument))

    def receive(self) -> Any:
        """The reply, which is here; raises what the worker reported, or SamplerError."""
        try:
            status, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(_CLOSE_WITHIN_S)
            raise SamplerError(
                f"{self.name} died ({_cause(self.process.exitcode)}) with its "
                f"{self._num_envs} envs.\n"
                + _ADVICE.get(self.process.exitcode or 0, "Its last words, if any, are above.")
            ) from None
        if status == "error":
            raise value
        return value

    def end(self, deadline: float) -> None:
        """Wait for its end until `deadline` (monotonic) or kill it; raise what failed in it."""
        try:
            self.process.join(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C interrupts the waiting, not this
            self.process.kill()
            self.process.join()
        failed = None
        with contextlib.suppress(OSError, EOFError):  # at the end of the pipe
            while self.connection.poll():
                status, value = self.connection.recv()
                failed = value if status == "closing" else failed
        self.connection.close()
        if failed is not None:
            raise failed


def _shared(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Anonymous shared memory: it is gone with the last process that has it open."""
    fd = os.memfd_create(f"headrace {name}")
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


def _cause(exitcode: int | None) -> str:
    if exitcode is None:
        return "still ending"
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"


def _pickled(plan: Plan) -> bytes:
    """Lambdas and classes of a script or notebook travel by value; nothing goes through a file."""
    try:
        return bytes(cloudpickle.dumps(plan))
    except Exception as error:
        raise UsageError(
            f"The environment cannot be sent to worker processes: {type(error).__name__}: "
            f"{error}.\nWhat makes it must not carry open files, locks or devices: open them "
            "inside, or use num_workers=0."
        ) from error


def _worker_main(
    pipe: connection.Connection,
    weights: Any,
    memory: Any,
    pickled: bytes,
    vectors: list[int],
    name: str,
) -> None:
    """A worker process, from its first line to its last."""
    forkserver.ignore_signals()
    forkserver.end_with_learner()
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    meter = Meter()
    try:
        fds = weights.detach(), memory.detach()
        loop = _Loop(pipe, *fds, cloudpickle.loads(pickled), vectors, name, meter)
        pipe.send(("ok", None))
        meter.lap("start")
        loop.run()
    except (EOFError, ConnectionError):
        pass  # the learner is gone
    except HeadraceError as error:
        _last_word(pipe, error)
    except Exception:
        _last_word(pipe, SamplerError(f"{traceback.format_exc()}\n{name} failed."))


def _last_word(pipe: connection.Connection, error: HeadraceError) -> None:
    with contextlib.suppress(ConnectionError):  # the learner is gone as well
        pipe.send(("error", error))


class _Loop:
    """A worker's end: commands in, replies out."""

    def __init__(
        self,
        pipe: connection.Connection,
        weights_fd: int,
        memory_fd: int,
        plan: Plan,
        vectors: list[int],
        name: str,
        meter: Meter,
    ) -> None:
        weights = mmap.mmap(weights_fd, 0)
        memory = mmap.mmap(memory_fd, 0)
        layout = batch.columns(plan.spec, plan.policy_out, plan.num_steps, plan.envs_per_vector)
        size = batch.num_bytes(layout)
        fragments = [
            batch.allocate(layout, memoryview(memory)[i * size : (i + 1) * size], fresh=False)
            for i in range(len(vectors))
        ]
        self._pipe, self._meter, self._flag = pipe, meter, weights
        self._sampler = Sampler(plan, vectors, fragments, meter, name)
        self._weights = FlatWeights(self._sampler.policy, weights)

    def run(self) -> None:
        """Answer commands until told to close."""
        while True:
            command, argument = self._pipe.recv()
            self._meter.lap("wait")
            match command:
                case "collect":
                    self._weights.pull(self._sampler.policy)
                    self._meter.lap("publish")
                    reply: Any = self._sampler.collect(argument, lambda: self._flag[-1] != 0)
                case "state":
                    if argument:
                        self._sampler.commit()
                    reply = self._sampler.state()
                case "restore":
                    reply = self._sampler.restore(argument)
                case "meter":
                    reply = self._meter.seconds()
                case "close":
                    try:
                        self._sampler.close()
                    except HeadraceError as error:
                        self._pipe.send(("closing", error))
                    return
            self._pipe.send(("ok", reply))
            self._meter.lap("other")
