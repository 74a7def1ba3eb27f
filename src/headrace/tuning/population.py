"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846).

All members of a population train at the same time, in turns if there are more than cores. Each few
env steps they are measured, and each of the worst quarter is replaced by a copy of one of the best
quarter, with other values of its settings. A copy is a trial of its own: its directory begins as
the other's, so it holds one whole run, whose settings are schedules by points
(`algos/schedules.py`). Training with these schedules from the start makes the same run. Left out:
running the trials (`study.py`).
"""

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.algos.schedules import SCHEDULES, points_of, schedules_of, value_at
from headrace.config.settings import Settings
from headrace.errors import ConfigError
from headrace.storage.files import flush_dir, write_flushed
from headrace.tuning.plan import Plan, Trial
from headrace.tuning.pruning import LEAST_BATCHES
from headrace.tuning.space import Parameter, Space

NUM_GENERATIONS = 10
_SHARE = 4  # one of so many is replaced
_FACTORS = (0.8, 1.25)
_RESAMPLED = 0.25
"""Probability that a value is drawn anew, and not multiplied. One of 0 always is."""


def make_generations(total: int, ready: int, batch: int, learning_starts: int = 0) -> list[int]:
    """Return the env steps at which members are measured; the last is `total`.

    Args:
        ready: env steps between them, at least a batch; 0: a tenth of all, at least five batches.
        learning_starts: env steps without learning, after which the first come.

    Raises:
        ConfigError: there would be one generation only.
    """
    each = max(ready, batch) if ready else max(-(-total // NUM_GENERATIONS), LEAST_BATCHES * batch)
    found = [at for at in range(each, total, each) if at >= 2 * learning_starts]
    if not found:
        raise ConfigError(
            f"total_env_steps={total}, and a population is compared every {each:,} env steps (a "
            f"tenth of all, or {LEAST_BATCHES} batches of {batch:,} if these are more): nothing "
            f"would be replaced.\nUse --ready-env-steps {batch}, for example, or more "
            "--total-env-steps."
        )
    return [*found, total]


def population_space(space: Space, algo: Any, *, is_default: bool) -> Space:
    """Return what a population varies: settings that may change during a run.

    Args:
        algo: the settings of the algorithm.
        is_default: whether the space came with the algorithm; then gamma and settings that cannot
            change are left out, else the latter are refused.

    Raises:
        ConfigError: nothing is left, or a setting cannot change.
    """
    able = schedules_of(algo)
    if is_default:
        space = {name: each for name, each in space.items() if name in able and name != "gamma"}
        if not space:
            raise ConfigError(
                f"All settings that a population could vary ({', '.join(able)}) are fixed.\n"
                "Leave one of them out, such as --lr."
            )
    if fixed := [name for name in space if name not in able]:
        raise ConfigError(
            f"{', '.join(fixed)}: a population varies settings that may change during a run, of "
            f"this algorithm {', '.join(able)}.\nTake others out of the space."
        )
    return {name: _as_range(parameter) for name, parameter in space.items()}


def _as_range(parameter: Parameter) -> Parameter:
    """Return the range of a choice of numbers: values are multiplied, and leave the options."""
    if parameter.kind != "choice" or len(set(parameter.of)) == 1:
        return parameter
    return replace(parameter, kind="uniform", of=(min(parameter.of), max(parameter.of)))


@dataclass(frozen=True)
class Exchange:
    """A member that is replaced, and the one that is copied."""

    loser: Trial
    donor: Trial


def is_exchanged(plan: Plan, trials: Sequence[Trial], generation: int) -> bool:
    """Return whether a generation's exchange is done: a member has gone on from its rung."""

    def has_gone_on(trial: Trial) -> bool:
        rung = trial.rung(len(plan.seeds))
        return rung > generation or (rung == generation and trial.state in ("running", "failed"))

    return any(map(has_gone_on, trials))


