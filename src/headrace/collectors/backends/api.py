"""The interface between the worker pool and the backends: orders, messages, handles."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.batch import Fragments
from headrace.collectors.api import SamplingPlan
from headrace.collectors.rollout import RolloutResult
from headrace.collectors.snapshots import EpisodeSnapshots
from headrace.envs.api import Restored
from headrace.envs.changes import Changes
from headrace.envs.games.seats import Pool
from headrace.errors import HeadraceError
from headrace.meter import Readings, Timings
from headrace.models.policy import Policy
from headrace.spec import Array


@dataclass(frozen=True)
class WorkerSetup:
    """Data that a worker's process receives at its start, besides the plan."""

    name: str
    generation: int  # counts the processes of this worker
    vectors: list[int]
    state: dict[str, Array]  # of the vectors; {}: they begin
    begin_after: int  # these three: see `RolloutWorker.restore`
    changes: Changes
    pool: Pool | None = None


class WorkOrder(NamedTuple):
    """An order to fill fragments, one after the other."""

    fragments: tuple[tuple[int, int, int], ...]  # vector, buffer, steps of each env before
    version: int | None  # of the weights; None: the newest at each step
    changes: Changes  # of the envs, before these fragments; most have been made before
    pool: Pool | None = None  # of opponents, in a league


class Ready(NamedTuple):
    """The worker has made its environments; `states` has observations too."""

    generation: int
    restored: Restored
    states: dict[int, dict[str, Array]]


class Done(NamedTuple):
    """The worker has carried an order out, or was stopped in it."""

    generation: int
    order: WorkOrder
    result: RolloutResult
    readings: Readings


class Failed(NamedTuple):
    """The worker raised an error, which ends the run: in its work, or in closing."""

    error: HeadraceError
    closing: bool = False


class Exited(NamedTuple):
    """The worker's process has ended."""

    cause: str  # in words
    counts: bool = True  # see `Supervisor.lost`


Message = Ready | Done | Failed | Exited


class LostWork(NamedTuple):
    """Env steps of the unfinished orders of a lost worker: `taken`, and still `left` to take."""

    taken: int
    left: int


class WorkerHandle(Protocol):
    """One worker, as the learner holds it. After a loss another process does its work."""

    index: int  # among the workers of the rank
    name: str
    vectors: list[int]  # that it steps, by their index in the run
    timings: Timings
    has_been_ready: bool  # some process of it has
    lost_steps: int  # taken by lost processes in the order under way, and not remade

    def __init__(self, index: int, vectors: list[int]) -> None:
        self.index, self.name, self.vectors = index, f"worker {index}", vectors
        self.timings, self.has_been_ready, self.lost_steps = Timings(), False, 0

    @property
    def is_running(self) -> bool:
        """True if the worker has a process."""

    def fragments(self, vector: int, buffer: int) -> Fragments:
        """Return the filled fragments of a vector."""

    def prepare(self, order: WorkOrder) -> None:
        """Mark the memory that an order is to fill, if it is shared."""
        return

    def start(self, setup: WorkerSetup) -> None:
        """Have a process started, which sends `Ready`."""

    def send(self, order: WorkOrder) -> None:
        """Send an order. If the process is gone, `poll` returns its `Exited`."""

    def poll(self) -> list[Message]:
        """Return the messages that have come, without waiting."""

    def progress(self, orders: list[WorkOrder]) -> object:
        """Return anything that changes while the worker carries out its orders."""

    def stack(self) -> str:
        """Return the stack of a process that hangs; "": unknown."""

    def position(self, orders: list[WorkOrder], snapshots: EpisodeSnapshots) -> str:
        """Describe the worker's position in its orders."""

    def lose(self, orders: list[WorkOrder]) -> LostWork:
        """End the process, and count what it did of its orders."""


class WorkerBackend(Protocol):
    """The workers of a rank, and what they share. Only `wait` and `close` wait."""

    workers: Sequence[WorkerHandle]

    def publish(self, policies: Mapping[str, Policy], version: int) -> None:
        """Publish weights to the workers."""

    def wait(self, wait_s: float) -> Iterable[WorkerHandle]:
        """Return the workers that have messages, within `wait_s`.

        Raises WorkerError if what all workers share is broken.
        """

    def departures(self) -> Iterable[tuple[WorkerHandle, int]]:
        """Yield workers that leave for another machine, and the env steps that this loses."""
        return ()

    def check(self, now: float, limit_s: float) -> None:
        """Check that what the workers share has answered within `limit_s`."""

    def stop(self) -> None:
        """Have all workers give up where they are."""

    def timings(self) -> dict[str, Timings]:
        """Return what other threads, such as the inference server, have measured."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""
        return {}

    def close(self, within_s: float) -> None:
        """End all workers, after `within_s` by force. EnvError: one failed in closing."""


BackendFactory = Callable[[SamplingPlan, list[list[int]]], WorkerBackend]
"""Makes the workers for lists of vectors. Raises ConfigError where they cannot run."""
