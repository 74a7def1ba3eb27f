"""The members of a league at play: they act for the agents that an episode's draw gave them.

Left out: who is drawn (`envs/seats.py`), and how a member is loaded (`leagues/members.py`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch import Fragment, Obs, each
from headrace.envs.api import VectorEnv
from headrace.envs.seats import Pool
from headrace.models.fast_paths import act_for
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


@dataclass(frozen=True)
class MemberPolicy:
    """A member's policy for the agents of one side."""

    spec: EnvSpec
    network: Network
    module: Policy


LoadMember = Callable[[Pool, int], Mapping[str, MemberPolicy]]
"""Loads a member of the pool: its policy for each side, by the side's name."""


class Opponents:
    """The members that play in the vectors of one process, loaded when they are first drawn.

    A member that is no longer in the pool, and plays in no vector any more, is forgotten. So memory
    holds as many members as a pool has, and those whose last games are under way.

    Args:
        sides: names of the sides, in the order of a vector's fragments.
    """

    def __init__(self, load: LoadMember, sides: list[str], device: torch.device) -> None:
        self._load, self._sides, self._device = load, sides, device
        self._acts: dict[int, list[Callable[[Obs, Tensor], Tensor]]] = {}  # by member and side
        self.pool = Pool()

    def forget(self, pool: Pool, vectors: list[VectorEnv]) -> None:
        """Take a new pool, and forget members that play no more."""
        if pool is self.pool:
            return
        self.pool, kept = pool, set(pool.members)
        for vector in vectors:
            if vector.seats is not None:
                kept |= vector.seats.in_use()
        self._acts = {member: acts for member, acts in self._acts.items() if member in kept}

    def prepare(self, vectors: Iterable[VectorEnv]) -> None:
        """Load the members that play in episodes under way."""
        for vector in vectors:
            for member in () if vector.seats is None else vector.seats.in_use():
                self._act_of(member)

    def begin(
        self, vector: VectorEnv, i: int, fragment: Fragment, noise: Tensor
    ) -> Callable[[int], None]:
        """Return a function that replaces the actions of row t of those whom members play.

        Args:
            i: the side whose rows the fragment has.
            noise: `[T, n * size, draws]`, of the learned policy.
        """
        seats = vector.seats
        assert seats is not None
        rows_of: list[tuple[int, Tensor]] = []
        version = -1

        def act(t: int) -> None:
            nonlocal rows_of, version
            if version != seats.version:
                rows_of, version = seats.played_by_members(i), seats.version
            for member, rows in rows_of:
                obs = each(lambda o, rows=rows: o[t].index_select(0, rows), fragment.obs)
                action = self._act_of(member)[i](obs, noise[t].index_select(0, rows))
                fragment.action[t].index_copy_(0, rows, action)

        return act

    def _act_of(self, member: int) -> list[Callable[[Obs, Tensor], Tensor]]:
        if member not in self._acts:
            loaded = self._load(self.pool, member)
            self._acts[member] = [
                act_for(of.module.to(self._device), of.spec, of.network)
                for of in (loaded[side] for side in self._sides)
            ]
        return self._acts[member]
