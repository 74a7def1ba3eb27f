"""What a worker is told, and the memory that it writes to.

Left out: who tells it (`worker_pool.py`), and how it is carried out (`worker_main.py`).
"""

import mmap
from dataclasses import dataclass
from typing import NamedTuple

from headrace import batch
from headrace.batch import Fragment
from headrace.collectors.api import Plan
from headrace.spec import Array


@dataclass(frozen=True)
class Orders:
    """What one worker is told at its start, besides the plan.

    Attributes:
        name: in messages.
        generation: of its slot.
        vectors: which are its own, by their index in the run.
        state: of its vectors; {}: they begin.
        begin_after: see `Sampler.restore`.
        offset: where its slot begins in the memory of all (bytes), where they share it.
    """

    name: str
    generation: int
    vectors: list[int]
    state: dict[str, Array]
    begin_after: int
    offset: int = 0


class Order(NamedTuple):
    """To fill fragments, one after the other.

    Attributes:
        fragments: the vector of each, which of its buffers, and the steps that each env of the
            vector has taken before.
        version: of the weights; None: the newest at each step.
    """

    fragments: tuple[tuple[int, int, int], ...]
    version: int | None


class Slot:
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
        self, memory: mmap.mmap, offset: int, plan: Plan, vectors: list[int], *, fresh: bool
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
    def num_bytes(cls, plan: Plan, num_vectors: int) -> int:
        """How much memory a slot takes."""
        return cls._HEADER + num_vectors * plan.num_buffers * batch.num_bytes(plan.layout)
