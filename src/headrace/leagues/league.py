"""The league of a run: its members, how the learned policies fare against them, and the pool.

Snapshots are files in the run's directory, `league/step_N/`, each as a checkpoint's policies are.
They are loaded by those who play them. All ranks count the same episodes, and so have the same
pool. Left out: how members act, and who is drawn (`collectors/opponents.py`, `envs/seats.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.collectors.api import LEAGUE_WINDOW
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import Ranks, gather_json
from headrace.envs.api import Episode
from headrace.envs.seats import Pool
from headrace.errors import CheckpointError, RunDirError
from headrace.leagues.members import with_policies
from headrace.seeding import derive
from headrace.storage.checkpoint import Section

FOLDER = "league"
"""The folder of snapshots in a run's directory."""
FIRST_RATING = 1200.0
_K = 16.0  # of Elo's ratings: the most that one game moves them
_MEMORY = 0.99  # of games: an older one counts less
_LEAST_WEIGHT = 1e-3  # of a member that always loses

Take = Callable[[int], Path]
"""Writes a snapshot of the policies as they are, after so many env steps; returns its directory."""


@dataclass
class Member:
    """A member's record.

    Attributes:
        source: a directory, or `random`; of a snapshot its name in the folder.
        env_steps: when it was taken; -1: it is of another run.
        games: against it, older ones counting less.
        score: of the learned policies in them, 1 for each game that was won.
        rating: by Elo's system.
    """

    source: str
    env_steps: int = -1
    games: float = 0.0
    score: float = 0.0
    rating: float = FIRST_RATING

    @property
    def mean_score(self) -> float:
        """The learned policies' mean score against it; before any game 0.5."""
        return (self.score + 1.0) / (self.games + 2.0)


@dataclass
class _Record:
    """What a checkpoint has of a league."""

    members: list[Member] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    rating: float = FIRST_RATING


class League:
    """The members of a run's league, on each of its ranks.

    Args:
        take: writes a snapshot; called on rank 0.
        sends_data: members' policies go with the pool, to machines that may not see the directory.
    """

    def __init__(
        self, run: RunConfig, run_dir: Path, ranks: Ranks, take: Take, *, sends_data: bool = False
    ) -> None:
        self._run, self._folder, self._ranks, self._take = run, run_dir / FOLDER, ranks, take
        self._sends_data = sends_data
        self._record = _Record([Member(source) for source in run.league_members])
        self._data: dict[int, bytes] = {}
        self._pool: Pool | None = None

    @property
    def members(self) -> Sequence[Member]:
        """All members, by their ids."""
        return self._record.members

    @property
    def pool(self) -> Pool:
        """The pool of the episodes that begin from now on."""
        if self._pool is None:
            record = self._record
            members = tuple(record.active)
            weights = tuple(self._weight(record.members[i]) for i in members)
            sources = tuple(map(self._path, record.members))
            pool = Pool(members, weights, self._run.latest_ratio, sources, self._data)
            if self._sends_data:
                pool = with_policies(pool, members)
                # Who was drawn in the last steps of a fragment is loaded in the next one.
                self._data = {i: data for i, data in pool.data.items() if i in members}
            self._pool = pool
        return self._pool

    def begin(self) -> None:
        """Take the first snapshot, unless the run has snapshots or takes none."""
        if self._run.snapshot_every > 0 and not self._snapshots():
            self._add(0)
        elif not self._record.active:
            self._choose()

    def after_update(self, episodes: Iterable[Episode], env_steps: int) -> dict[str, float]:
        """Count an update's episodes of all ranks, take a snapshot if one is due; return metrics.

        Of many episodes the last ones count: a collector on the device returns no others.
        """
        record, scores = self._record, list[float]()
        for episode in sorted(episodes)[-LEAGUE_WINDOW:]:
            if episode.match:
                member, _, score = episode.match
                self._count(record.members[int(member)], score)
                scores.append(score)
        if scores and self._run.opponents == "hard":
            self._pool = None  # the weights have changed
        every, snapshots = self._run.snapshot_every, self._snapshots()
        if every > 0 and snapshots and env_steps // every > snapshots[-1].env_steps // every:
            self._add(env_steps)
        mean = {"league_score": float(np.mean(scores))} if scores else {}
        return mean | {
            "league_rating": record.rating,
            "league_members": float(len(record.members)),
        }

    def section(self) -> Section:
        """Return the checkpoint's section."""
        return Section("league", lambda: ({}, asdict(self._record)), self._load)

    def _load(self, _: dict[str, Any], data: dict[str, Any]) -> None:
        members = [Member(**each) for each in data["members"]]
        self._record = _Record(members, list(data["active"]), data["rating"])
        self._pool = None
        for member in self._snapshots():
            if not Path(self._path(member)).is_dir():
                raise CheckpointError(
                    f"The snapshot {self._path(member)} of the league is gone, and episodes may be "
                    "under way with it.\nPut it back, or begin a new run."
                )

    def _snapshots(self) -> list[Member]:
        return [member for member in self._record.members if member.env_steps >= 0]

    def _path(self, member: Member) -> str:
        return str(self._folder / member.source) if member.env_steps >= 0 else member.source

    def _add(self, env_steps: int) -> None:
        """Take a snapshot; called on all ranks at once."""
        problem, name = "", ""
        if self._ranks.rank == 0:
            try:
                name = self._take(env_steps).name
            except OSError as error:
                problem = f"{error.strerror or error}"
        problem, name = gather_json(self._ranks, [problem, name])[0]
        if problem:
            raise RunDirError(
                f"The snapshot of the league after {env_steps:,} env steps could not be written to "
                f"{self._folder}: {problem}.\nMake room, and go on from the last checkpoint."
            )
        self._record.members.append(Member(name, env_steps, rating=self._record.rating))
        self._choose()

    def _choose(self) -> None:
        """Choose the members of the pool: the newest snapshot, and others by their weights."""
        members, size = self._record.members, self._run.league
        newest = [len(members) - 1] if self._snapshots() else []
        others = [i for i in range(len(members)) if i not in newest]
        count = min(len(others), size - len(newest))
        if count < len(others):
            rng = np.random.default_rng(derive(self._run.seed, "league", len(members)))
            weights = np.array([self._weight(members[i]) for i in others])
            others = rng.choice(others, count, replace=False, p=weights / weights.sum()).tolist()
        self._record.active = sorted([*others, *newest])
        self._pool = None

    def _weight(self, member: Member) -> float:
        """Return how often to draw a member: all alike, or those more often that win."""
        if self._run.opponents == "uniform":
            return 1.0
        # Prioritized fictitious self-play (Vinyals et al. 2019, doi:10.1038/s41586-019-1724-z)
        return max(_LEAST_WEIGHT, (1.0 - member.mean_score) ** 2)

    def _count(self, member: Member, score: float) -> None:
        record = self._record
        member.games = _MEMORY * member.games + 1.0
        member.score = _MEMORY * member.score + score
        expected = 1.0 / (1.0 + 10.0 ** ((member.rating - record.rating) / 400.0))
        change = _K * (score - expected)
        record.rating += change
        member.rating -= change
