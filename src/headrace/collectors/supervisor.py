"""Which sampler is to do what, and what follows when one is lost: decisions only, no processes.

A sampler has a *slot* (memory, and its vectors); the process in it may be another one after a loss.
Each has a *generation*, so that nothing that an earlier one said or wrote can count. A slot goes

    waiting -> starting -> idle -> busy -> idle -> ...      (busy: it has orders)
       ^______________________________/   lost: begun again, later and later, or the run fails

and whoever is told that a slot is lost has ended and buried its process before: memory never has
two writers. The clock is given with each call (seconds, monotonic).

Left out: what is ordered (`synchronous.py`, `asynchronous.py`), processes, pipes and memory
(`worker_pool.py`).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.timeouts import RestartRate, StallTimer

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
TIMES_AS_LONG_TO_START = 10
"""Making environments may take so many times the limit of a step."""


class Status(Enum):
    """What a slot is doing."""

    WAITING = "waiting for its time to be started"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy with an order"


@dataclass
class WorkerState:
    """What the supervisor knows of one worker."""

    rate: RestartRate
    state: Status = Status.WAITING
    start_at: float = 0.0
    generation: int = 0
    moves: int = 0
    orders: deque[Any] = field(default_factory=deque)  # not carried out yet, in their order
    num_sent: int = 0  # of these
    delivered: bool = False  # all that was ordered
    num_delivered: int = 0  # each is a sign of life
    lost_at: Any = None  # where in its order, the last time
    anew: int = 0  # how often it was lost where this order had been lost before
    lost_in_a_row: int = 0  # since an order was carried out
    silence: StallTimer = field(default_factory=StallTimer)


class Supervisor:
    """Of the samplers of one rank.

    Args:
        num_slots: how many.
        restart: whether a lost sampler is replaced.
        max_restarts: of each slot, in `patience.WINDOW_S`.
    """

    def __init__(self, num_slots: int, *, restart: bool, max_restarts: int) -> None:
        self._slots = [WorkerState(RestartRate(max_restarts)) for _ in range(num_slots)]
        self._restart = restart

    def due(self, now: float) -> list[int]:
        """Slots whose sampler is to be started now (`begin`).

        Not those that have delivered all: until it counts, a new sampler would go on from before.
        """
        return [
            i
            for i, s in enumerate(self._slots)
            if s.state is Status.WAITING and s.start_at <= now and not s.delivered
        ]

    def begin(self, slot: int, now: float) -> tuple[int, int]:
        """A sampler is being started: its generation, and how often its order is to be another.

        0: it is made (again) as it was. But where samplers were lost at the same place twice, it is
        to be made of new episodes: of others each time.
        """
        s = self._slots[slot]
        assert s.state is Status.WAITING, s
        s.state, s.generation = Status.STARTING, s.generation + 1
        s.silence.begin(now)
        return s.generation, s.anew

    def ready(self, slot: int, generation: int) -> bool:
        """A sampler says that it is up; whether it is the one that was started last."""
        s = self._slots[slot]
        if generation != s.generation or s.state is not Status.STARTING:
            return False
        s.state = Status.IDLE
        return True

    def order(self, slot: int, what: Any) -> None:
        """Of a slot something is wanted, after what was ordered before."""
        s = self._slots[slot]
        s.orders.append(what)
        s.delivered = False

    def to_send(self, now: float) -> list[tuple[int, Any]]:
        """What samplers are to be told now: (slot, order), in order; they are busy from here on."""
        found = []
        for i, s in enumerate(self._slots):
            if s.state in (Status.IDLE, Status.BUSY) and s.num_sent < len(s.orders):
                if s.state is Status.IDLE:
                    s.state = Status.BUSY
                    s.silence.begin(now)
                found += [(i, what) for what in list(s.orders)[s.num_sent :]]
                s.num_sent = len(s.orders)
        return found

    def delivered(self, slot: int, generation: int, what: Any) -> bool:
        """A sampler says that an order is carried out (`what`); whether that counts.

        Not in the order in which it was told, where it carries several out at a time.
        """
        s = self._slots[slot]
        told = list(s.orders)[: s.num_sent]
        if generation != s.generation or s.state is not Status.BUSY or what not in told:
            return False
        s.num_sent -= 1
        s.num_delivered += 1
        s.lost_in_a_row, s.lost_at, s.anew = 0, None, 0
        s.orders.remove(what)
        if not s.num_sent:
            s.state = Status.IDLE
        s.delivered = not s.orders
        return True

    def orders(self, slot: int) -> list[Any]:
        """What is ordered of a slot, and not carried out."""
        return list(self._slots[slot].orders)

    def moved(self, slot: int, now: float) -> None:
        """A sampler has left for another place: one is started there at once."""
        s = self._slots[slot]
        s.state, s.num_sent, s.start_at = Status.WAITING, 0, now
        s.moves += 1

    def gone(self, slot: int, now: float, where: Any, *, counts: bool = True) -> float | None:
        """A sampler is lost: in how many seconds another is started; None: none is.

        Args:
            slot: its own.
            now: the clock.
            where: in its order: anything that is the same at the same place.
            counts: whether it may be the fault of what it does, and not of its machine alone.
        """
        s = self._slots[slot]
        s.num_sent = 0
        place = s.state, where
        s.anew += counts and place == s.lost_at
        s.state, s.lost_at, s.lost_in_a_row = Status.WAITING, place, s.lost_in_a_row + 1
        if not self._restart or (counts and not s.rate.again(now)):
            return None
        backoff = 0.0
        if s.lost_in_a_row > 1:
            backoff = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (s.lost_in_a_row - 2))
        s.start_at = now + backoff
        return backoff

    def silent(
        self, now: float, limit_s: float, progress: Callable[[int], Any]
    ) -> list[tuple[int, float]]:
        """Slots that have made no progress for too long, and how long that is (s).

        Args:
            now: the clock.
            limit_s: how long a step or reset may take.
            progress: of a slot: anything that changes as it goes on.
        """
        found = []
        for i, s in enumerate(self._slots):
            if s.state in (Status.STARTING, Status.BUSY):
                patience = limit_s * (TIMES_AS_LONG_TO_START if s.state is Status.STARTING else 1)
                if s.silence.lasts(now, (progress(i), s.num_delivered)) > patience:
                    found.append((i, patience))
        return found

    @property
    def restarts(self) -> int:
        """How many samplers were started in the place of others that were lost."""
        return sum(max(0, s.generation - 1 - s.moves) for s in self._slots)

    @property
    def owing(self) -> list[int]:
        """Slots with orders that are not carried out."""
        return [i for i, s in enumerate(self._slots) if s.orders]

    @property
    def coming_up(self) -> list[int]:
        """Slots without a sampler that is up."""
        return [
            i for i, s in enumerate(self._slots) if s.state in (Status.WAITING, Status.STARTING)
        ]
