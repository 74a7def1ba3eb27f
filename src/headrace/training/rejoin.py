"""How ranks go on after the loss of another one.

The lost rank has a successor (`distributed/local_ranks.py`), which has learned nothing. All agree
on the *leader*, the rank that got furthest: one may have finished a collective in which another saw
the loss. They take over what it has learned, and its counters. Its update, if it is under way, is
made again without the gradient steps that were made: with the batches of the ranks that are left,
and one that the successor collects. Left out: who joins whom (`distributed/`), the loop
(`loop.py`).
"""

from dataclasses import dataclass, field
from typing import Any

from headrace.collectors.api import Ledger
from headrace.distributed.ranks import Ranks, gather_json
from headrace.leagues.league import League
from headrace.learner.learner import Learner
from headrace.storage.checkpoint import from_safetensors, to_safetensors
from headrace.training.counters import Counters


@dataclass
class Iteration:
    """What a rank has counted of the iteration under way, to count it again after a loss.

    Attributes:
        version: of the weights when it began; -1: this rank has not been in the loop yet.
        counters: at its beginning.
        ledgers: of each rank, as reported in it; [] before that.
        ledgers_before: the same of the iteration before.
        saved_version: of the weights in the newest checkpoint, as all ranks agreed; None: they have
            not.
        since: the ledger of this rank's collector up to which earlier counters have it: reports
            have what came since.
    """

    version: int = -1
    counters: Counters = field(default_factory=Counters)
    ledgers: list[Ledger] = field(default_factory=list)
    ledgers_before: list[Ledger] = field(default_factory=list)
    saved_version: int | None = None
    since: Ledger = field(default_factory=Ledger)

    def begin(self, version: int, counters: Counters) -> None:
        """Begin the iteration after the one under way."""
        self.version, self.counters = version, counters.copy()
        self.ledgers, self.ledgers_before = [], self.ledgers

    def lost(self, rank: int) -> Ledger:
        """Return what a rank that is lost has reported in this iteration: none of it counts."""
        if not self.ledgers:
            return Ledger()
        new = self.ledgers[rank]
        if self.ledgers_before:
            new -= self.ledgers_before[rank]
        new.lost = new.collected - new.remade
        return new

    def rejoin(self, rank: int, counters: Counters, *, is_learned: bool) -> None:
        """Go on from counters that have this iteration if it `is_learned`, else those before."""
        if counted := self.ledgers if is_learned else self.ledgers_before:
            self.since += counted[rank]
        self.ledgers = self.ledgers_before = []
        self.counters = counters.copy()


@dataclass(frozen=True)
class Agreement:
    """What all ranks go on from.

    Attributes:
        is_learned: whether the batch in this rank's hands is learned from.
        lost: env steps that the lost ranks had reported, and that nothing is learned from.
    """

    is_learned: bool
    lost: int


def agree(
    ranks: Ranks,
    learner: Learner,
    counters: Counters,
    league: League | None,
    iteration: Iteration,
    saved_version: int = -1,
) -> Agreement:
    """Take over the state of the rank that got furthest. Called on all ranks at once.

    Raises:
        RankLostError: another rank was lost meanwhile.
    """
    is_new = iteration.version < 0
    positions = gather_json(ranks, None if is_new else learner.positions)
    furthest = max(position for position in positions if position is not None)
    leader = positions.index(furthest)
    version = min(version for version, _ in furthest)
    new = [rank for rank, position in enumerate(positions) if position is None]

    state: bytes = b""
    data: dict[str, Any] = {}
    if ranks.rank == leader:
        is_over = version > iteration.version
        began = counters.copy() if is_over else iteration.counters.copy()
        lost = [Ledger() if is_over else iteration.lost(rank) for rank in new]
        began.ledger = sum(lost, began.ledger + Ledger(restarts=len(new)))
        tensors, values = learner.shared_state()
        state = to_safetensors(tensors)
        data = {
            "learner": values,
            "counters": began.to_json(),
            "league": league.section().state()[1] if league else {},
            "lost": sum(each.lost for each in lost),
            "saved_version": saved_version,
        }
    state, data = ranks.gather_bytes(state)[leader], gather_json(ranks, data)[leader]
    if ranks.rank != leader:
        learner.load_shared_state(from_safetensors(state), data["learner"])
        if league:
            league.section().load({}, data["league"])
    own = counters.evaluated_at, counters.best_return  # of rank 0, which evaluates
    counters.read(data["counters"])
    counters.evaluated_at, counters.best_return = own
    is_learned = version > iteration.version
    iteration.rejoin(ranks.rank, counters, is_learned=is_learned)
    iteration.saved_version = data["saved_version"]
    return Agreement(is_learned, data["lost"])
