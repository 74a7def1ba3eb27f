"""The training loop: collect, learn, publish, report, save, stop. Parts: `rank.py` builds them."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.batch import Fragment
from headrace.collectors.api import Collected, Collector, Say
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import Ranks, gather_json
from headrace.envs.api import Episode
from headrace.envs.changes import EnvChange
from headrace.errors import RanksChangedError
from headrace.leagues.league import League
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.training.counters import Counters
from headrace.training.rejoin import STAYS, Handover, Iteration, LeavingError, OfOneRank, agree
from headrace.training.saver import Saver


@dataclass
class Loop:
    """The training loop of a rank, and its parts.

    Every rank runs this loop, and all take the same decisions.

    Attributes:
        evaluate: told after each update whether it was the last; returns metrics if an evaluation
            has ended.
        on_update: gets all metrics of an update. Its changes of environments, if the loop
            `may_change_envs`, are those of rank 0 on all ranks.
        say: receives messages for the user.
        iteration: of a rank that takes the place of another one: as it was agreed on.
        handover: says when this process is to leave its rank.
    """

    run: RunConfig
    collector: Collector
    learner: Learner
    counters: Counters
    meter: Meter
    ranks: Ranks
    saver: Saver
    evaluate: Callable[[bool], dict[str, float]]
    on_update: Callable[[dict[str, float]], list[EnvChange]]
    say: Say
    may_change_envs: bool = False
    league: League | None = None
    iteration: Iteration = field(default_factory=Iteration)
    handover: Handover = STAYS

    def __post_init__(self) -> None:
        self._seconds = 0.0
        self._collected: Collected | None = None  # the batch in hand, not learned from
        self._batch: dict[str, Fragment] | None = None  # the same, as learners have it
        self._changes: list[EnvChange] = []  # that not all ranks know yet

    def train(self) -> None:
        """Train until `Counters.is_done`, or until a rank is told to stop.

        Raises:
            NonFiniteError: a gradient was NaN or infinite; nothing is saved after that.
            EnvError, WorkerError: from the collector; nothing is saved after that either.
            LeavingError: the handover is due; nothing is saved, since the others go on.
            RankError: another rank failed, or its parameters differ.
        """
        self._publish()
        if not self.ranks.is_successor:
            self.iteration.ledger_before = self.counters.ledger
        while True:
            try:
                while not self._is_done() and self._iterate():
                    pass
                self._end()
                break
            except RanksChangedError as error:
                self._rejoin(error)

    def _end(self) -> None:
        self._begin_iteration()
        self.collector.halt()
        self.counters.ledger = self.iteration.count(gather_json(self.ranks, self._report(None)))
        self.saver.save()
        self.meter.lap("checkpoint")

    def _iterate(self) -> bool:
        """Collect a batch, unless there is one, and learn from it; False: the run is to stop."""
        collector, learner, counters, meter = (
            self.collector, self.learner, self.counters, self.meter
        )  # fmt: skip
        self._begin_iteration()
        leaves = self._collected is None and self.handover.is_due()
        if self._collected is None and not leaves:
            self._collected = collector.collect()
            meter.lap("wait")
        collected = self._collected
        reports = gather_json(self.ranks, self._report(collected) | {"leaves": leaves})
        meter.lap("ranks")
        counters.ledger = self.iteration.count(reports)
        if leaves:
            returns = {name: each.return_so_far for name, each in learner.learners.items()}
            raise LeavingError(OfOneRank(collector.state(), returns))
        if any(each["leaves"] for each in reports):
            raise RanksChangedError("A rank has left, and another process takes its place.")
        if collected is None or not all(each["is_complete"] for each in reports):
            # A rank was told to stop: no rank learns from this batch.
            if collected is not None:
                collector.discard_batch()
            self._collected = self._batch = None
            return False
        env_steps = counters.env_steps
        counters.add(reports)
        self._seconds = sum(reports[0]["seconds"].values())
        if self._batch is None:
            self._batch = learner.assemble(collected.fragments)
            collector.release_batch(more=not self._is_done())
        batch = self._batch
        metrics = learner.update(batch, env_steps, counters.env_steps - env_steps)
        self._collected = self._batch = None
        self._publish()

        self.saver.check_finite(metrics, batch)
        if self.league is not None:
            episodes = [Episode(*each) for report in reports for each in report["episodes"]]
            metrics |= self.league.after_update(episodes, counters.env_steps)
            collector.set_pool(self.league.pool)
        if self.run.check_ranks and learner.version % self.run.check_ranks == 0:
            learner.check_equal()
        metrics |= self.evaluate(self._is_done())
        meter.lap("eval")
        self._changes += self.on_update(metrics | collected.metrics | _rank_metrics(reports))
        meter.lap("log")
        if self.may_change_envs:
            counters.change_envs(gather_json(self.ranks, self._changes)[0])
            self._changes.clear()
            collector.change_envs(counters.env_changes)
            meter.lap("ranks")
        if reports[0]["save_is_due"]:
            self.saver.save()
            meter.lap("checkpoint")
        return True

    def _rejoin(self, error: RanksChangedError) -> None:
        """Go on with the ranks that are left and the successors of the others."""
        began = time.monotonic()
        try:
            agreed, losses = agree(
                self.ranks, self.learner, self.counters, self.league, self.iteration,
                self.saver.saved_version, error,
            )  # fmt: skip
        except RanksChangedError:  # lost ranks are not replaced; else a successor may be there
            self._save_alone()
            raise
        assert self.iteration.saved_version is not None
        self.saver.saved_version = self.iteration.saved_version
        if agreed.is_learned and self._collected is not None:
            self._collected = self._batch = None
            self._publish()
        if self.league is not None:
            self.collector.set_pool(self.league.pool)
        self.collector.change_envs(self.counters.env_changes)
        self._seconds = 0.0  # as a successor has it: all must take the same decisions
        self.meter.lap("ranks")
        if self.ranks.rank == 0:
            after = f" after {time.monotonic() - began:.1f} s"
            self.say("\n".join(filter(None, [*losses, agreed.describe(after)])))

    def _save_alone(self) -> None:
        """Save what this rank has learned, before the job ends without another one."""
        if self.learner.version == self.iteration.version:  # the update is not finished
            self.counters.read(self.iteration.counters.to_json())
        self.ranks.go_alone()
        if self.saver.save_alone():
            steps = self.counters.env_steps
            self.say(f"What was learned from {steps:,} env steps is saved.")

    def _begin_iteration(self) -> None:
        """Begin to count, unless this iteration is made again after a loss."""
        if self.learner.version > self.iteration.version:
            self.iteration.begin(self.learner.version, self.counters)

    def _publish(self) -> None:
        self.collector.publish(self.learner.policies, self.learner.version)
        self.meter.lap("publish")

    def _is_done(self) -> bool:
        return self.counters.is_done(self.run, self._seconds)

    def _report(self, collected: Collected | None) -> dict[str, Any]:
        """Return what all ranks must know of this rank's batch to decide alike, as plain data."""
        batch = collected or Collected([], 0)
        count = batch.num_episodes
        return {
            "is_complete": collected is not None,
            "env_steps": batch.env_steps,
            "agent_steps": batch.agent_steps,
            "episodes": batch.episodes,
            "num_episodes": len(batch.episodes) if count is None else count,
            "ledger": asdict(self.collector.ledger),
            "save_is_due": self.saver.is_due(),
            "evaluated": [self.counters.evaluated_at, self.counters.best_return],
            "seconds": self.meter.seconds(),
        }


def _rank_metrics(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each of several ranks in the spans in which ranks differ."""
    if len(reports) == 1:
        return {}
    return {
        f"rank{rank}/{span}_s": report["seconds"].get(span, 0.0)
        for rank, report in enumerate(reports)
        for span in ("wait", "learn", "replay", "allreduce", "ranks")
        if span != "replay" or span in report["seconds"]  # only algorithms with one have it
    }
