"""The loop, whole: collect, learn, publish, log, save, stop.

Left out: building the parts (`launch.py`), and everything that a part does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.collect.api import Collected, Collector, ShouldStop
from headrace.errors import NonFiniteError
from headrace.meter import Meter
from headrace.run.config import RunSettings
from headrace.run.learner import Learner

WINDOW = 100
"""`mean_return` is over so many of the last finished training episodes."""


@dataclass
class Counters:
    """How far a run has come; what of it a checkpoint must hold."""

    env_steps: int = 0
    episodes: int = 0
    lost_env_steps: int = 0
    restarts: int = 0
    evaluated_at: int = 0
    best_return: float | None = None
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, collected: Collected) -> None:
        """Count a batch."""
        self.env_steps += sum(int(f.valid.sum()) for f in collected.fragments)
        self.episodes += len(collected.episodes)
        for episode in sorted(collected.episodes):
            self.recent_returns.append(episode.total_reward)
            self.recent_lengths.append(episode.num_steps)

    @property
    def mean_return(self) -> float | None:
        """Over the last (up to) 100 finished training episodes."""
        return _mean(self.recent_returns)

    @property
    def mean_length(self) -> float | None:
        """Env steps, over the same episodes."""
        return _mean(self.recent_lengths)

    def done(self, run: RunSettings) -> bool:
        """Whether the run has its steps, or a full window has the wanted mean return."""
        mean, wanted = self.mean_return, run.stop_at_return
        full = len(self.recent_returns) == WINDOW
        solved = wanted is not None and mean is not None and full and mean >= wanted
        return solved or self.env_steps >= run.total_env_steps

    def to_json(self) -> dict[str, Any]:
        """Plain data; the inverse of `from_json`."""
        plain = asdict(self)
        return plain | {name: list(plain[name]) for name in ("recent_returns", "recent_lengths")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Counters":
        """Rebuild from `to_json`."""
        windows = {
            name: deque(data[name], maxlen=WINDOW) for name in ("recent_returns", "recent_lengths")
        }
        return cls(**data | windows)


def _mean(values: deque[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def train(
    run: RunSettings,
    collector: Collector,
    learner: Learner,
    counters: Counters,
    meter: Meter,
    *,
    stop: ShouldStop,
    evaluate: Callable[[], dict[str, float]],
    on_update: Callable[[dict[str, float]], None],
    save: Callable[[], None],
    save_is_due: Callable[[], bool],
) -> None:
    """Train until the first update at or past `run.total_env_steps`, the wanted return, or a stop.

    Args:
        run: how long.
        collector: brings batches.
        learner: learns from them.
        counters: go on from these, and are kept up to date.
        meter: of this process.
        stop: asked after each update, and by the collector between steps.
        evaluate: called after each update; gives more metrics, if an evaluation was due.
        on_update: called with the metrics of each update, to log them.
        save: writes a checkpoint; called once more at the end, and when `save_is_due`.
        save_is_due: asked after each update.

    Raises:
        NonFiniteError: a gradient was NaN or infinite; nothing is saved after that.
        EnvError, SamplerError: from the collector; nothing is saved after that either.
    """
    collector.publish(learner.policy, learner.version)
    meter.lap("publish")
    lost_before, restarts_before = counters.lost_env_steps, counters.restarts
    while not (counters.done(run) or stop()):
        collected = collector.collect()
        meter.lap("wait")
        counters.lost_env_steps = lost_before + collector.lost_env_steps
        counters.restarts = restarts_before + collector.restarts
        if collected is None:
            break
        progress = min(1.0, counters.env_steps / run.schedule_env_steps)
        metrics = learner.update(collected.fragments, progress)
        collector.publish(learner.policy, learner.version)
        meter.lap("publish")

        counters.add(collected)
        if metrics.pop("nonfinite"):
            raise NonFiniteError(
                f"Update {learner.version}: a gradient or parameter was NaN or infinite.\n"
                f"Losses: {metrics}\nNothing of this update is saved. Try a smaller lr or "
                "max_grad_norm, or --normalize-reward if rewards are large."
            )
        metrics |= evaluate()
        meter.lap("eval")
        on_update(metrics)
        meter.lap("log")
        if save_is_due():
            save()
            meter.lap("checkpoint")
    save()
    meter.lap("checkpoint")
