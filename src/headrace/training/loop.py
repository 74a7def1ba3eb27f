"""The loop, whole: collect, learn, publish, log, save, stop.

Left out: building the parts (`rank.py`), and everything that a part does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headrace.batch import Fragment
from headrace.collectors.api import WINDOW, Collected, Collector, Ledger
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import Ranks, gather_json
from headrace.envs.api import Episode
from headrace.errors import NonFiniteError
from headrace.learner.learner import Learns
from headrace.meter import Meter
from headrace.storage.sections import Section

_WINDOWS = ("recent_returns", "recent_lengths", "recent_by_policy")


@dataclass
class Counters:
    """How far a run has come; what of it a checkpoint must hold."""

    env_steps: int = 0
    episodes: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    evaluated_at: int = 0
    best_return: float | None = None
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_by_policy: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    agent_steps: int = 0

    def add(self, news: list[dict[str, Any]]) -> None:
        """Count a batch of all ranks."""
        self.env_steps += sum(of["env_steps"] for of in news)
        self.agent_steps += sum(of["agent_steps"] for of in news)
        episodes = sorted(Episode(*each) for of in news for each in of["episodes"])
        self.episodes += sum(of["num_episodes"] for of in news)
        for episode in episodes:
            self.recent_returns.append(episode.total_reward)
            self.recent_lengths.append(episode.num_steps)
            if episode.by_policy:
                self.recent_by_policy.append(list(episode.by_policy))

    @property
    def mean_return(self) -> float | None:
        """Over the last (up to) 100 finished training episodes."""
        return _mean(self.recent_returns)

    @property
    def mean_by_policy(self) -> list[float]:
        """Mean returns of each policy's agents, over the same episodes; [] if there is but one."""
        return [sum(of) / len(of) for of in zip(*self.recent_by_policy, strict=True)]

    @property
    def mean_length(self) -> float | None:
        """Env steps, over the same episodes."""
        return _mean(self.recent_lengths)

    def done(self, run: RunConfig, seconds: float = 0.0) -> bool:
        """Whether the run has its steps, has had its time, or a full window its mean return."""
        if 0.0 < run.stop_after_s <= seconds:
            return True
        mean, wanted = self.mean_return, run.stop_at_return
        full = len(self.recent_returns) == WINDOW
        solved = wanted is not None and mean is not None and full and mean >= wanted
        return solved or self.env_steps >= run.total_env_steps

    def section(self) -> Section:
        """Return what checkpoints hold of it."""
        return Section("counters", lambda: ({}, self._to_json()), lambda _, data: self._load(data))

    def _to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return plain | {name: list(plain[name]) for name in _WINDOWS}

    def _load(self, data: dict[str, Any]) -> None:
        windows = {name: deque(data[name], maxlen=WINDOW) for name in _WINDOWS if name in data}
        saved = Counters(**data | windows | {"ledger": Ledger(**data["ledger"])})
        for counter in fields(self):
            setattr(self, counter.name, getattr(saved, counter.name))
        # The steps that were under way then are lost.
        self.ledger.lost = self.ledger.collected - self.ledger.remade - self.env_steps


def _mean(values: deque[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _news(
    collected: Collected | None, collector: Collector, meter: Meter, save_is_due: bool
) -> dict[str, Any]:
    """What the other ranks need to know of this one's batch, to decide alike; plain data."""
    batch = collected or Collected([], 0)
    return {
        "whole": collected is not None,
        "env_steps": batch.env_steps,
        "agent_steps": batch.agent_steps,
        "episodes": batch.episodes,
        "num_episodes": len(batch.episodes) if batch.num_episodes is None else batch.num_episodes,
        "ledger": asdict(collector.ledger),
        "save_is_due": save_is_due,
        "seconds": meter.seconds(),
    }


def _by_rank(news: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics of what differs between ranks: how long each has waited, learned, and met others."""
    if len(news) == 1:
        return {}
    spans = ("wait", "learn", "allreduce", "ranks")
    return {
        f"rank{rank}/{span}_s": of["seconds"].get(span, 0.0)
        for rank, of in enumerate(news)
        for span in spans
    }


def train(
    run: RunConfig,
    collector: Collector,
    learner: Learns,
    counters: Counters,
    meter: Meter,
    *,
    ranks: Ranks,
    evaluate: Callable[[], dict[str, float]],
    on_update: Callable[[dict[str, float]], None],
    save: Callable[[], None],
    save_is_due: Callable[[], bool],
    write_down: Callable[[Fragment], str],
) -> None:
    """Train until the first update at or past what `Counters.done` asks for, or a stop.

    Args:
        run: how long.
        collector: brings batches.
        learner: learns from them.
        counters: go on from these, and are kept up to date.
        meter: of this process.
        ranks: of the job. All of them run this loop, and decide alike.
        evaluate: called after each update; gives more metrics, if an evaluation was due.
        on_update: called with the metrics of each update, to log them.
        save: writes a checkpoint; called on all ranks, once more at the end, and when `save_is_due`
            on rank 0.
        save_is_due: asked after each batch.
        write_down: keeps a batch that broke the arithmetic, and says where; called on all ranks.

    Raises:
        NonFiniteError: a gradient was NaN or infinite; nothing is saved after that.
        EnvError, WorkerError: from the collector; nothing is saved after that either.
        RankError: another rank failed, or its parameters are others.
    """
    collector.publish(learner.policy, learner.version)
    meter.lap("publish")
    before, seconds = counters.ledger, 0.0
    while not counters.done(run, seconds):
        collected = collector.collect()
        meter.lap("wait")
        news = gather_json(ranks, _news(collected, collector, meter, save_is_due()))
        meter.lap("ranks")
        counters.ledger = sum((Ledger(**of["ledger"]) for of in news), before)
        if collected is None or not all(of["whole"] for of in news):
            # One rank was told to stop: nobody learns from this batch.
            if collected is not None:
                collector.discard_batch()
            break
        progress = min(1.0, counters.env_steps / run.schedule_env_steps)
        counters.add(news)
        seconds = sum(news[0]["seconds"].values())
        batch = learner.take(collected.fragments)
        collector.release_batch(more=not counters.done(run, seconds))
        metrics = learner.update(batch, progress)
        collector.publish(learner.policy, learner.version)
        meter.lap("publish")

        if metrics.pop("nonfinite"):
            raise NonFiniteError(
                f"Update {learner.version}: a gradient or parameter was NaN or infinite.\n"
                f"Losses: {metrics}\nNothing of this update is saved. Try a smaller lr or "
                "max_grad_norm, or --normalize-reward if rewards are large.\n" + write_down(batch)
            )
        if run.check_ranks and learner.version % run.check_ranks == 0:
            learner.check_equal()
        metrics |= evaluate()
        meter.lap("eval")
        on_update(metrics | collected.metrics | _by_rank(news))
        meter.lap("log")
        if news[0]["save_is_due"]:
            save()
            meter.lap("checkpoint")
    collector.halt()
    ledgers = gather_json(ranks, asdict(collector.ledger))
    counters.ledger = sum((Ledger(**of) for of in ledgers), before)
    save()
    meter.lap("checkpoint")
