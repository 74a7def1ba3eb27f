"""What is known of each run below a folder, from the ends of its files.

This file imports nothing heavy. Left out: how it is shown (`listing.py`).
"""

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import CheckpointError, RunDirError
from headrace.storage import run_dir as rundir
from headrace.storage.manifest import MANIFEST, read_manifest
from headrace.storage.metrics import (
    is_number,
    read_last_metrics,
    read_metrics,
    returns_by_policy,
)

if TYPE_CHECKING:
    from headrace.spec import Array

STATES = (
    "running",
    "vanished",
    "done",
    "failed",
    "stopped",
    "ended",
    "imported",
    "pulled",
    "damaged",
)
WINDOW = 100
"""Episodes of a mean return: `headrace.collectors.api.WINDOW`, which would load torch."""
_NUM_SPEED_ROWS = 20
_SIGNS_OF_A_RUN = (".lock", "metrics.jsonl", "checkpoints")


@dataclass(frozen=True)
class RunRecord:
    """What a run's directory says of the run.

    Attributes:
        dir: the run's directory.
        env: name of the environment; "" if `config.json` is damaged, as for `algo`.
        seed: None if `config.json` is damaged.
        env_steps: env steps so far; `total_env_steps`: the goal.
        mean_return: mean return of the last (up to) 100 training episodes; None before the first.
        mean_return_by_policy: the same of each policy, where there are several; else {}.
        best_return: mean return of the best evaluation; None without `--eval-every`.
        env_steps_per_s: mean speed of the last 20 updates (env steps/s); None before the second.
        state: `running`; `vanished`: its process is gone and wrote no end; `done`: it reached
            `total_env_steps` or `stop_at_return`; `failed`: an error ended it (`rundir.error_of`);
            `stopped`: it can be resumed; `ended`: before its first checkpoint; `imported`: from
            another library, and not trained on; `pulled`: policies that somebody shared;
            `damaged`: a file cannot be read.
        written_at: when it was last written to (seconds since 1970).
        damage: reason why it is damaged; "" if it is not.
        settings: all settings, by name; {} if `config.json` is damaged.
    """

    dir: Path
    env: str = ""
    algo: str = ""
    seed: int | None = None
    env_steps: int = 0
    total_env_steps: int = 0
    mean_return: float | None = None
    mean_return_by_policy: Mapping[str, float] = field(default_factory=dict)
    best_return: float | None = None
    env_steps_per_s: float | None = None
    state: str = "damaged"
    written_at: float = 0.0
    damage: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def metrics(self) -> "dict[str, Array]":
        """Return all metrics as columns of `[updates]` float64; NaN where an update has none.

        Raises:
            RunDirError: no update has been made there, or the file is too large to be one.
        """
        from headrace.tools.runs.curves import column  # loads NumPy

        rows = read_metrics(self.dir)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: column(rows, name) for name in names}


