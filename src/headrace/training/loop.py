"""The training loop: collect, learn, publish, report, save, stop. Parts: `rank.py` builds them."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from headrace.collectors.api import Collected, Collector, Ledger
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import Ranks, gather_json
from headrace.envs.api import Episode
from headrace.envs.changes import EnvChange
from headrace.leagues.league import League
from headrace.learner.learner import Learner
from headrace.meter import Meter
from headrace.training.counters import Counters
from headrace.training.saver import Saver


def train(
    run: RunConfig,
    collector: Collector,
    learner: Learner,
    counters: Counters,
    meter: Meter,
    *,
    ranks: Ranks,
    saver: Saver,
    evaluate: Callable[[bool], dict[str, float]],
    on_update: Callable[[dict[str, float]], list[EnvChange]],
    may_change_envs: bool = False,
    league: League | None = None,
) -> None:
    """Train until `Counters.is_done`, or until a rank is told to stop.

    Every rank runs this loop, and all take the same decisions. After each update, `evaluate` is
    told whether it was the last, and returns metrics if an evaluation has ended; `on_update` gets
    all metrics. If it `may_change_envs`, the changes that it returns on rank 0 are made on all.

    Raises:
        NonFiniteError: a gradient was NaN or infinite; nothing is saved after that.
        EnvError, WorkerError: from the collector; nothing is saved after that either.
        RankError: another rank failed, or its parameters differ.
    """
    collector.publish(learner.policies, learner.version)
    meter.lap("publish")
    ledger_before, seconds = counters.ledger, 0.0
    while not counters.is_done(run, seconds):
        collected = collector.collect()
        meter.lap("wait")
        reports = gather_json(ranks, _report(collected, collector, meter, saver.is_due()))
        meter.lap("ranks")
        counters.ledger = sum((Ledger(**each["ledger"]) for each in reports), ledger_before)
        if collected is None or not all(each["is_complete"] for each in reports):
            # A rank was told to stop: no rank learns from this batch.
            if collected is not None:
                collector.discard_batch()
            break
        env_steps = counters.env_steps
        counters.add(reports)
        seconds = sum(reports[0]["seconds"].values())
        batch = learner.assemble(collected.fragments)
        collector.release_batch(more=not counters.is_done(run, seconds))
        metrics = learner.update(batch, env_steps, counters.env_steps - env_steps)
        collector.publish(learner.policies, learner.version)
        meter.lap("publish")

        saver.check_finite(metrics, batch)
        if league is not None:
            episodes = [Episode(*each) for report in reports for each in report["episodes"]]
            metrics |= league.after_update(episodes, counters.env_steps)
            collector.set_pool(league.pool)
        if run.check_ranks and learner.version % run.check_ranks == 0:
            learner.check_equal()
        metrics |= evaluate(counters.is_done(run, seconds))
        meter.lap("eval")
        changes = on_update(metrics | collected.metrics | _rank_metrics(reports))
        meter.lap("log")
        if may_change_envs:
            counters.change_envs(gather_json(ranks, changes)[0])
            collector.change_envs(counters.env_changes)
            meter.lap("ranks")
        if reports[0]["save_is_due"]:
            saver.save()
            meter.lap("checkpoint")
    collector.halt()
    ledgers = gather_json(ranks, asdict(collector.ledger))
    counters.ledger = sum((Ledger(**each) for each in ledgers), ledger_before)
    saver.save()
    meter.lap("checkpoint")


def _report(
    collected: Collected | None, collector: Collector, meter: Meter, save_is_due: bool
) -> dict[str, Any]:
    """Return what all ranks must know of this rank's batch to decide alike, as plain data."""
    batch = collected or Collected([], 0)
    return {
        "is_complete": collected is not None,
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
        "episodes": batch.episodes,
        "num_episodes": len(batch.episodes) if batch.num_episodes is None else batch.num_episodes,
        "ledger": asdict(collector.ledger),
        "save_is_due": save_is_due,
        "seconds": meter.seconds(),
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
