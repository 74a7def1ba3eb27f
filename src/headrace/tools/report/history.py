"""The history of a run, read from its files."""

import contextlib
import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import CheckpointError, RunDirError
from headrace.meter import SPANS, Laps
from headrace.spec import Array
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.metrics import read_metrics, returns_by_policy, starts, total_seconds
from headrace.storage.timeline import read_timeline
from headrace.tools.runs.curves import Curve, column

_MAX_POINTS = 1000  # of a curve: with more rows each point is the mean of several


class Incident(NamedTuple):
    """Faults between two rows of metrics; env steps and wall time are those of the second."""

    env_steps: int
    wall_s: float
    counts: dict[str, int]


@dataclass(frozen=True)
class History:
    """The contents of a run's directory.

    Attributes:
        saved: counters in the newest complete checkpoint; {} without one.
        laps: timeline by process; {} without one.
        timeline_error: reason why the timeline cannot be read; "" if it can.
        error: what ended the last process, if an error did; else "".
    """

    run_dir: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    saved: dict[str, Any]
    laps: dict[str, Laps]
    timeline_error: str
    is_running: bool
    error: str

    def values(self, name: str) -> Array:
        """Return `[rows]` values of a metric; NaN where a row has none."""
        return column(self.rows, name)

    @cached_property
    def env_steps(self) -> Array:
        """`[rows]` env steps."""
        return self.values("env_steps")

    @cached_property
    def is_start(self) -> Array:
        """`[rows]`: True for the first row of each process."""
        return np.array(starts(self.rows), bool)

    @cached_property
    def wall_s(self) -> Array:
        """`[rows]` wall time, added up over all processes of the run."""
        return np.array(total_seconds(self.rows))

    def curve(self, name: str) -> Curve:
        """Return a metric where it is known."""
        values, env_steps = self.values(name), self.env_steps
        if name.startswith("eval_"):  # the weights may be older; old rows do not say so
            of_weights = self.values("eval_env_steps")
            env_steps = np.where(np.isfinite(of_weights), of_weights, env_steps)
        known = np.isfinite(values)
        return _binned(env_steps[known], values[known], np.ones(known.sum()))

    def speed(self) -> Curve:
        """Return env steps/s; a point of several rows is their steps / their time."""
        steps, took = self._steps_and_s()
        known = took > 0
        return _binned(self.env_steps[known], steps[known] / took[known], took[known])

    def mean_speed(self) -> float | None:
        """Return the mean env steps/s of the training, without starting up."""
        steps, took = self._steps_and_s()
        return float(steps.sum() / took.sum()) if took.sum() > 0 else None

    def _steps_and_s(self) -> tuple[Array, Array]:
        """Return `[rows]` env steps and `[rows]` seconds of updates; 0: unknown."""
        steps = np.diff(self.env_steps, prepend=0.0)
        rate = self.values("env_steps_per_s")
        known = (rate > 0) & (steps > 0)
        took = np.divide(steps, rate, out=np.zeros_like(steps), where=known)
        return np.where(known, steps, 0.0), took

    def seconds(self, role: str) -> tuple[Array, Array]:
        """Return the seconds by span of "learner" or "workers" in each of n intervals.

        Returns:
            `[n]` wall seconds at the end of each, and `[n, len(SPANS)]` seconds by span in it.
        """
        by_span = np.stack([self.values(f"seconds/{role}/{span}") for span in SPANS], axis=1)
        known = np.isfinite(by_span).any(axis=1)
        return self.wall_s[known], np.nan_to_num(by_span[known]).clip(0.0)

    @property
    def policies(self) -> list[str]:
        """Names of the policies if there are several, else []."""
        return list(returns_by_policy(self.rows[-1])) if self.rows else []

    @cached_property
    def ledger(self) -> dict[str, int]:
        """Counts of env steps and faults: the newest known."""
        ledgers = [_ledger(row) for row in self.rows if "ledger/collected" in row][-1:]
        saved = self.saved.get("ledger")
        if isinstance(saved, dict):
            ledgers.append({k: v for k, v in saved.items() if isinstance(v, int)})
        return max(ledgers, key=lambda ledger: ledger.get("collected", 0), default={})

    @cached_property
    def incidents(self) -> list[Incident]:
        """All faults that the rows show."""
        incidents, before = [], dict.fromkeys(("restarts", "dropped_episodes", "remade", "lost"), 0)
        for row, wall_s in zip(self.rows, self.wall_s, strict=True):
            if "ledger/collected" not in row:
                continue
            now = _ledger(row)
            counts = {k: now.get(k, 0) - v for k, v in before.items() if now.get(k, 0) > v}
            if counts:
                incidents.append(Incident(int(row["env_steps"]), float(wall_s), counts))
            before = {k: now.get(k, 0) for k in before}
        return incidents

    @property
    def began(self) -> float | None:
        """Start of the run (s since 1970), from the name of its first events file."""
        names = (path.name for path in self.run_dir.glob("tensorboard/events.out.tfevents.*"))
        matches = [re.match(r"events\.out\.tfevents\.(\d{19,20})\.", name) for name in names]
        return min((int(m[1]) / 1e9 for m in matches if m), default=None)

    @property
    def best(self) -> tuple[str, float] | None:
        """Kind and value of the best return so far; None without one."""
        for kind, name in (("evaluation", "eval_return"), ("mean return", "mean_return")):
            values = self.values(name)
            if np.isfinite(values).any():
                return kind, float(np.nanmax(values))
        return None


def read_history(run_dir: Path) -> History:
    """Read what a run has written so far; warn of a damaged timeline; RunDirError without a run."""
    config = rundir.read_config(run_dir)
    rows = read_metrics(run_dir)
    saved: dict[str, Any] = {}
    with contextlib.suppress(CheckpointError):  # no checkpoint yet
        saved = dict(checkpoint.newest(run_dir).manifest.get("counters") or {})
    laps, timeline_error = {}, ""
    try:
        laps = read_timeline(run_dir)
    except RunDirError as error:
        timeline_error = str(error)
        warnings.warn(f"{error} The report is without it.", stacklevel=2)
    is_running, ended_by = rundir.is_locked(run_dir), rundir.error_of(run_dir)
    return History(run_dir, config, rows, saved, laps, timeline_error, is_running, ended_by)


def _ledger(row: dict[str, Any]) -> dict[str, int]:
    return {
        name.removeprefix("ledger/"): int(value)
        for name, value in row.items()
        if name.startswith("ledger/") and isinstance(value, int | float)
    }


def _binned(env_steps: Array, values: Array, weights: Array) -> Curve:
    """Build a curve of at most `_MAX_POINTS` points, each the weighted mean of several rows."""
    count = len(values)
    if not count:
        return Curve(env_steps, values, values, values)
    cuts = np.linspace(0, count, min(count, _MAX_POINTS) + 1).astype(np.int64)
    begins = cuts[:-1]
    return Curve(
        env_steps[cuts[1:] - 1],
        np.add.reduceat(weights * values, begins) / np.add.reduceat(weights, begins),
        np.minimum.reduceat(values, begins),
        np.maximum.reduceat(values, begins),
    )
