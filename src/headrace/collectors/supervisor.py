"""Decisions on workers: which orders each one gets, and what follows when one is lost.

A *generation* counts each worker's processes: messages of an earlier process are ignored. The
caller ends a lost process before it reports the loss: memory never has two writers. `now` is
monotonic, in seconds. There are no processes here.
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
    """State of a worker."""

    WAITING = "waiting to be started"
    STARTING = "starting"
    UP = "up"


@dataclass
class WorkerState:
    """The supervisor's record of one worker."""

    rate: RestartRate
    status: Status = Status.WAITING
    start_at: float = 0.0
    generation: int = 0
    moves: int = 0
    orders: deque[Any] = field(default_factory=deque)  # not carried out yet
    num_sent: int = 0  # orders sent and not carried out
    has_delivered: bool = False  # all its orders are carried out
    num_delivered: int = 0  # orders carried out: signs of life
    lost_at: Any = None  # status, whether it was busy, and position at the last loss
    anew: int = 0  # repeated losses at the same place of its order
    lost_in_a_row: int = 0  # losses since an order was carried out
    stall: StallTimer = field(default_factory=StallTimer)


class Supervisor:
    """Decisions for the workers of one rank; `max_restarts` of each in `timeouts.WINDOW_S`."""

    def __init__(self, num_workers: int, *, restart: bool, max_restarts: int) -> None:
        self._workers = [WorkerState(RestartRate(max_restarts)) for _ in range(num_workers)]
        self._restart = restart

    def due(self, now: float) -> list[int]:
        """Return the workers to start now (`begin`).

        A worker that delivered all its orders waits: its results do not count yet, and a new
        process would repeat them.
        """
        return [
            i
            for i, w in enumerate(self._workers)
            if w.status is Status.WAITING and w.start_at <= now and not w.has_delivered
        ]

    def begin(self, worker: int, now: float) -> tuple[int, int]:
        """Mark a worker as starting.

        Return its generation, and how often it was lost again at this place of the order.

        A worker that was lost twice at the same place gets new episodes each time.
        """
        w = self._workers[worker]
        assert w.status is Status.WAITING, w
        w.status, w.generation = Status.STARTING, w.generation + 1
        w.stall.begin(now)
        return w.generation, w.anew

    def ready(self, worker: int, generation: int) -> bool:
        """Mark a worker as idle. Return whether it is the process that was started last."""
        w = self._workers[worker]
        if generation != w.generation or w.status is not Status.STARTING:
            return False
        w.status = Status.UP
        return True

    def order(self, worker: int, order: Any) -> None:
        """Append an order to a worker's queue."""
        w = self._workers[worker]
        w.orders.append(order)
        w.has_delivered = False

    def to_send(self, now: float) -> list[tuple[int, Any]]:
        """Return (worker, order) to send now, in order."""
        to_send = []
        for i, w in enumerate(self._workers):
            if w.status is Status.UP and w.num_sent < len(w.orders):
                if not w.num_sent:
                    w.stall.begin(now)
                to_send += [(i, order) for order in list(w.orders)[w.num_sent :]]
                w.num_sent = len(w.orders)
        return to_send

    def delivered(self, worker: int, generation: int, order: Any) -> bool:
        """Mark an order as carried out, in any sequence. Return whether that counts."""
        w = self._workers[worker]
        if generation != w.generation or order not in list(w.orders)[: w.num_sent]:
            return False
        w.num_sent -= 1
        w.num_delivered += 1
        w.lost_in_a_row, w.lost_at, w.anew = 0, None, 0
        w.orders.remove(order)
        w.has_delivered = not w.orders
        return True

    def orders(self, worker: int) -> list[Any]:
        """Return the orders of a worker that are not carried out."""
        return list(self._workers[worker].orders)

    def moved(self, worker: int, now: float) -> None:
        """Mark a worker as moving to another machine, where it starts at once."""
        w = self._workers[worker]
        w.status, w.num_sent, w.start_at = Status.WAITING, 0, now
        w.moves += 1

    def lost(self, worker: int, now: float, position: Any, *, counts: bool = True) -> float | None:
        """Mark a worker as lost. Return the seconds until its restart; None: it is not restarted.

        Args:
            position: any value that is equal at the same place of the same order.
            counts: True if its work may be the cause, and not only its machine.
        """
        w = self._workers[worker]
        lost_at = w.status, w.num_sent > 0, position
        w.num_sent = 0
        w.anew += counts and lost_at == w.lost_at
        w.status, w.lost_at, w.lost_in_a_row = Status.WAITING, lost_at, w.lost_in_a_row + 1
        if not self._restart or (counts and not w.rate.again(now)):
            return None
        backoff = 0.0
        if w.lost_in_a_row > 1:
            backoff = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (w.lost_in_a_row - 2))
        w.start_at = now + backoff
        return backoff

    def stalled(
        self, now: float, limit_s: float, progress: Callable[[int], Any]
    ) -> list[tuple[int, float]]:
        """Return (worker, limit in s) for those without progress for longer than their limit.

        `limit_s` is for a step or reset; any change of `progress(worker)` is progress.
        """
        stalled = []
        for i, w in enumerate(self._workers):
            is_starting = w.status is Status.STARTING
            if is_starting or w.num_sent:
                longest = limit_s * (TIMES_AS_LONG_TO_START if is_starting else 1)
                if w.stall.lasts(now, (progress(i), w.num_delivered)) > longest:
                    stalled.append((i, longest))
        return stalled

    @property
    def restarts(self) -> int:
        """Number of processes that replaced lost ones."""
        return sum(max(0, w.generation - 1 - w.moves) for w in self._workers)

    @property
    def pending(self) -> list[int]:
        """Workers with orders that are not carried out."""
        return [i for i, w in enumerate(self._workers) if w.orders]

    @property
    def starting(self) -> list[int]:
        """Workers whose process is not up."""
        return [i for i, w in enumerate(self._workers) if w.status is not Status.UP]
