"""The sizes that a search is about, and which of them there can be.

Left out: which are fast (`search.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config.checks import largest_divisor

FREE = ("num_learners", "num_workers", "num_envs", "num_steps", "envs_per_vector")
"""Settings that are searched, where the user has not fixed them."""

_UNEVEN = 1.1  # of the least that the worker with the most environments can have


@dataclass(frozen=True)
class Sizes:
    """Of a run; numbers are those of all learners together, as settings have them."""

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
    def workers_each(self) -> int:
        """Of one learner."""
        return self.num_workers // self.num_learners

    def told(self) -> str:
        """In words."""
        learners = f"{self.num_learners} learners, " if self.num_learners > 1 else ""
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers or 'no'} workers"
        return (
            f"{learners}{workers}, {self.num_envs} envs x "
            f"{self.num_steps} steps, vectors of {self.envs_per_vector}"
        )


@dataclass(frozen=True)
class Space:
    """All sizes that a search may come to.

    Attributes:
        base: those of settings and preset.
        free: names of what may be another.
        batch: env steps of an update, if they are to stay; None: they may be others.
        one_vector: all environments of a learner are one vector, stepped by the learner.
        per_learner: the number of environments follows that of learners: so many each (0: no).
        vectors_each: of each worker.
    """

    base: Sizes
    free: frozenset[str]
    batch: int | None
    one_vector: bool = False
    per_learner: int = 0
    vectors_each: int = 1

    def at(self, *, learners: int, workers: int, envs: int, steps: int) -> Sizes | None:
        """Sizes, with what follows from them; None: they are fixed at others, or do not divide.

        Args:
            learners: how many.
            workers: of each learner.
            envs: of all together.
            steps: of each environment, unless the batch is to stay as it is: then they follow.
        """
        if self.per_learner:
            envs = self.per_learner * learners
        if self.batch is not None:
            if self.batch % envs:
                return None
            steps = self.batch // envs
        if envs % learners:
            return None
        share = envs // learners
        size = share if self.one_vector else self._vector(share, workers)
        if size is None:
            return None
        found = Sizes(learners, learners * workers, envs, steps, size)
        changed = {name for name in FREE if getattr(found, name) != getattr(self.base, name)}
        follows = {"num_envs"} if self.per_learner else set()
        follows |= {"envs_per_vector"} if self.one_vector else set()
        return found if changed <= self.free | follows else None

    def _vector(self, share: int, workers: int) -> int | None:
        """Environments of a vector: many, but so that no worker has many more than another."""
        if "envs_per_vector" not in self.free:
            fixed = self.base.envs_per_vector
            return None if share % fixed or workers * fixed > share else fixed
        if workers > share:
            return None
        if not workers:
            return share
        sizes = [d for d in range(1, share + 1) if share % d == 0 and d * workers <= share]
        loads = {size: -(-(share // size) // workers) * size for size in sizes}
        even = max(size for size in sizes if loads[size] <= _UNEVEN * min(loads.values()))
        return largest_divisor(share, max(1, even // self.vectors_each))

    def envs(self) -> list[int]:
        """How many environments there can be, whatever else."""
        base = self.base.num_envs
        if "num_envs" not in self.free or self.per_learner:
            return [base]
        if self.batch is not None:
            if "num_steps" not in self.free:
                return [base]
            return [n for n in range(1, self.batch + 1) if self.batch % n == 0]
        return _quarters(base)

    def steps(self) -> list[int]:
        """How many steps of each environment there can be in a batch that may be another."""
        if self.batch is not None or "num_steps" not in self.free:
            return [self.base.num_steps]
        return _quarters(self.base.num_steps)

    def workers(self, learners: int, envs: int) -> list[int]:
        """How many workers each learner can have: more than others only if each then does less."""
        if "num_workers" not in self.free:
            fixed, rest = divmod(self.base.num_workers, learners)
            return [] if rest else [fixed]
        if self.one_vector:
            return [0]
        share = envs // learners
        found, least = [0], share + 1
        for workers in range(1, share + 1):
            if (load := -(-share // workers)) < least:
                found.append(workers)
                least = load
        if "envs_per_vector" in self.free:  # with more environments, one for each worker
            found += [n // learners for n in self.envs() if n > envs and n % learners == 0]
        return found

    def settings(self, sizes: Sizes) -> dict[str, int]:
        """By name, without what the user has fixed, or what follows."""
        follows = {"num_envs"} if self.per_learner else set()
        follows |= {"envs_per_vector", "num_workers"} if self.one_vector else set()
        return {name: getattr(sizes, name) for name in FREE if name in self.free - follows}


def _quarters(base: int) -> list[int]:
    """Numbers around one, each a quarter, or less, above the one before: 4, 5, 6, 7, 8, 10, ..."""
    found = {base << k for k in range(25)}
    found |= {n * j // 4 for n in found for j in (5, 6, 7)}
    found |= {base * j >> k for k in range(3, 12) for j in (4, 5, 6, 7)}
    found |= {base * j // 8 for j in (4, 5, 6, 7)}
    return sorted(found - {0})


def fixed(origin: Mapping[str, str]) -> frozenset[str]:
    """Which of the sizes the user has fixed, by flag, argument or file."""
    return frozenset(n for n in FREE if origin[n].startswith(("given", "config ")))
