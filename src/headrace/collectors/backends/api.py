"""What the crew needs of where its samplers sit, and what it keeps of each of them.

Left out: the kinds of seats (`processes.py`, `ray_actors.py`), and what follows (`worker_pool.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace.batch import Fragment
from headrace.collectors.api import Plan
from headrace.collectors.backends.orders import Order, Orders
from headrace.collectors.snapshots import Journals
from headrace.meter import Laps, Readings
from headrace.models.policy import Policy


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


class Seats(Protocol):
    """Where the samplers of a rank sit: `Seats(plan, shares)`, one for each list of vectors.

    A seat is taken by `start`, and left by `lose` or `close`. Nothing here waits, but for `listen`
    and `close`.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """Put weights where samplers find them."""

    def fragment(self, i: int, vector: int, buffer: int) -> Fragment:
        """One that is filled, or the memory for it."""

    def prepare(self, i: int, order: Order) -> None:
        """It is going to be filled."""

    def start(self, i: int, orders: Orders) -> None:
        """Have a sampler sit down."""

    def tell(self, i: int, order: Order) -> None:
        """Tell it what to fill; it may be gone, which shows when it is listened to."""

    def listen(self, wait_s: float) -> list[Heard]:
        """What is heard from any, within so many seconds; SamplerError if all of it is broken."""

    def leaving(self) -> Iterable[tuple[int, int]]:
        """Who leaves for another place, and the env steps that are lost by it."""

    def watch(self, now: float, limit_s: float) -> None:
        """Look after what they share: that it answers within the limit."""

    def progress(self, i: int, orders: list[Order]) -> Any:
        """Anything that changes while a sampler is at work on its orders, or need not be."""

    def stack(self, i: int) -> str:
        """Where it is stuck; "" if that cannot be told."""

    def where(self, i: int, orders: list[Order], journals: Journals) -> str:
        """Where in its orders it was lost."""

    def lose(self, i: int, orders: list[Order]) -> tuple[int, int]:
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


class MakeSeats(Protocol):
    """Makes them."""

    def __call__(self, plan: Plan, shares: list[list[int]], names: list[str]) -> Seats:
        """See `Seats`; raises ConfigError where they cannot be."""
