"""Who plays which seat of a game, in a league: the learned policies, or a member of a pool.

A *side* is the agents of one fragment. In each episode either the learned policies play all sides,
or they play one side, and a member of the pool plays the others. The draw has an address: the run's
seed, the environment and its episode. Left out: who is in the pool (`leagues/`), and how members
act (`envs/games/opponents.py`).
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.device_seeding import league_draws as draws_on_device
from headrace.seeding import league_draws
from headrace.spec import Agents, Array

MEMBER, SIDE = "seats.member", "seats.side"
"""In a vector's state: two attributes of its `Seats`."""
LATEST = -1
"""In place of a member: the learned policies, with their newest weights."""


@dataclass(frozen=True)
class Pool:
    """The members that opponents are drawn from, in episodes that begin within a fragment.

    Attributes:
        members: their ids.
        weights: of each, above 0.
        latest_ratio: share of episodes in which the learned policies play all sides.
        sources: of every member of the league, by id: where its policies are.
        data: of some members: their policies, for machines that cannot read the source.
    """

    members: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    latest_ratio: float = 1.0
    sources: tuple[str, ...] = ()
    data: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ends(self) -> tuple[float, ...]:
        """The ends of the members' parts of [0, 1)."""
        total = sum(self.weights)
        return tuple(end / total for end in itertools.accumulate(self.weights))


class Seats:
    """Who plays each side of n games.

    Args:
        sides: the agents of each fragment.
        most: members of a pool, at most.

    Attributes:
        member: `[n]` int64: who plays all sides but one; `LATEST`: the learned policies play all.
        side: `[n]` int64: the side that the learned policies play.
        version: changes with each draw on the host; of draws on a device nothing is known.
    """

    def __init__(
        self,
        seed: int,
        env_id: Array,
        sides: tuple[Agents, ...],
        most: int,
        device: torch.device | None = None,
    ) -> None:
        n = len(env_id)
        self._seed, self._env_id, self.sides = seed, env_id, sides
        self.member = torch.full((n,), LATEST, dtype=torch.int64, device=device)
        self.side = torch.zeros(n, dtype=torch.int64, device=device)
        self._ids = torch.from_numpy(np.asarray(env_id, np.int64)).to(self.member.device)
        # Always in the same memory, which a CUDA graph reads
        self._ends = torch.ones(most, dtype=torch.float64, device=device)
        self._members = torch.full((most,), LATEST, dtype=torch.int64, device=device)
        self._latest_ratio = torch.ones((), dtype=torch.float64, device=device)
        self.pool, self.version = Pool(), 0

    def set_pool(self, pool: Pool) -> None:
        """Draw from this pool from the next draw on."""
        if pool is self.pool:
            return
        count = len(pool.members)
        self._ends.fill_(2.0)  # never reached
        self._ends[:count] = torch.tensor(pool.ends, dtype=torch.float64)
        self._members[:count] = torch.tensor(pool.members, dtype=torch.int64)
        self._latest_ratio.fill_(pool.latest_ratio if count else 1.0)
        self.pool = pool

    def draw(self, e: int, episode: int) -> None:
        """Draw who plays an episode of game e."""
        uniform = league_draws(self._seed, self._env_id[e : e + 1], np.array([episode]))[:, 0]
        pool, member = self.pool, LATEST
        if pool.members and uniform[0] >= pool.latest_ratio:
            place = int(np.searchsorted(np.array(pool.ends), uniform[1], side="right"))
            member = pool.members[min(place, len(pool.members) - 1)]
        self.member[e] = member
        self.side[e] = min(int(uniform[2] * len(self.sides)), len(self.sides) - 1)
        self.version += 1

    def draw_where(self, begun: Tensor, episode: Tensor) -> None:
        """Draw who plays the episodes of the games that have `begun` one, `[n]` bool.

        The host does not wait for the device.
        """
        # Most steps begin no episode, and a new version has the rows of members found again.
        if begun.device.type == "cpu" and not begun.any():
            return
        uniform = draws_on_device(self._seed, self._ids, episode)
        place = torch.searchsorted(self._ends, uniform[1], right=True)
        member = self._members[place.clamp(max=len(self._members) - 1)]
        member = torch.where(uniform[0] >= self._latest_ratio, member, LATEST)
        side = (uniform[2] * len(self.sides)).long().clamp(max=len(self.sides) - 1)
        self.member.copy_(torch.where(begun, member, self.member))
        self.side.copy_(torch.where(begun, side, self.side))
        self.version += 1

    def learns(self, i: int) -> Tensor:
        """Return in which games the learned policies play side i: `[n]` bool."""
        return (self.member == LATEST) | (self.side == i)

    def played_by_members(self, i: int) -> list[tuple[int, Tensor]]:
        """Return the members that play agents of side i, and their rows among `[n * size]`."""
        member, side = self.member.cpu().numpy(), self.side.cpu().numpy()
        agents, found = np.arange(self.sides[i].size), []
        for each in np.unique(member[side != i]).tolist():
            if each != LATEST:
                games = np.flatnonzero((member == each) & (side != i))
                rows = (games[:, None] * len(agents) + agents).ravel()
                found.append((each, torch.from_numpy(rows).to(self.member.device)))
        return found

    def in_use(self) -> set[int]:
        """Return the members that play now."""
        return set(np.unique(self.member.cpu().numpy()).tolist()) - {LATEST}


def score(returns: Array, sizes: Array, side: Array) -> Array:
    """Return how one side's agents fared against all others: 1 better, 0.5 alike, 0 worse.

    Args:
        returns: `[k, sides]`, means over the agents of each side.
        sizes: `[sides]`, their numbers.
        side: `[k]`: whose score.
    """
    own = returns[np.arange(len(returns)), side]
    weights = sizes * (np.arange(len(sizes)) != side[:, None])
    ahead = own - (returns * weights).sum(-1) / np.maximum(weights.sum(-1), 1)
    # Equal returns may differ by the rounding of means.
    is_tied = np.abs(ahead) <= 1e-9 * np.maximum(1.0, np.abs(own))
    result: Array = np.where(is_tied, 0.5, np.where(ahead > 0, 1.0, 0.0))
    return result
