"""The sizes that a search varies, and the space of possible sizes."""

from dataclasses import dataclass

from headrace.config.checks import largest_divisor

SIZE_NAMES = ("num_learners", "num_workers", "num_envs", "num_steps", "envs_per_vector")
"""Settings that are searched unless the user has fixed them."""

_MAX_IMBALANCE = 1.1  # load of the busiest worker, relative to the best division


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, over all learners, as in the settings."""

    num_learners: int
    num_workers: int
    num_envs: int
    num_steps: int
    envs_per_vector: int

    @property
    def batch(self) -> int:
        """Env steps of an update."""
        return self.num_envs * self.num_steps

    @property
    def workers_per_learner(self) -> int:
        """Number of workers of one learner."""
        return self.num_workers // self.num_learners

    def describe(self) -> str:
        """Format the sizes as text."""
        learners = f"{self.num_learners} learners, " if self.num_learners > 1 else ""
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers or 'no'} workers"
        return (
            f"{learners}{workers}, {self.num_envs} envs x "
            f"{self.num_steps} steps, vectors of {self.envs_per_vector}"
        )


@dataclass(frozen=True)
class SearchSpace:
    """The sizes that a search may try.

    Attributes:
        batch: fixed env steps of an update; None: they may change.
        one_vector: True if all environments of a learner are one vector in its process.
        envs_per_learner: fixed number of environments of each learner; 0: not fixed.
    """

    base: Sizes
    free: frozenset[str]
    batch: int | None
    one_vector: bool = False
    envs_per_learner: int = 0
    vectors_per_worker: int = 1

    def at(self, *, learners: int, workers: int, envs: int, steps: int) -> Sizes | None:
        """Complete some sizes; None if they are fixed at other values, or do not divide.

        Workers are those of each learner, environments those of all. The number of steps is ignored
        if the batch is fixed.
        """
        if self.envs_per_learner:
            envs = self.envs_per_learner * learners
        if self.batch is not None:
            if self.batch % envs:
                return None
            steps = self.batch // envs
        if envs % learners:
            return None
        share = envs // learners
        size = share if self.one_vector else self._vector_size(share, workers)
        if size is None:
            return None
        sizes = Sizes(learners, learners * workers, envs, steps, size)
        changed = {name for name in SIZE_NAMES if getattr(sizes, name) != getattr(self.base, name)}
        return sizes if changed <= self.free | self._follows else None

    @property
    def _follows(self) -> set[str]:
        """Sizes that follow from others, and so are no settings."""
        follows = {"num_envs"} if self.envs_per_learner else set()
        return follows | ({"envs_per_vector"} if self.one_vector else set())

    def _vector_size(self, share: int, workers: int) -> int | None:
        """Return the largest vector size that loads the workers evenly."""
        if "envs_per_vector" not in self.free:
            size = self.base.envs_per_vector
            return None if share % size or workers * size > share else size
        if workers > share:
            return None
        if not workers:
            return share
        sizes = [d for d in range(1, share + 1) if share % d == 0 and d * workers <= share]
        loads = {size: -(-(share // size) // workers) * size for size in sizes}
        even = max(size for size in sizes if loads[size] <= _MAX_IMBALANCE * min(loads.values()))
        return largest_divisor(share, max(1, even // self.vectors_per_worker))

    def envs(self) -> list[int]:
        """Return the possible numbers of environments."""
        base = self.base.num_envs
        if "num_envs" not in self.free or self.envs_per_learner:
            return [base]
        if self.batch is not None:
            if "num_steps" not in self.free:
                return [base]
            return [n for n in range(1, self.batch + 1) if self.batch % n == 0]
        return _quarters(base)

    def steps(self) -> list[int]:
        """Return the possible numbers of steps of each environment."""
        if self.batch is not None or "num_steps" not in self.free:
            return [self.base.num_steps]
        return _quarters(self.base.num_steps)

    def workers(self, learners: int, envs: int) -> list[int]:
        """Return the useful numbers of workers per learner: each reduces the largest load."""
        if "num_workers" not in self.free:
            count, rest = divmod(self.base.num_workers, learners)
            return [] if rest else [count]
        if self.one_vector:
            return [0]
        share = envs // learners
        counts, least = [0], share + 1
        for workers in range(1, share + 1):
            if (load := -(-share // workers)) < least:
                counts.append(workers)
                least = load
        if "envs_per_vector" in self.free:  # with more environments, one for each worker
            counts += [n // learners for n in self.envs() if n > envs and n % learners == 0]
        return counts

    def settings(self, sizes: Sizes) -> dict[str, int]:
        """Return the free sizes as settings by name."""
        free = self.free - self._follows
        return {name: getattr(sizes, name) for name in SIZE_NAMES if name in free}


def _quarters(base: int) -> list[int]:
    """Return numbers in steps of a quarter or less around `base`: 4, 5, 6, 7, 8, 10, ..."""
    numbers = {base << k for k in range(25)}
    numbers |= {n * j // 4 for n in numbers for j in (5, 6, 7)}
    numbers |= {base * j >> k for k in range(3, 12) for j in (4, 5, 6, 7)}
    numbers |= {base * j // 8 for j in (4, 5, 6, 7)}
    return sorted(numbers - {0})