def load_runs(folder: str | Path = "runs") -> list[RunRecord]:
    """Return the runs below a folder, or the one that it is, ordered by directory.

    A directory is a run if it has a `config.json` as runs write it. Hidden folders and links to
    folders are left out, and so is what lies inside a run.

    Raises:
        RunDirError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunDirError(
            f"There is no directory {folder}.\nExpected a folder with runs, or a run's directory, "
            "as `headrace train` makes them (see runs/)."
        )
    return sorted(_runs_below(folder), key=lambda record: record.dir)


def _runs_below(folder: Path) -> Iterator[RunRecord]:
    def warn(error: OSError) -> None:
        warnings.warn(f"{error.filename} cannot be read: {error.strerror}.", stacklevel=2)

    for name, folders, files in os.walk(folder, onerror=warn):
        path = Path(name)
        if "config.json" in files and (record := _read(path)) is not None:
            yield record
            folders.clear()
        else:
            folders[:] = [each for each in folders if not each.startswith(".")]


def _read(path: Path) -> RunRecord | None:
    """Read a run; None if the directory is something else that has a `config.json`."""
    try:
        settings = rundir.read_config(path)["settings"]
    except RunDirError as error:
        if not any((path / name).exists() for name in _SIGNS_OF_A_RUN):
            return None
        return RunRecord(path, written_at=rundir.last_written(path), damage=str(error))
    config = {name: settings[name] for name in ("env", "algo", "seed")} | {"settings": settings}
    try:
        return RunRecord(path, **config, **_progress(path, settings))
    except (RunDirError, OSError) as error:
        written_at = rundir.last_written(path)
        return RunRecord(path, **config, written_at=written_at, damage=str(error))


def _progress(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that change as a run goes on; RunDirError, OSError."""
    goal = settings.get("total_env_steps")
    if not is_number(goal):
        raise RunDirError(f"{path}/config.json is damaged: no usable total_env_steps.")
    rows = read_last_metrics(path)
    last = {name: value for name, value in rows[-1].items() if is_number(value)} if rows else {}
    saved = [each.name.removeprefix("step_") for each in path.glob("checkpoints/step_*")]
    steps = [int(last.get("env_steps", 0)), *(int(each) for each in saved if each.isdecimal())]
    shared = read_manifest(path) if (path / MANIFEST).is_file() else {}
    steps += [of for of in [shared.get("env_steps")] if isinstance(of, int)]
    state = _state(path, max(steps) >= goal or _is_good(last, settings), bool(saved))
    if shared:
        state = "pulled"
    elif state in ("done", "stopped") and not rows and _is_imported(path):
        state = "imported"
    return {
        "env_steps": max(steps),
        "total_env_steps": int(goal),
        "mean_return": last.get("mean_return"),
        "mean_return_by_policy": returns_by_policy(last),
        "best_return": _best_return(path),
        "env_steps_per_s": _speed(rows[-_NUM_SPEED_ROWS:]),
        "state": state,
        "written_at": rundir.last_written(path),
    }


def _is_imported(path: Path) -> bool:
    """Return whether the newest checkpoint is of another library's training; CheckpointError.

    Policies alone are of Lightning's, by `headrace.lightning.write_run`.
    """
    manifest = read_manifest(max(path.glob("checkpoints/step_*")))
    return "imported" in manifest or "counters" not in manifest


def _is_good(last: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether the mean return is the one at which the run was to stop."""
    wanted = settings.get("stop_at_return")
    is_full = last.get("episodes", 0) >= WINDOW
    return is_number(wanted) and is_full and last.get("mean_return", -math.inf) >= wanted


def _state(path: Path, is_done: bool, is_saved: bool) -> str:
    if rundir.is_locked(path):
        return "running"
    if rundir.is_marked(path):  # asked again: a process may have begun since
        return "running" if rundir.is_locked(path) else "vanished"
    if is_done:
        return "done"
    if rundir.error_of(path):
        return "failed"
    return "stopped" if is_saved else "ended"


def _best_return(path: Path) -> float | None:
    """Return the mean return of the evaluation whose policy is in `best/`; CheckpointError."""
    while saved := sorted(path.glob("best/step_*")):
        try:
            counters = read_manifest(saved[-1]).get("counters")
        except CheckpointError:
            if saved[-1].exists():
                raise
            continue  # a better one has taken its place meanwhile
        best = counters.get("best_return") if isinstance(counters, dict) else None
        return best if is_number(best) else None
    return None


def _speed(rows: list[dict[str, Any]]) -> float | None:
    """Return env steps/s from the end of the first row to that of the last one."""
    steps, seconds = 0, 0.0
    for before, row in itertools.pairwise(rows):
        passed, rate = row["env_steps"] - before["env_steps"], row.get("env_steps_per_s")
        if is_number(rate) and rate > 0 and passed > 0:
            steps, seconds = steps + passed, seconds + passed / rate
    return steps / seconds if seconds else None
