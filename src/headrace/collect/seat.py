"""A worker's slot, and who is in it, as the crew sees it. Left out: what follows (`crew.py`)."""

import contextlib
import mmap
from collections.abc import Iterable

from headrace.batch import Fragment
from headrace.collect.api import Plan
from headrace.collect.handle import Handle
from headrace.collect.orders import Order, Slot


class Seat:
    """A slot, and who is in it."""

    def __init__(
        self, name: str, memory: mmap.mmap, offset: int, plan: Plan, vectors: list[int]
    ) -> None:
        self.name, self.offset, self.vectors = name, offset, vectors
        self.slot = Slot(memory, offset, plan, vectors, fresh=True)
        self.handle: Handle | None = None
        self.lost_steps = 0  # of workers that were lost with the order under way
        self.beats_at_order = 0
        self.seconds: dict[str, float] = {}  # of those that sat here before
        self.latest: dict[str, float] = {}  # of who sits here now
        self.usual_s = 0.0

    def meter(self) -> dict[str, float]:
        """Seconds by span of all that have sat here."""
        return _added(self.seconds, self.latest)

    def vacate(self) -> None:
        """Who sits here now is lost."""
        self.handle = None
        self.seconds, self.latest = self.meter(), {}

    def tell(self, order: Order | None) -> None:
        """Send who sits here an order; None: to end."""
        if self.handle is not None:
            with contextlib.suppress(OSError):  # it is gone, which shows when it is listened to
                self.handle.channel.send(order)

    def end(self, deadline: float) -> None:
        """End who sits here, if anybody does; see `Handle.end`."""
        if self.handle is not None:
            try:
                self.handle.end(deadline)
            finally:
                self.handle = None

    def fragments(self, orders: Iterable[Order]) -> dict[int, list[Fragment]]:
        """By vector, those that are ordered."""
        found: dict[int, list[Fragment]] = {}
        for order in orders:
            for v, buffer, _ in order.fragments:
                found.setdefault(v, []).append(self.slot.fragments[v][buffer])
        return found


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {span: one.get(span, 0.0) + other.get(span, 0.0) for span in one | other}
