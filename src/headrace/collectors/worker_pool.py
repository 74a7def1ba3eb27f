"""The samplers of a rank: started, told, listened to, replaced, ended.

A sampler that dies or hangs is replaced, and its orders are given to the other.

Left out: what is ordered, and what becomes of it (`synchronous.py`, `asynchronous.py`); who is
started and told when (`supervisor.py`); where samplers sit, and how they are reached
(`processes.py`, `ray_actors.py`).
"""

import atexit
import time
from collections.abc import Callable, Iterable
from typing import Any

from headrace import timeouts
from headrace.batch import Fragment
from headrace.collectors.api import Ledger, SamplingPlan, Say, ShouldStop
from headrace.collectors.backends.api import BackendFactory, Record, WorkerSetup, WorkOrder
from headrace.collectors.backends.processes import ProcessBackend
from headrace.collectors.rollout import RolloutResult, lag_metrics
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.collectors.supervisor import Supervisor
from headrace.envs.api import Restored
from headrace.errors import WorkerError
from headrace.meter import Laps
from headrace.models.policy import Policy

_LOOK_EVERY_S = 0.1
_STOP_WITHIN_S = 5.0  # how long a worker that was told to stop may take for the step under way
_CLOSE_WITHIN_S = 3.0


class WorkerPool:
    """The samplers of a rank.

    Args:
        plan: what to sample.
        num_workers: W, at most the number of vectors, which they take in turns.
        journals: where the environments are.
        stop: asked while waiting whether to give up.
        say: told of samplers that were lost.
        remakes: a sampler that takes over makes the same steps again, where it can.
        make_seats: where they are to sit.

    Attributes:
        seats: where they sit.
        ledger: of what they did.
        restored: see `Collector`.
        delivered: what was carried out, and nobody has taken from here yet.

    Raises:
        ConfigError: samplers cannot sit there.
        EnvError: an environment could not be made.
        WorkerError: a sampler did not come up.
    """

    def __init__(
        self,
        plan: SamplingPlan,
        num_workers: int,
        journals: EpisodeSnapshots,
        stop: ShouldStop,
        say: Say,
        *,
        remakes: bool,
        make_seats: BackendFactory = ProcessBackend,
    ) -> None:
        self._plan, self._journals, self._stop, self._say = plan, journals, stop, say
        self._remakes, self._give_up_at, self._watched_at = remakes, float("inf"), 0.0
        self.ledger, self.restored = Ledger(), Restored()
        self.delivered: list[tuple[WorkOrder, RolloutResult]] = []
        self._supervisor = Supervisor(
            num_workers,
            restart=plan.guards.on_worker_loss == "restart",
            max_restarts=plan.guards.max_restarts,
        )
        self.shares = [list(plan.vectors)[i::num_workers] for i in range(num_workers)]
        self._records = [Record(f"worker {i}", share) for i, share in enumerate(self.shares)]
        self.seats = make_seats(plan, self.shares, [record.name for record in self._records])
        # multiprocessing's own way at exit is SIGTERM, which workers ignore, and then to wait.
        atexit.register(self.close)
        try:
            self.serve(lambda: self._supervisor.coming_up)
        except BaseException:
            self.close()
            raise

    @property
    def owing(self) -> list[int]:
        """Workers with orders that are not carried out."""
        return self._supervisor.owing

    @property
    def told_to_stop(self) -> bool:
        """Whether orders are given up: whatever is delivered from here on may not be whole."""
        return self._give_up_at < float("inf")

    def publish(self, policy: Policy, version: int) -> None:
        """Hand out weights."""
        self.seats.publish(policy, version)

    def fragment(self, vector: int, buffer: int) -> Fragment:
        """One of a vector's."""
        return self.seats.fragment(self._sits(vector), vector, buffer)

    def order(self, order: WorkOrder) -> None:
        """Have fragments filled by the worker that has these vectors; sent by `serve`."""
        i = self._sits(order.fragments[0][0])
        self.seats.prepare(i, order)
        self._supervisor.order(i, order)

    def serve(self, pending: Callable[[], list[int]]) -> None:
        """Start, tell, listen and replace until no worker is `pending`.

        Once told to stop, only those that answer in time are waited for, whatever they owe.
        """
        while self.owing if self.told_to_stop else pending():
            now = time.monotonic()
            if self._stop():
                self.stop(now)
            if self.told_to_stop:
                alive = [i for i in self.owing if self.seats.is_taken(i)]
                if not alive or now > self._give_up_at:
                    self._abandon(alive)
                    return
            self.look(_LOOK_EVERY_S)

    def look(self, wait_s: float = 0.0) -> None:
        """Start, tell, listen and replace, once; wait so long for something to be heard."""
        now = time.monotonic()
        self.send(now)
        self._listen(wait_s)
        if now - self._watched_at >= _LOOK_EVERY_S:
            self._watched_at = now
            self._end_silent()

    def send(self, now: float) -> None:
        """Start samplers that are due, and tell all what is ordered."""
        if not self.told_to_stop:
            for i, lost in self.seats.leaving():
                self._records[i].vacate()
                self._count_lost(lost)
                self._supervisor.moved(i, now)
            for i in self._supervisor.due(now):
                self._start(i, now)
        for i, order in self._supervisor.to_send(now):
            self.seats.tell(i, order)

    def halt(self) -> None:
        """Have workers stop where they are, and wait until they say what they have done."""
        self.stop(time.monotonic())
        self.serve(lambda: self.owing)

    def stop(self, now: float) -> None:
        """Workers are to stop where they are."""
        if not self.told_to_stop:
            self.seats.stop()
            self._give_up_at = now + _STOP_WITHIN_S

    def metrics(self, batch: list[RolloutResult], depth: float) -> dict[str, float]:
        """Of how a batch came about; see `lag_metrics`."""
        return lag_metrics(self._plan, batch, depth, self._meters()) | self.seats.metrics()

    def meters(self) -> dict[str, dict[str, float]]:
        """See `Collector`."""
        return self._meters() | self.seats.meters()

    def laps(self) -> dict[str, Laps]:
        """See `Collector`."""
        return {r.name: r.laps for r in self._records if r.laps} | self.seats.laps()

    def _meters(self) -> dict[str, dict[str, float]]:
        """Of the samplers."""
        return {record.name: record.meter() for record in self._records}

    def close(self) -> None:
        """See `Collector`. What a signal interrupts of it is done at exit."""
        self.seats.stop()  # a fragment under way is of no use any more
        try:
            self.seats.close(_CLOSE_WITHIN_S)
        finally:
            if not any(map(self.seats.is_taken, range(len(self.shares)))):
                atexit.unregister(self.close)

    def _sits(self, vector: int) -> int:
        """Whose a vector is."""
        return (vector - self._plan.vectors.start) % len(self.shares)

    def _start(self, i: int, now: float) -> None:
        """Have a seat taken."""
        record = self._records[i]
        generation, anew = self._supervisor.begin(i, now)
        self.ledger.restarts = self._supervisor.restarts
        orders = WorkerSetup(
            name=record.name,
            generation=generation,
            vectors=record.vectors,
            state={} if anew else self._journals.state(record.vectors),
            begin_after=self._journals.steps(record.vectors) + anew,
        )
        self.seats.start(i, orders)

    def _listen(self, wait_s: float) -> None:
        """Wait a moment for words or the end of any sampler."""
        for i, messages, cause, counts in self.seats.listen(wait_s):
            for message in messages:
                self._hear(i, *message)
            if cause is not None:
                self._lose(i, cause, counts=counts)

    def _hear(self, i: int, kind: str, generation: int, what: Any) -> None:
        record = self._records[i]
        match kind:
            case "ready" if self._supervisor.ready(i, generation):
                restored, states = what
                self._journals.begin(states)
                if generation == 1:
                    self.restored.add(restored)
                elif restored.new_episode:
                    self._say(
                        f"{record.name.capitalize()}: {restored.new_episode} episodes could not be "
                        "brought back, and begin anew. From here on this run differs from one "
                        "in which no worker was lost."
                    )
                elif self._remakes:  # it goes on just where the fragment began
                    self.ledger.lost -= record.lost_steps
                    self.ledger.remade += record.lost_steps
                    record.lost_steps = 0
            case "done":
                order, filled, readings = what
                if self._supervisor.delivered(i, generation, order):
                    record.read(readings)
                    record.lost_steps = 0
                    self.delivered.append((order, filled))
            case "error":
                raise what

    def _end_silent(self) -> None:
        """Kill workers that have shown no progress for too long."""
        guards, now = self._plan.guards, time.monotonic()
        if not guards.enabled:
            return
        usual_s = max(record.usual_s for record in self._records)
        limit_s = timeouts.step_timeout(guards.env_timeout_s, usual_s)
        self.seats.watch(now, limit_s)

        def progress(i: int) -> Any:
            return self.seats.progress(i, self._supervisor.orders(i))

        for i, patience_s in self._supervisor.silent(now, limit_s, progress):
            stack = self.seats.stack(i)
            why = f"has not answered for {patience_s:g} s and was killed (see --env-timeout-s)"
            self._lose(i, f"{why}\n{stack}" if stack else why)

    def _count_lost(self, taken: int) -> None:
        self.ledger.collected += taken
        self.ledger.lost += taken

    def _lose(self, i: int, why: str, *, counts: bool = True) -> None:
        """A sampler is lost: bury it, and have it replaced, or fail."""
        record, orders = self._records[i], self._supervisor.orders(i)
        summary, _, words = why.partition("\n")
        if i in self._supervisor.coming_up:
            where = f"while making its environments, sampler {record.name}"
        else:
            where = self.seats.where(i, orders, self._journals)
        record.vacate()
        taken, rows_left = self.seats.lose(i, orders)
        record.lost_steps += taken
        self._count_lost(taken)
        said = f"{record.name} {summary}, {where}." + (f"\n{words.rstrip()}" if words else "")
        if self.told_to_stop:
            return
        backoff = self._supervisor.gone(i, time.monotonic(), rows_left, counts=counts)
        if backoff is None:
            guards = self._plan.guards
            many = f"\nThat was more than {guards.max_restarts} times in 10 minutes"
            raise WorkerError(
                f"{said[0].upper()}{said[1:]}"
                + (
                    f"{many} (--max-worker-restarts)."
                    if guards.on_worker_loss == "restart"
                    else "\nWith --on-worker-loss restart it would have been replaced."
                )
            )
        when = f" in {backoff:g} s" if backoff else ""
        self._say(f"{said[0].upper()}{said[1:]}\nIt is replaced{when}.")

    def _abandon(self, slots: Iterable[int]) -> None:
        """Kill those that did not answer before the run is to stop."""
        for i in slots:
            self._lose(i, "did not stop")