def exchanges(plan: Plan, trials: Sequence[Trial], generation: int) -> list[Exchange]:
    """Return the exchanges of a generation, before any of its members goes on.

    Each member that has not failed must have reached the generation's rung. One that failed is
    replaced as well. If some exchanges have been made, the answer is still the same.
    """
    replaced_before = {t.replaces for t in trials if t.born < generation}
    members = [t for t in trials if t.born < generation and t.number not in replaced_before]
    failed = [t for t in members if t.state == "failed"]
    there = [t for t in members if t.state != "failed" and t.rung(len(plan.seeds)) >= generation]
    order = sorted(there, key=lambda t: (-_score(plan, t, generation), t.number))
    count = max(1, len(order) // _SHARE) if len(order) > 1 else len(order)
    best, worst = order[:count], order[count:][-count:]
    rng = np.random.default_rng([plan.seed, generation])
    found = [Exchange(loser, best[int(rng.integers(count))]) for loser in failed if best]
    for loser in worst:
        donor = best[int(rng.integers(count))]
        if _score(plan, loser, generation) < _score(plan, donor, generation):
            found.append(Exchange(loser, donor))
    return found


def _score(plan: Plan, trial: Trial, rung: int) -> float:
    return trial.scores(plan.metric, len(plan.seeds))[rung]


def child_of(
    exchange: Exchange, number: int, plan: Plan, space: Space, settings: Settings, generation: int
) -> Trial:
    """Return the trial that replaces another: a copy of the donor with other values.

    Args:
        settings: of the donor's runs.
    """
    donor, env_steps = exchange.donor, plan.rungs[generation]
    rng = np.random.default_rng([plan.seed, number, generation])
    changes, values = dict(donor.changes), dict[str, Any]()
    for name, parameter in space.items():
        points = points_of(settings.algo, name, settings.run.schedule_env_steps)
        now = value_at(points, env_steps)
        if rng.random() < _RESAMPLED or not now:  # 0 times a factor is 0
            new = parameter.at(float(rng.random()))
        else:
            new = parameter.times(now, _FACTORS[int(rng.integers(2))])
        before = [list(point) for point in points if point[0] < env_steps]
        changes.pop(name, None)
        changes[SCHEDULES[name]] = [*before, [float(env_steps), now], [float(env_steps), new]]
        values[name] = new
    measured = [dict(rung) for rung in donor.measured[: generation + 1]]
    return Trial(
        number, changes, values, "waiting", measured=measured, parent=donor.number,
        replaces=exchange.loser.number, born=generation,
    )  # fmt: skip


def copy_run(source: Path, target: Path) -> None:
    """Copy a run's directory, whole or not at all. Its checkpoints, which never change, are linked.

    Where the disk has no links, they are copied.
    """
    unfinished = target.with_name(f".{target.name}.copy")
    for old in (unfinished, target):
        if old.exists():  # of a process that was killed
            shutil.rmtree(old)
    unfinished.mkdir(mode=0o700)
    folders = [unfinished]
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        to, is_saved = unfinished / name, name.parts[0] == "checkpoints"
        if path.is_dir():
            to.mkdir(mode=0o700)
            folders.append(to)
        elif path.name in (".lock", ".running") or (is_saved and _linked(path, to)):
            continue
        else:
            write_flushed(to, path.read_bytes())
    for folder in folders:
        flush_dir(folder)
    unfinished.rename(target)
    flush_dir(target.parent)


def _linked(path: Path, to: Path) -> bool:
    """Link a file to another name; False if the disk has no links, or no more for this file."""
    try:
        to.hardlink_to(path)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            return False
        raise
    return True


def describe_replay(algo: Any) -> str:
    """Return what becomes of the replay in a copy; "" without one."""
    if not hasattr(algo, "save_replay"):
        return ""
    return "its replay is linked" if algo.save_replay else "its replay is filled anew"


def lineage(trial: Trial, trials: Sequence[Trial], plan: Plan) -> list[tuple[int, int]]:
    """Return which trial a copy went on from, and that one, and so on: (number, env steps)."""
    found = []
    while trial.parent >= 0:
        found.append((trial.parent, plan.rungs[trial.born]))
        trial = trials[trial.parent]
    return found


def schedules_of_copy(trial: Trial) -> dict[str, Any]:
    """Return the settings by which the run of a copy goes on: {} if the trial is no copy."""
    if trial.parent < 0:
        return {}
    return {name: trial.changes[name] for name in SCHEDULES.values() if name in trial.changes}
