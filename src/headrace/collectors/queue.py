"""Which fragments make a batch where nobody waits for anybody: the first that are there.

Each vector has 1 + lag *buffers*: pieces of memory for a fragment. A buffer goes

    with its sampler -> in the queue -> with the learner -> with its sampler -> ...

and a sampler that has none left waits: nothing is dropped. So beside the batch that is learned from
at most `lag` others can be in the queue.

Left out: samplers and memory (`worker_pool.py`), and what a batch is used for (`asynchronous.py`).
"""

from collections import deque
from collections.abc import Iterable

Buffer = tuple[int, int]
"""A vector, and which of its buffers."""


class Queue:
    """Of the fragments of one rank.

    Args:
        vectors: all of them; a batch has as many fragments.
        lag: L.
    """

    def __init__(self, vectors: Iterable[int], lag: int) -> None:
        self._vectors = list(vectors)
        self._lag = lag
        # A vector's own in turns, so that each vector has one before any has two.
        self._idle = deque((v, b) for b in range(1 + lag) for v in self._vectors)
        self._sampling: set[Buffer] = set()
        self._queued: deque[Buffer] = deque()
        self._learning: list[Buffer] = []

    def to_order(self) -> list[Buffer]:
        """What samplers are to fill now, in this order: theirs from here on."""
        found = list(self._idle)
        self._sampling |= set(found)
        self._idle.clear()
        return found

    def deliver(self, buffer: Buffer) -> None:
        """A sampler has filled it."""
        self._sampling.remove(buffer)
        self._queued.append(buffer)

    @property
    def has_batch(self) -> bool:
        """Whether there is enough for a batch."""
        return len(self._queued) >= len(self._vectors)

    @property
    def depth(self) -> float:
        """What is in the queue, in batches."""
        return len(self._queued) / len(self._vectors)

    def take(self) -> list[Buffer]:
        """The first that make a batch: the learner's from here on."""
        assert self.has_batch and not self._learning, self._learning
        self._learning = [self._queued.popleft() for _ in self._vectors]
        return list(self._learning)

    def release(self) -> None:
        """The learner has read what it took."""
        self._idle += self._learning
        self._learning = []
