"""Sums of priorities, by which rows are drawn in proportion to them.

Left out: what a priority is made of (`algos/off_policy.py`), and the rows (`buffer.py`).
"""

import itertools

import torch
from torch import Tensor, nn

from headrace.distributed.ranks import SINGLE_RANK, Ranks

_FAN_OUT = 64


class Priorities(nn.Module):
    """The priorities of the places of each environment's ring, and their sums in levels.

    Level 0 has the priorities, `[N, places]`; each level above has the sums of 64 neighbours, up to
    one sum for each environment. Numbers are float64, and sums are made of their parts anew each
    time: differences would add rounding up until a place of priority 0 is drawn.

    Args:
        num_envs: N, of this rank.
        num_places: of each environment.
    """

    greatest: Tensor

    def __init__(self, num_envs: int, num_places: int, ranks: Ranks = SINGLE_RANK) -> None:
        super().__init__()
        self._ranks = ranks
        self._num_levels, size = 0, num_places
        while True:
            size = -(-size // _FAN_OUT) * _FAN_OUT if size > 1 else 1
            sums = torch.zeros((num_envs, size), dtype=torch.float64)
            self.register_buffer(f"level{self._num_levels}", sums)
            self._num_levels += 1
            if size == 1:
                break
            size //= _FAN_OUT
        # New rows get the greatest priority so far.
        self.register_buffer("greatest", torch.ones((), dtype=torch.float64))

    @property
    def _levels(self) -> list[Tensor]:
        return [getattr(self, f"level{i}") for i in range(self._num_levels)]

    def sums(self) -> Tensor:
        """Return the sum of each environment, `[N]`."""
        return self._levels[-1][:, 0]

    def get(self, env: Tensor, place: Tensor) -> Tensor:
        """Return the priorities of places."""
        return self._levels[0][env, place]

    def set(self, env: Tensor, place: Tensor, priority: Tensor) -> None:
        """Write priorities `[B]`. Of several for one place the greatest counts."""
        levels = self._levels
        at, flat = env * levels[0].shape[1] + place, levels[0].view(-1)
        flat.index_fill_(0, at, 0.0).scatter_reduce_(0, at, priority, "amax")
        for below, above in itertools.pairwise(levels):
            place = place // _FAN_OUT
            parts = below.view(len(below), -1, _FAN_OUT)[env, place]
            above[env, place] = parts.sum(-1)

    def raise_greatest(self, priority: Tensor) -> None:
        """Note priorities `[B]` that were written, as all ranks do at the same time."""
        largest = priority.max() if len(priority) else torch.zeros_like(self.greatest)
        of_all = self._ranks.gather(largest).max()
        self.greatest.copy_(torch.maximum(self.greatest, of_all))

    def draw(self, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw `[B]` places in proportion to their priorities, one from each of B equal parts.

        Args:
            uniform: `[B]` numbers of [0, 1), float64.

        Returns:
            Environments, places, which of the B parts each is of, and the probabilities of a single
            draw; those of this rank.
        """
        sums = self._ranks.gather(self.sums()).flatten()
        ends = sums.cumsum(0)
        slot = torch.arange(len(uniform), device=uniform.device)
        mass = (slot + uniform) / len(uniform) * ends[-1]
        env = _first_above(ends.unsqueeze(0), mass.unsqueeze(0)).squeeze(0)
        mass = (mass - (ends - sums)[env]).clamp(min=0)
        env, mass, slot = own_rows(env, len(self.sums()), self._ranks, mass, slot)
        place = torch.zeros_like(env)
        for level in reversed(self._levels[:-1]):
            parts = level.view(len(level), -1, _FAN_OUT)[env, place]
            part_ends = parts.cumsum(-1)
            child = _first_above(part_ends, mass.unsqueeze(1)).squeeze(1)
            before = (part_ends - parts).gather(1, child.unsqueeze(1)).squeeze(1)
            mass, place = (mass - before).clamp(min=0), place * _FAN_OUT + child
        return env, place, slot, self.get(env, place) / ends[-1]


def own_rows(env: Tensor, num_envs: int, ranks: Ranks, *more: Tensor) -> tuple[Tensor, ...]:
    """Return the environments of this rank by their own numbers, and these entries of `more`.

    Args:
        env: among those of all ranks.
        num_envs: of each rank.
    """
    if ranks.size == 1:
        return env, *more
    own = env - ranks.rank * num_envs
    mine = (own >= 0) & (own < num_envs)
    return own[mine], *(column[mine] for column in more)


def _first_above(ends: Tensor, mass: Tensor) -> Tensor:
    """Return the first column whose cumulative sum exceeds each of `mass`, `[B, m]`.

    Where rounding leaves none, the last column that adds anything: never one of 0.

    Args:
        ends: cumulative sums of columns, `[B, n]`.
        mass: 0 or more, `[B, m]`.
    """
    above = torch.searchsorted(ends, mass, right=True)
    adds = torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1])) > 0
    last = ends.shape[1] - 1 - adds.flip(1).int().argmax(1)
    return torch.minimum(above, last.unsqueeze(1))
