"""How ranks go on after the loss of another one.

The lost rank has a successor (`distributed/local_ranks.py`), which has learned nothing. All agree
on the *leader*, the rank that got furthest: a loss may show in a collective that another rank has
finished. They take over what it has learned, and its counters. Its update, if it is under way, is
made again without the gradient steps that were made: with the batches of the ranks that are left,
and one that the successor collects. Left out: who joins whom (`distributed/`), the loop
(`loop.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from headrace.collectors.api import Ledger
from headrace.config.settings import Settings
from headrace.distributed.ranks import Ranks, gather_json
from headrace.errors import RankLostError, RanksChangedError
from headrace.leagues.league import League
from headrace.learner.learner import Learner
from headrace.spec import Array
from headrace.storage.checkpoint import from_safetensors, to_safetensors
from headrace.training.counters import Counters


def max_replaced(settings: Settings, device: str) -> int:
    """Return how many lost learners are replaced in 10 minutes, while the others go on.

    NCCL ends the process that has lost another.

    Args:
        device: of the learners, `cpu` or `cuda`.
    """
    run = settings.run
    is_gloo = run.backend == "gloo" or (run.backend == "auto" and device == "cpu")
    return run.max_worker_restarts if is_gloo and run.on_worker_loss == "restart" else 0


def may_move(settings: Settings) -> bool:
    """Return whether a rank can hand over what it has; rows of a replay would be left behind."""
    return settings.algorithm.data != "replay"


@dataclass(frozen=True)
class OfOneRank:
    """What only one rank has, of its environments; a process that leaves hands it over.

    Attributes:
        envs: their state, as `Collector.state` returns it.
        returns: `[envs]` discounted returns of each policy so far, for the normalization.
    """

    envs: Mapping[str, Array]
    returns: Mapping[str, Tensor]


class LeavingError(Exception):
    """This process leaves its rank, for another one to take its place."""

    def __init__(self, left: OfOneRank) -> None:
        super().__init__("this process leaves its rank")
        self.left = left


@dataclass(frozen=True)
class Handover:
    """How a rank passes from one process to another.

    Attributes:
        is_due: asked before each batch: whether this process is to leave.
        left: by the process whose place this one takes; None: it was lost, or there was none.
    """

    is_due: Callable[[], bool] = lambda: False
    left: OfOneRank | None = None


STAYS = Handover()


@dataclass
class Iteration:
    """The iteration under way, as a rank has counted it: after a loss it is counted again.

    Attributes:
        version: of the weights when it began; -1: this rank has not been in the loop yet.
        counters: at its beginning.
        ledgers: of each rank, as it was reported last.
        learned: env steps of each rank that are learned from, before this iteration.
        in_hand: env steps of each rank's batch of this iteration, once they are reported.
        ledger_before: of the run before this start, and of lost ranks.
        saved_version: of the weights in the newest checkpoint; None: not agreed yet.
        agreements: that this rank has taken over.
    """

    version: int = -1
    counters: Counters = field(default_factory=Counters)
    ledgers: list[Ledger] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    in_hand: list[int] = field(default_factory=list)
    ledger_before: Ledger = field(default_factory=Ledger)
    saved_version: int | None = None
    agreements: int = 0

    def begin(self, version: int, counters: Counters) -> None:
        """Begin the iteration after the one under way."""
        self.version, self.counters = version, counters.copy()
        self.learned, self.in_hand = self._learned_with(self.in_hand), []

    def count(self, reports: list[dict[str, Any]]) -> Ledger:
        """Count the reports of all ranks; return the ledger of the run."""
        self.ledgers = [Ledger(**each["ledger"]) for each in reports]
        self.in_hand = [each["env_steps"] for each in reports]
        return sum(self.ledgers, self.ledger_before)

    def without(self, lost: list[int], size: int, *, is_over: bool) -> dict[str, Any]:
        """Return the ledgers of all ranks after a loss, as plain data for `read`.

        What the lost ranks had reported, and nothing is learned from, is lost.

        Args:
            lost: the lost ranks, of `size`.
            is_over: whether this iteration's batches are learned from.
        """
        ledgers = list(self.ledgers) or [Ledger() for _ in range(size)]
        learned = self._learned_with(self.in_hand if is_over else []) or [0] * size
        before, steps = self.ledger_before + Ledger(restarts=len(lost)), 0
        for rank in lost:
            final = ledgers[rank]
            left = final.collected - final.remade - final.lost - learned[rank]
            before, steps = before + final + Ledger(lost=left), steps + left
            ledgers[rank], learned[rank] = Ledger(), 0
        return {
            "ledgers": [asdict(each) for each in ledgers],
            "learned": learned,
            "ledger_before": asdict(before),
            "lost": steps,
            "version": self.version,
            "agreements": self.agreements + 1,
        }

    def read(self, data: dict[str, Any], counters: Counters) -> None:
        """Take over what `without` returned on another rank, and counters of the same moment."""
        self.ledgers = [Ledger(**each) for each in data["ledgers"]]
        self.learned, self.in_hand = data["learned"], []
        self.ledger_before = Ledger(**data["ledger_before"])
        self.counters = counters.copy()
        self.version, self.agreements = data["version"], data["agreements"]
        self.saved_version = data["saved_version"]

    def _learned_with(self, more: list[int]) -> list[int]:
        if not (more and self.learned):
            return list(more or self.learned)
        return [a + b for a, b in zip(self.learned, more, strict=True)]


@dataclass(frozen=True)
class Agreement:
    """What all ranks go on from.

    Attributes:
        is_learned: whether the batch in this rank's hands is learned from.
        lost: env steps that the lost ranks had reported, and that nothing is learned from.
    """

    is_learned: bool
    lost: int

    def describe(self, after: str = "") -> str:
        """Return how the run goes on, in words; `after`: how long it took."""
        return (
            f"A new process has taken its place{after}; the others go on with all that they have "
            f"learned. Env steps lost: {self.lost:,}, and what was not reported yet."
        )


def agree(
    ranks: Ranks,
    learner: Learner,
    counters: Counters,
    league: League | None,
    iteration: Iteration,
    saved_version: int = -1,
    error: RanksChangedError | None = None,
) -> tuple[Agreement, list[str]]:
    """Take over the state of the rank that got furthest. Called on all ranks at once.

    Args:
        saved_version: of the weights in the newest checkpoint.
        error: why the ranks change; None: this rank has taken the place of another one.

    Returns:
        The agreement, and the losses in words: more ranks may be lost meanwhile.

    Raises:
        RankError: no successor came.
        RanksChangedError: `error`, if ranks are not replaced.
        RankLostError: nobody is left who has learned.
    """
    losses = []
    while True:
        if error is not None:
            learner.leave_ranks()
            losses.append(ranks.rejoin(error))
        try:
            if error is not None:
                learner.join_ranks()
            agreed = _agree(ranks, learner, counters, league, iteration, saved_version)
        except RankLostError as another:
            error = another
        else:
            if agreed is None:
                raise RankLostError("All ranks were lost that had learned something.")
            return agreed, losses


def _agree(
    ranks: Ranks,
    learner: Learner,
    counters: Counters,
    league: League | None,
    iteration: Iteration,
    saved_version: int,
) -> Agreement | None:
    is_new = iteration.version < 0
    # The loss may have come while they agreed: of those who got equally far, one that has taken
    # over what was agreed then knows best.
    progress = [learner.positions, iteration.agreements]
    positions = gather_json(ranks, None if is_new else progress)
    furthest = max(filter(None, positions), default=None)
    if furthest is None:
        return None
    leader, was_at = positions.index(furthest), iteration.version
    version = min(version for version, _ in furthest[0])
    new = [rank for rank, position in enumerate(positions) if position is None]

    state: bytes = b""
    data: dict[str, Any] = {}
    if ranks.rank == leader:
        is_over = version > iteration.version
        tensors, values = learner.shared_state()
        state = to_safetensors(tensors)
        data = iteration.without(new, ranks.size, is_over=is_over) | {
            "learner": values,
            "counters": (counters if is_over else iteration.counters).to_json(),
            "league": league.section().state()[1] if league else {},
            "saved_version": saved_version,
        }
    state, data = ranks.gather_bytes(state)[leader], gather_json(ranks, data)[leader]
    if ranks.rank != leader:
        learner.load_shared_state(from_safetensors(state), data["learner"])
        if league:
            league.section().load({}, data["league"])
    own = counters.evaluated_at, counters.best_return
    counters.read(data["counters"])
    if not is_new:  # rank 0, which evaluates, knows better than the leader
        counters.evaluated_at, counters.best_return = own
    iteration.read(data, counters)
    return Agreement(version > was_at, data["lost"])
