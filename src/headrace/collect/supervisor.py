"""Which sampler is to do what, and what follows when one is lost: decisions only, no processes.

A sampler has a *slot* (memory, and its vectors); the process in it may be another one after a loss.
Each has a *generation*, so that nothing that an earlier one said or wrote can count. A slot goes

    waiting -> starting -> idle -> busy -> idle -> ...
       ^______________________________/   lost: begun again, later and later, or the run fails

and whoever is told that a slot is lost has ended and buried its process before: memory never has
two writers. The clock is given with each call (seconds, monotonic).

Left out: processes, pipes and memory (`workers.py`), and what a sampler does (`rollout.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.patience import RestartRate, Silence

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
TIMES_AS_LONG_TO_START = 10
"""Making environments may take so many times the limit of a step."""


class Is(Enum):
    """What a slot is doing."""

    WAITING = "waiting for its time to be started"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy with a fragment"


@dataclass
class _Slot:
    rate: RestartRate
    state: Is = Is.WAITING
    start_at: float = 0.0
    generation: int = 0
    owes: bool = False  # a fragment of the batch under way
    delivered: bool = False  # that fragment
    lost_at: Any = None  # where in its fragment, the last time in this batch
    anew: int = 0  # how often this batch was lost where it had been lost before
    lost_in_a_row: int = 0  # since a fragment was delivered
    silence: Silence = field(default_factory=Silence)


class Supervisor:
    """Of the samplers of one rank.

    Args:
        num_slots: how many.
        restart: whether a lost sampler is replaced.
        max_restarts: of each slot, in `patience.WINDOW_S`.
    """

    def __init__(self, num_slots: int, *, restart: bool, max_restarts: int) -> None:
        self._slots = [_Slot(RestartRate(max_restarts)) for _ in range(num_slots)]
        self._restart = restart

    def due(self, now: float) -> list[int]:
        """Slots whose sampler is to be started now (`begin`).

        Not those that have delivered: until that batch counts, a new sampler would go on from
        before it.
        """
        return [
            i
            for i, s in enumerate(self._slots)
            if s.state is Is.WAITING and s.start_at <= now and not s.delivered
        ]

    def begin(self, slot: int, now: float) -> tuple[int, int]:
        """A sampler is being started: its generation, and how often its fragment is to be another.

        0: it is made (again) as it was. But where samplers were lost at the same place twice, it is
        to be made of new episodes: of others each time.
        """
        s = self._slots[slot]
        assert s.state is Is.WAITING, s
        s.state, s.generation = Is.STARTING, s.generation + 1
        s.silence.begin(now)
        return s.generation, s.anew

    def ready(self, slot: int, generation: int) -> bool:
        """A sampler says that it is up; whether it is the one that was started last."""
        s = self._slots[slot]
        if generation != s.generation or s.state is not Is.STARTING:
            return False
        s.state = Is.IDLE
        return True

    def order(self) -> None:
        """Of every slot a fragment is wanted."""
        for s in self._slots:
            assert not s.owes, s
            s.owes, s.delivered, s.lost_at, s.anew = True, False, None, 0

    def to_send(self, now: float) -> list[int]:
        """Slots that are to make their fragment now; they are busy from here on."""
        found = [i for i, s in enumerate(self._slots) if s.owes and s.state is Is.IDLE]
        for i in found:
            self._slots[i].state = Is.BUSY
            self._slots[i].silence.begin(now)
        return found

    def delivered(self, slot: int, generation: int) -> bool:
        """A sampler says that its fragment is done; whether that counts."""
        s = self._slots[slot]
        if generation != s.generation or s.state is not Is.BUSY:
            return False
        s.state, s.lost_in_a_row = Is.IDLE, 0
        s.owes, s.delivered = False, True
        return True

    def gone(self, slot: int, now: float, where: Any) -> float | None:
        """A sampler is lost: in how many seconds another is started; None: none is.

        Args:
            slot: its own.
            now: the clock.
            where: in its fragment: anything that is the same at the same place.
        """
        s = self._slots[slot]
        place = s.state, where
        s.anew += place == s.lost_at
        s.state, s.lost_at, s.lost_in_a_row = Is.WAITING, place, s.lost_in_a_row + 1
        if not self._restart or not s.rate.again(now):
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
            if s.state in (Is.STARTING, Is.BUSY):
                patience = limit_s * (TIMES_AS_LONG_TO_START if s.state is Is.STARTING else 1)
                if s.silence.lasts(now, progress(i)) > patience:
                    found.append((i, patience))
        return found

    @property
    def restarts(self) -> int:
        """How many samplers were started in the place of others."""
        return sum(max(0, s.generation - 1) for s in self._slots)

    @property
    def owing(self) -> list[int]:
        """Slots whose fragment of this batch is not there."""
        return [i for i, s in enumerate(self._slots) if s.owes]

    @property
    def coming_up(self) -> list[int]:
        """Slots without a sampler that is up."""
        return [i for i, s in enumerate(self._slots) if s.state in (Is.WAITING, Is.STARTING)]
