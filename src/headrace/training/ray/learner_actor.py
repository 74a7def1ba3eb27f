"""A rank as a Ray actor runs it; what it shows is fetched by who started the run.

Left out: what a rank does (`rank.py`), and who starts it (`driver.py`).
"""

import fcntl
import os
import queue
import socket
import struct
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headrace.collectors.backends.ray_worker import work_in
from headrace.distributed.local_ranks import connect_store, host_store
from headrace.distributed.ranks import SINGLE_RANK, JoinedRanks, RankInfo, Ranks, device_of
from headrace.errors import HeadraceError, RankError, RunDirError
from headrace.meter import Meter
from headrace.training.job import Job
from headrace.training.log import Display
from headrace.training.process import StopSignals
from headrace.training.rank import run_rank

_SHOW_EVERY_S = 0.25
_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR


class Words(Display):
    """What a rank shows, until the driver fetches it."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._shown_at = 0.0
        self.env_steps = 0

    def say(self, text: str) -> None:
        """See `Display`."""
        self._said.put(("say", text))

    def start(self) -> None:
        """See `Display`."""
        self._said.put(("start",))

    def update(self, metrics: dict[str, Any], shares: dict[str, float]) -> None:
        """See `Display`."""
        self.env_steps = metrics["env_steps"]
        now = time.monotonic()
        if now - self._shown_at >= _SHOW_EVERY_S or "eval_return" in metrics:
            self._shown_at = now
            self._said.put(("update", metrics, shares))

    def stop(self) -> None:
        """See `Display`."""
        self._said.put(("stop",))

    def on_update(self, number: int, metrics: dict[str, Any]) -> None:
        """For a caller who wants each of them."""
        self._said.put(("on_update", number, metrics))

    def wake(self) -> None:
        """Who waits for something to fetch need not any more."""
        self._said.put(())

    def fetch(self, within_s: float) -> list[tuple[Any, ...]]:
        """What there is; waits for the first."""
        found: list[tuple[Any, ...]] = []
        try:
            found.append(self._said.get(timeout=within_s))
            while True:
                found.append(self._said.get_nowait())
        except queue.Empty:
            return [each for each in found if each]


class RemoteRank:
    """One learner.

    Args:
        has_gpu: whether it was given one.
    """

    def __init__(self, *, has_gpu: bool) -> None:
        if not has_gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else Ray lets it see them all
        self._stop, self._words = StopSignals(patient=True), Words()
        self._store: TCPStore | None = None

    def meet(self) -> tuple[str, int]:
        """The address at which the ranks find each other; rank 0 is asked for it."""
        host = _own_address()
        self._store = host_store(host)
        return host, self._store.port

    def run(
        self,
        sent: bytes,
        place: RankInfo,
        meeting: tuple[str, int],
        begun: float,
        here: str,
        *,
        each: bool,
    ) -> tuple[Any, ...]:
        """Be this rank of a run, to its end.

        Args:
            sent: the task, pickled.
            place: of this rank.
            meeting: where ranks find each other.
            begun: when the run was started (seconds since the epoch).
            here: the working directory of who started it.
            each: whether the caller wants to be told of each update.

        Returns:
            ("ended", summary, signal that stopped it), or ("failed", when, error).
        """
        try:
            work_in(here)
            task: Job = cloudpickle.loads(sent)
            meter = Meter(time.perf_counter() - max(0.0, time.time() - begun))
            return ("ended", *self._run(task, place, meeting, meter, each))
        except HeadraceError as error:
            of_rank = error if place.size == 1 else error.of_rank(place.rank, place.size)
            return "failed", time.time(), of_rank
        except Exception:
            return "failed", time.time(), RankError(traceback.format_exc())
        finally:
            self._words.wake()

    def _run(
        self, task: Job, place: RankInfo, meeting: tuple[str, int], meter: Meter, each: bool
    ) -> tuple[dict[str, Any], int]:
        run, words = task.settings.run, self._words
        _check_run_dir(task.run_dir, place)
        device = device_of(run.device, 0)
        ranks: Ranks = SINGLE_RANK
        if place.size > 1:
            _listen_on(_own_address())
            store = self._store or connect_store(*meeting)
            ranks = JoinedRanks(place, store, run.backend, device, run.rank_timeout_s)

        is_first = place.rank == 0

        def say(text: str) -> None:
            words.say(text if is_first else f"Rank {place.rank}: {text}")

        on_update = words.on_update if each and is_first else None
        display = words if is_first else Display()
        try:
            result = run_rank(task, ranks, self._stop, meter, display, say, on_update)
        finally:
            ranks.close()
        return result.summary, result.stopped_by

    def words(self, within_s: float) -> tuple[int, list[tuple[Any, ...]]]:
        """Env steps so far, and what there is to show."""
        return self._words.env_steps, self._words.fetch(within_s)

    def stop(self, number: int) -> None:
        """Stop after this step, and save, as at a signal."""
        self._stop.received = number


def _own_address() -> str:
    """Of this machine, as the cluster knows it."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def _check_run_dir(run_dir: Path, place: RankInfo) -> None:
    if not (run_dir / ".lock").exists():
        raise RunDirError(
            f"Learner {place.rank + 1} of {place.size}, on {_own_address()}, does not see the run "
            f"directory {run_dir}.\nPut it where all learners' machines and this one have it "
            "(--run-dir, on shared storage), or have the learners on this machine "
            "(--learner-resources)."
        )


def _listen_on(address: str) -> None:
    """Have gloo and NCCL listen there only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _GET_INTERFACE_ADDRESS, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
