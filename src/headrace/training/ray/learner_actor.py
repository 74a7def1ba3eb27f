"""A learner as a Ray actor: one rank of a run. The driver (`driver.py`) fetches what it shows."""

import contextlib
import fcntl
import os
import queue
import socket
import struct
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from headrace.collectors.backends.ray_host import own_address, work_in
from headrace.config.run_config import RunConfig
from headrace.distributed.groups import connect_store, join
from headrace.distributed.local_ranks import Failure
from headrace.distributed.process import StopSignals
from headrace.distributed.ranks import SINGLE_RANK, RankInfo, Ranks, device_of
from headrace.envs.changes import EnvChange
from headrace.errors import HeadraceError, RankError, RunDirError
from headrace.meter import Meter
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.rank import run_rank
from headrace.training.rejoin import Handover, LeavingError, OfOneRank

_SHOW_EVERY_S = 0.25
_Call = tuple[Any, ...]  # name of a display's method, arguments
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


class QueuedDisplay(Display):
    """A display that keeps its calls until the driver fetches them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[EnvChange]] = queue.SimpleQueue()
        self._shown_at = 0.0
        self.env_steps = 0

    def say(self, text: str) -> None:
        self._calls.put(("say", text))

    def start(self) -> None:
        self._calls.put(("start",))

    def update(self, metrics: dict[str, Any], shares: dict[str, float]) -> None:
        """Keep an update, unless it comes too fast to be seen."""
        self.env_steps = metrics["env_steps"]
        now = time.monotonic()
        if now - self._shown_at >= _SHOW_EVERY_S or "eval_return" in metrics:
            self._shown_at = now
            self._calls.put(("update", metrics, shares))

    def stop(self) -> None:
        self._calls.put(("stop",))

    def on_update(self, number: int, metrics: dict[str, Any]) -> list[EnvChange]:
        """Have the driver call the caller's function, and wait for the changes that it returns."""
        self._calls.put(("on_update", number, metrics))
        return self._answers.get()

    def answer(self, changes: list[EnvChange]) -> None:
        """End the wait of an `on_update`."""
        self._answers.put(changes)

    def wake(self) -> None:
        """End the wait of a `fetch`."""
        self._calls.put(())

    def fetch(self, within_s: float) -> list[_Call]:
        """Wait for the first call; return all there are."""
        calls: list[_Call] = []
        try:
            calls.append(self._calls.get(timeout=within_s))
            while True:
                calls.append(self._calls.get_nowait())
        except queue.Empty:
            return [call for call in calls if call]


@dataclass(frozen=True)
class Meeting:
    """Where and how a learner meets the others.

    Attributes:
        host, port: of the driver's store.
        group: that the learner joins first; see `distributed/groups.py`.
        replaces: whether learners that are lost later are replaced.
    """

    host: str
    port: int
    group: int
    replaces: bool


class LearnerActor:
    """One learner."""

    def __init__(self, *, has_gpu: bool) -> None:
        if not has_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise Ray lets it see all of them
        self._stop, self._display = StopSignals(patient=True), QueuedDisplay()
        self._leaves = False

    def run(
        self,
        pickled_job: bytes,
        info: RankInfo,
        meeting: Meeting,
        started: float,
        working_dir: str,
        wants_updates: bool,
        left: OfOneRank | None,
    ) -> tuple[dict[str, Any], int] | OfOneRank | Failure:
        """Run this rank.

        Args:
            left: by the actor whose place this one takes; None: it was lost, or there was none.

        Returns:
            The summary and the signal that stopped it; or what it has left, after `leave`; or the
            failure.
        """
        is_first = info.rank == 0
        on_update = self._display.on_update if wants_updates and is_first else None
        display = self._display if is_first else Display()

        def say(text: str) -> None:
            self._display.say(text if is_first else f"Rank {info.rank}: {text}")

        try:
            work_in(working_dir)
            job: Job = cloudpickle.loads(pickled_job)
            meter = Meter(time.perf_counter() - max(0.0, time.time() - started))
            _check_run_dir(job.run_dir, info)
            handover = Handover(lambda: self._leaves, left)
            with contextlib.closing(_joined(job.settings.run, info, meeting)) as ranks:
                result = run_rank(job, ranks, self._stop, meter, display, say, on_update, handover)
            return result.summary, result.stopped_by
        except LeavingError as leaving:
            return leaving.left
        except HeadraceError as error:
            named = error if info.size == 1 else error.of_rank(info.rank, info.size)
            return Failure(time.time(), info.rank, named)
        except Exception:
            return Failure(time.time(), info.rank, RankError(traceback.format_exc()))
        finally:
            self._display.wake()

    def fetch(self, within_s: float) -> tuple[int, list[_Call]]:
        """Return the env steps so far, and what there is to show."""
        return self._display.env_steps, self._display.fetch(within_s)

    def answer(self, changes: list[EnvChange]) -> None:
        """Take the changes of environments that the driver's `on_update` returned."""
        self._display.answer(changes)

    def stop(self, number: int) -> None:
        """Stop after this step, and save, as at a signal."""
        self._stop.received = number

    def leave(self) -> None:
        """Leave the rank before the next batch."""
        self._leaves = True

    def cut_off(self, addresses: list[str]) -> None:
        """End all connections to machines that are lost: what waits for them fails at once."""
        _end_connections(set(addresses) - {own_address()})


def _joined(run: RunConfig, info: RankInfo, meeting: Meeting) -> Ranks:
    if info.size == 1:
        return SINGLE_RANK
    _listen_on(own_address())
    return join(
        connect_store(meeting.host, meeting.port),
        info,
        run.backend,
        device_of(run.device, 0),
        run.rank_timeout_s,
        group=meeting.group,
        replaces=meeting.replaces,
    )


def _check_run_dir(run_dir: Path, info: RankInfo) -> None:
    if not (run_dir / ".lock").exists():
        raise RunDirError(
            f"Learner {info.rank + 1} of {info.size}, on {own_address()}, does not see the run "
            f"directory {run_dir}.\nPut it where all learners' machines and this one have it "
            "(--run-dir, on shared storage), or have the learners on this machine "
            "(--learner-resources)."
        )


def _end_connections(addresses: set[str]) -> None:
    """End this process's connections to other addresses."""
    for fd in os.listdir("/proc/self/fd"):
        with (
            contextlib.suppress(OSError),  # closed meanwhile, no socket, or not connected
            socket.socket(fileno=os.dup(int(fd))) as same,
        ):
            peer = same.getpeername()
            if isinstance(peer, tuple) and peer[0].removeprefix("::ffff:") in addresses:
                same.shutdown(socket.SHUT_RDWR)


def _listen_on(address: str) -> None:
    """Have gloo and NCCL listen on this address only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _GET_INTERFACE_ADDRESS, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
