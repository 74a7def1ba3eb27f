"""Counters of a run: env steps, episodes, and the ledger. Checkpoints hold them."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from headrace.collectors.api import WINDOW, Ledger
from headrace.config.run_config import RunConfig
from headrace.envs.api import Episode
from headrace.envs.changes import Changes, EnvChange, record
from headrace.storage.checkpoint import Section

_WINDOWS = ("recent_returns", "recent_lengths", "recent_by_policy")


@dataclass
class Counters:
    """Progress of a run, over all ranks, and the changes of its environments."""

    env_steps: int = 0
    episodes: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    evaluated_at: int = 0
    best_return: float | None = None
    least_return: float | None = None
    greatest_return: float | None = None
    recent_returns: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    recent_by_policy: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    agent_steps: int = 0
    env_changes: Changes = ()

    def change_envs(self, new: Iterable[Sequence[Any]]) -> None:
        """Record changes of the environments, which may come from JSON; see `changes.record`."""
        self.env_changes = record(self.env_changes, (EnvChange(*each) for each in new))

    def add(self, reports: list[dict[str, Any]]) -> None:
        """Count a batch, by the reports of all ranks."""
        for report in reports:
            self.env_steps += report["env_steps"]
            self.agent_steps += report["agent_steps"]
            self.episodes += report["num_episodes"]
        for episode in sorted(Episode(*each) for report in reports for each in report["episodes"]):
            total = episode.total_reward
            known = [r for r in (self.least_return, self.greatest_return) if r is not None]
            self.least_return, self.greatest_return = min([total, *known]), max([total, *known])
            self.recent_returns.append(total)
            self.recent_lengths.append(episode.num_steps)
            if episode.by_policy:
                self.recent_by_policy.append(list(episode.by_policy))
        self.evaluated_at, self.best_return = reports[0]["evaluated"]  # rank 0 evaluates

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last (up to) 100 finished training episodes."""
        return _mean(self.recent_returns)

    @property
    def mean_length(self) -> float | None:
        """Mean length of the same episodes, in env steps."""
        return _mean(self.recent_lengths)

    @property
    def mean_by_policy(self) -> list[float]:
        """Mean returns of each policy's agents in the same episodes; [] with one policy."""
        return [sum(each) / len(each) for each in zip(*self.recent_by_policy, strict=True)]

    def is_done(self, run: RunConfig, seconds: float = 0.0) -> bool:
        """Return whether the run reached its env steps, its time, or its mean return."""
        mean, goal = self.mean_return, run.stop_at_return
        full = len(self.recent_returns) == WINDOW
        return (
            0.0 < run.stop_after_s <= seconds
            or self.env_steps >= run.total_env_steps
            or (full and goal is not None and mean is not None and mean >= goal)
        )

    def section(self) -> Section:
        """Return the checkpoint's section of these counters."""
        return Section("counters", lambda: ({}, self.to_json()), lambda _, data: self._load(data))

    def copy(self) -> "Counters":
        """Return a copy that stays as it is."""
        windows = {name: getattr(self, name).copy() for name in _WINDOWS}
        return replace(self, ledger=replace(self.ledger), **windows)

    def to_json(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return asdict(self) | {name: list(getattr(self, name)) for name in _WINDOWS}

    def read(self, data: dict[str, Any]) -> None:
        """Take over what `to_json` returned."""
        windows = {name: deque(data[name], maxlen=WINDOW) for name in _WINDOWS if name in data}
        changes = tuple(EnvChange(*each) for each in data.get("env_changes", ()))
        parsed = {"ledger": Ledger(**data["ledger"]), "env_changes": changes}
        saved = Counters(**data | windows | parsed)
        for counter in fields(self):
            setattr(self, counter.name, getattr(saved, counter.name))

    def _load(self, data: dict[str, Any]) -> None:
        self.read(data)
        # Steps under way at the save are lost.
        self.ledger.lost = self.ledger.collected - self.ledger.remade - self.env_steps


def _mean(values: deque[Any]) -> float | None:
    return sum(values) / len(values) if values else None
