"""What the crew needs of where its samplers sit, and what it keeps of each of them.

Left out: the kinds of seats (`processes.py`, `ray_actors.py`), and what follows (`worker_pool.py`).
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace import batch
from headrace.batch import Fragment
from headrace.collectors.api import SamplingPlan
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.meter import Laps, Readings
from headrace.models.policy import Policy
from headrace.spec import Array

# What a worker is told, and the memory that it writes to.


@dataclass(frozen=True)
class WorkerSetup:
    """What one worker is told at its start, besides the plan.

    Attributes:
        name: in messages.
        generation: of its slot.
        vectors: which are its own, by their index in the run.
        state: of its vectors; {}: they begin.
        begin_after: see `RolloutWorker.restore`.
        offset: where its slot begins in the memory of all (bytes), where they share it.
    """

    name: str
    generation: int
    vectors: list[int]
    state: dict[str, Array]
    begin_after: int
    offset: int = 0


class WorkOrder(NamedTuple):
    """To fill fragments, one after the other.

    Attributes:
        fragments: the vector of each, which of its buffers, and the steps that each env of the
            vector has taken before.
        version: of the weights; None: the newest at each step.
    """

    fragments: tuple[tuple[int, int, int], ...]
    version: int | None


class WorkerMemory:
    """A worker's piece of shared memory: some numbers, then the fragments of its vectors.

    Args:
        memory: of all slots.
        offset: where this one begins.
        plan: the run's.
        vectors: whose fragments these are.
        fresh: poison them.

    Attributes:
        beats: counts what the worker does (its meter's laps), as a sequence of one number.
        generation: of the worker that writes, as a sequence of one number.
        turn: the vector that is being stepped where they take turns, else -1; as a sequence of one.
        fragments: by vector, the buffers of each.
    """

    _HEADER = 64

    def __init__(
        self, memory: mmap.mmap, offset: int, plan: SamplingPlan, vectors: list[int], *, fresh: bool
    ) -> None:
        numbers = memoryview(memory)[offset : offset + self._HEADER].cast("q")
        self.beats, self.generation, self.turn = numbers[0:1], numbers[1:2], numbers[2:3]
        size = batch.num_bytes(plan.layout)
        self.fragments: dict[int, list[Fragment]] = {v: [] for v in vectors}
        first = offset + self._HEADER
        for buffers in self.fragments.values():
            for _ in range(plan.num_buffers):
                piece = memoryview(memory)[first : first + size]
                buffers.append(batch.allocate(plan.layout, piece, fresh=fresh))
                first += size

    @classmethod
    def num_bytes(cls, plan: SamplingPlan, num_vectors: int) -> int:
        """How much memory a slot takes."""
        return cls._HEADER + num_vectors * plan.num_buffers * batch.num_bytes(plan.layout)


@dataclass
class Record:
    """Of one seat: whose it is, and what was heard from who sits there.

    Attributes:
        name: in messages.
        vectors: by their index in the run.
        lost_steps: of samplers that were lost with the order under way.
        seconds: by span, of those that sat here before.
        latest: of who sits here now.
        usual_s: see `Meter.usual_s`.
        laps: of all that have sat here; None: they are not kept.
    """

    name: str
    vectors: list[int]
    lost_steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    usual_s: float = 0.0
    laps: Laps | None = None

    def read(self, readings: Readings) -> None:
        """Who sits here now has told of its meter."""
        self.latest, self.usual_s, laps = readings
        if self.laps and laps:
            self.laps.join(laps)
        else:
            self.laps = self.laps or laps

    def meter(self) -> dict[str, float]:
        """Seconds by span of all that have sat here."""
        spans = self.seconds | self.latest
        return {span: self.seconds.get(span, 0.0) + self.latest.get(span, 0.0) for span in spans}

    def vacate(self) -> None:
        """Who sits here now is gone."""
        self.seconds, self.latest = self.meter(), {}


class Heard(NamedTuple):
    """What came from a seat.

    Attributes:
        seat: which.
        messages: (kind, generation, what), in order: "ready", "done" or "error".
        cause: how who sat there has ended, if so.
        counts: see `Supervisor.gone`.
    """

    seat: int
    messages: list[tuple[str, int, Any]]
    cause: str | None = None
    counts: bool = True


class WorkerBackend(Protocol):
    """The workers of a rank: `WorkerBackend(plan, shares)` has one for each list of vectors.

    A seat is taken by `start`, and left by `lose` or `close`. Nothing here waits, but for `listen`
    and `close`.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """Put weights where samplers find them."""

    def fragment(self, i: int, vector: int, buffer: int) -> Fragment:
        """One that is filled, or the memory for it."""

    def prepare(self, i: int, order: WorkOrder) -> None:
        """It is going to be filled."""

    def start(self, i: int, orders: WorkerSetup) -> None:
        """Have a sampler sit down."""

    def tell(self, i: int, order: WorkOrder) -> None:
        """Tell it what to fill; it may be gone, which shows when it is listened to."""

    def listen(self, wait_s: float) -> list[Heard]:
        """What is heard from any, within so many seconds; WorkerError if all of it is broken."""

    def leaving(self) -> Iterable[tuple[int, int]]:
        """Who leaves for another place, and the env steps that are lost by it."""

    def watch(self, now: float, limit_s: float) -> None:
        """Look after what they share: that it answers within the limit."""

    def progress(self, i: int, orders: list[WorkOrder]) -> Any:
        """Anything that changes while a sampler is at work on its orders, or need not be."""

    def stack(self, i: int) -> str:
        """Where it is stuck; "" if that cannot be told."""

    def where(self, i: int, orders: list[WorkOrder], journals: EpisodeSnapshots) -> str:
        """Where in its orders it was lost."""

    def lose(self, i: int, orders: list[WorkOrder]) -> tuple[int, int]:
        """End who sits there: env steps taken of the orders, and those that are left."""

    def stop(self) -> None:
        """All are to give up where they are."""

    def meters(self) -> dict[str, dict[str, float]]:
        """Seconds by span of what works beside the samplers."""

    def laps(self) -> dict[str, Laps]:
        """What that did when, if the plan wants a timeline; asked for once."""

    def metrics(self) -> dict[str, float]:
        """Since the last call."""

    def is_taken(self, i: int) -> bool:
        """Whether anybody sits there."""

    def close(self, within_s: float) -> None:
        """End all, those that do not go by themselves as well; EnvError if one failed in it."""


class BackendFactory(Protocol):
    """Makes them."""

    def __call__(
        self, plan: SamplingPlan, shares: list[list[int]], names: list[str]
    ) -> WorkerBackend:
        """See `WorkerBackend`; raises ConfigError where they cannot be."""
