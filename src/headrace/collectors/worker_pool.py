"""The workers of a rank: started, sent orders, heard, replaced, ended.

A worker that dies or hangs is replaced; the new process repeats its orders. Left out: what is
ordered (`synchronous.py`, `asynchronous.py`), the decisions after a loss (`supervisor.py`), and
where workers run (`backends/`).
"""

import atexit
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from headrace import timeouts
from headrace.batch import Fragments
from headrace.collectors.api import SamplingPlan, Say, ShouldStop
from headrace.collectors.backends.api import (
    BackendFactory,
    Done,
    Exited,
    Failed,
    Message,
    Ready,
    WorkerHandle,
    WorkerSetup,
    WorkOrder,
)
from headrace.collectors.backends.processes import ProcessBackend
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.supervisor import Supervisor
from headrace.collectors.vector_collector import VectorCollector
from headrace.envs.games.seats import LATEST, MEMBER, Pool
from headrace.errors import WorkerError
from headrace.meter import Timings
from headrace.models.policy import Policy
from headrace.spec import Array

_POLL_EVERY_S = 0.1
_STOP_WITHIN_S = 5.0  # how long a worker that is to stop may take for the step under way
_CLOSE_WITHIN_S = 3.0


class WorkerPool(VectorCollector):
    """The workers of a rank: base class of two collectors, which decide what workers fill.

    Args: see `VectorCollector`, and
        num_workers: W, at most the number of vectors.
        make_backend: makes the workers, as processes of this machine or of a cluster.

    Raises:
        ConfigError: workers cannot run there.
        EnvError: an environment could not be made.
        WorkerError: a worker did not start.
    """

    repeats_steps: ClassVar[bool]  # a new process takes the steps of the lost one again

    def __init__(
        self,
        plan: SamplingPlan,
        num_workers: int,
        stop: ShouldStop,
        state: Mapping[str, Array] | None = None,
        say: Say = lambda text: None,
        make_backend: BackendFactory = ProcessBackend,
    ) -> None:
        super().__init__(plan, stop, state, say)
        self._stop_at, self._checked_at = float("inf"), 0.0
        self._done: list[tuple[WorkOrder, RolloutResult]] = []  # that no batch has taken yet
        self._supervisor = Supervisor(
            num_workers,
            restart=plan.guards.on_worker_loss == "restart",
            max_restarts=plan.guards.max_restarts,
        )
        shares = [list(plan.vectors)[i::num_workers] for i in range(num_workers)]
        self._backend = make_backend(plan, shares)
        self.workers = self._backend.workers
        # multiprocessing's own way at exit is SIGTERM, which workers ignore, and then to wait.
        atexit.register(self.close)
        try:
            self.run_until(lambda: not self._supervisor.starting)
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> list[int]:
        """Workers with orders that are not carried out."""
        return self._supervisor.pending

    @property
    def is_stopping(self) -> bool:
        """True if orders are given up: results may be incomplete from here on."""
        return self._stop_at < float("inf")

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        self._backend.publish(policies, version)

    def fragments(self, vector: int, buffer: int) -> Fragments:
        """Return a vector's fragments, one of each policy."""
        return self._worker_of(vector).fragments(vector, buffer)

    def submit(self, orders: Iterable[WorkOrder]) -> None:
        """Have fragments filled, each order by the worker that has its vectors."""
        for order in orders:
            worker = self._worker_of(order.fragments[0][0])
            worker.prepare(order)
            self._supervisor.order(worker.index, order)
        self._send()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Start, order, hear and replace workers until `done`.

        Once stopping, wait only for the workers that answer in time.
        """
        while self.pending if self.is_stopping else not done():
            if self._stop():
                self._begin_stop()
            if self.is_stopping:
                alive = [i for i in self.pending if self.workers[i].is_running]
                if not alive or time.monotonic() > self._stop_at:
                    for i in alive:
                        self._lose(self.workers[i], "did not stop")
                    return
            self.poll(_POLL_EVERY_S)

    def poll(self, wait_s: float = 0.0) -> None:
        """Start, order, hear and replace workers once. Wait at most `wait_s` for messages."""
        self._send()
        for worker in self._backend.wait(wait_s):
            for message in worker.poll():
                self._receive(worker, message)
        now = time.monotonic()
        if self._plan.guards.enabled and now - self._checked_at >= _POLL_EVERY_S:
            self._checked_at = now
            self._end_stalled(now)

    def halt(self) -> None:
        self._begin_stop()
        self.run_until(lambda: not self.pending)

    def timings(self) -> dict[str, Timings]:
        return {worker.name: worker.timings for worker in self.workers} | self._backend.timings()

    def close(self) -> None:
        """End all workers. What a signal interrupts of it is done at exit."""
        self._backend.stop()  # a fragment under way is of no use any more
        try:
            self._backend.close(_CLOSE_WITHIN_S)
        finally:
            if not any(worker.is_running for worker in self.workers):
                atexit.unregister(self.close)

    def _metrics(self, results: Sequence[RolloutResult], depth: float) -> dict[str, float]:
        metrics = super()._metrics(results, depth)
        if metrics:
            waits_s = (worker.timings.seconds().get("wait", 0.0) for worker in self.workers)
            metrics["workers_wait_s"] = sum(waits_s)
        return metrics | self._backend.metrics()

    def _worker_of(self, vector: int) -> WorkerHandle:
        return self.workers[(vector - self._plan.vectors.start) % len(self.workers)]

    def _begin_stop(self) -> None:
        if not self.is_stopping:
            self._backend.stop()
            self._stop_at = time.monotonic() + _STOP_WITHIN_S

    def _send(self) -> None:
        """Start the workers that are due, and send all orders that can be."""
        now = time.monotonic()
        if not self.is_stopping:
            for worker, lost in self._backend.departures():
                worker.timings.retire()
                self._count_lost(lost)
                self._supervisor.moved(worker.index, now)
            for i in self._supervisor.due(now):
                self._start(self.workers[i], now)
        for i, order in self._supervisor.to_send(now):
            self.workers[i].send(order)

    def _start(self, worker: WorkerHandle, now: float) -> None:
        generation, anew = self._supervisor.begin(worker.index, now)
        self.ledger.restarts = self._supervisor.restarts
        vectors, snapshots = worker.vectors, self._snapshots
        state = {} if anew else snapshots.state(vectors)
        begin_after = snapshots.steps(vectors) + anew
        changes, pool = self._env_changes, self._pool_of(state)
        worker.start(
            WorkerSetup(worker.name, generation, vectors, state, begin_after, changes, pool)
        )

    def _pool_of(self, state: Mapping[str, Array]) -> Pool | None:
        """Return the pool; if policies travel, with those of who plays in episodes of `state`."""
        pool, league = self._pool, self._plan.league
        if pool is None or league is None or league.pack is None:
            return pool
        seats = (array for name, array in state.items() if name.endswith(MEMBER))
        playing = {int(member) for array in seats for member in array}
        return league.pack(pool, playing - {LATEST})

    def _receive(self, worker: WorkerHandle, message: Message) -> None:
        i, supervisor = worker.index, self._supervisor
        match message:
            case Ready() if supervisor.ready(i, message.generation):
                self._on_ready(worker, message)
            case Done() if supervisor.delivered(i, message.generation, message.order):
                worker.timings.read(message.readings)
                worker.lost_steps = 0
                self._done.append((message.order, message.result))
            case Failed():
                raise message.error
            case Exited():
                self._lose(worker, message.cause, counts=message.counts)

    def _on_ready(self, worker: WorkerHandle, message: Ready) -> None:
        self._snapshots.begin(message.states)
        if not worker.has_been_ready and self._snapshots.steps():  # of the run that was saved
            self.restored.add(message.restored)
        elif num_new := message.restored.new_episode:
            self._say(
                f"{worker.name.capitalize()}: {num_new} episodes could not be brought back, and "
                "begin anew. From here on this run differs from one in which no worker was lost."
            )
        elif self.repeats_steps:  # the new process repeats the fragment
            self.ledger.lost -= worker.lost_steps
            self.ledger.remade += worker.lost_steps
        worker.has_been_ready, worker.lost_steps = True, 0

    def _end_stalled(self, now: float) -> None:
        """Kill workers that have made no progress for too long."""
        usual_s = max(worker.timings.usual_s for worker in self.workers)
        limit_s = timeouts.step_timeout(self._plan.guards.env_timeout_s, usual_s)
        self._backend.check(now, limit_s)

        def progress(i: int) -> object:
            return self.workers[i].progress(self._supervisor.orders(i))

        for i, longest_s in self._supervisor.stalled(now, limit_s, progress):
            stack = self.workers[i].stack()
            cause = f"has not answered for {longest_s:g} s and was killed (see --env-timeout-s)"
            self._lose(self.workers[i], f"{cause}\n{stack}" if stack else cause)

    def _count_lost(self, taken: int) -> None:
        self.ledger.collected += taken
        self.ledger.lost += taken

    def _lose(self, worker: WorkerHandle, cause: str, *, counts: bool = True) -> None:
        """End a lost worker. Have it replaced, or raise WorkerError."""
        orders = self._supervisor.orders(worker.index)
        summary, _, details = cause.partition("\n")
        if worker.index in self._supervisor.starting:
            position = "while making its environments"
        else:
            position = worker.position(orders, self._snapshots)
        worker.timings.retire()
        taken, left = worker.lose(orders)
        worker.lost_steps += taken
        self._count_lost(taken)
        if self.is_stopping:
            return
        text = f"{worker.name.capitalize()} {summary}, {position}."
        if details:
            text += f"\n{details.rstrip()}"
        backoff_s = self._supervisor.lost(worker.index, time.monotonic(), left, counts=counts)
        if backoff_s is not None:
            self._say(f"{text}\nIt is replaced{f' in {backoff_s:g} s' if backoff_s else ''}.")
            return
        guards = self._plan.guards
        if guards.on_worker_loss == "restart":
            text += f"\nThat was more than {guards.max_restarts} times in 10 minutes"
            raise WorkerError(f"{text} (--max-worker-restarts).")
        raise WorkerError(f"{text}\nWith --on-worker-loss restart it would have been replaced.")
