"""What came out of a study: its best trial, tables, and `best.toml`.

Left out: the page (`page.py`).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.storage.files import write_whole
from headrace.storage.run_dir import writable
from headrace.storage.toml_text import toml_text
from headrace.tools.runs.statistics import bootstrap_interval
from headrace.tuning.plan import Plan, Trial
from headrace.tuning.population import lineage
from headrace.tuning.study import finalists, first_finalists, ranked

BEST = "best.toml"
MIN_FOR_INTERVAL = 3
"""Number of values that a bootstrap interval needs: of two, it has only their own two ends."""


@dataclass(frozen=True)
class Fresh:
    """What a trial reached with fresh seeds.

    Attributes:
        values: of the metric, by seed; None: it has none, or the run failed.
        score: mean score; -inf if a run failed.
        mean: of the values; None if one is missing.
        interval: 95 % bootstrap interval of the mean; None with fewer than three seeds.
    """

    values: tuple[float | None, ...]
    score: float
    mean: float | None
    interval: tuple[float, float] | None


def fresh_seeds(plan: Plan, trials: list[Trial]) -> list[int]:
    """Return the fresh seeds with which both the preset and the best trial have run.

    [] if the budget ended before there were two of several.
    """
    first = first_finalists(plan, trials)
    found = [seed for seed in plan.final_seeds if all(t.has_fresh(seed) for t in first)]
    return found if len(found) >= min(2, len(plan.final_seeds)) else []


def fresh_of(plan: Plan, trial: Trial, seeds: list[int]) -> Fresh | None:
    """Return what a trial reached with fresh seeds; None unless all of `seeds` have ended."""
    if not seeds or not all(map(trial.has_fresh, seeds)):
        return None
    measured = [trial.fresh.get(str(seed)) for seed in seeds]
    values = tuple(None if each is None else plan.metric.value(each) for each in measured)
    whole = [each for each in measured if each is not None]
    score = plan.metric.score(whole) if len(whole) == len(seeds) else -math.inf
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Fresh(values, score, None, None)
    return Fresh(values, score, sum(known) / len(known), _interval(tuple(known)))


def gain(mine: Fresh, theirs: Fresh) -> tuple[float, tuple[float, float] | None]:
    """Return how much more one trial reached than another, seed by seed: mean, 95 % interval."""
    differences = np.array(mine.values, float) - np.array(theirs.values, float)
    return float(differences.mean()), _interval(tuple(differences.tolist()))


def best_of(plan: Plan, trials: list[Trial]) -> Trial | None:
    """Return the best trial: by its fresh seeds, if it has been measured with them."""
    seeds = fresh_seeds(plan, trials)
    again = {t.number: fresh_of(plan, t, seeds) for t in finalists(plan, trials)}
    scores = {number: fresh.score for number, fresh in again.items() if fresh is not None}
    if scores:
        return trials[max(scores, key=lambda number: (scores[number], -number))]
    return next(iter(ranked(plan, trials)), None)


def best_first(plan: Plan, trials: list[Trial]) -> list[Trial]:
    """Return the trials with a score: the best one, then others as the search ranks them."""
    best = best_of(plan, trials)
    return sorted(ranked(plan, trials), key=lambda trial: trial is not best)


def unfinished(plan: Plan, trials: list[Trial]) -> list[str]:
    """Return what a study that was cut has not done, in sentences; [] if nothing is left."""
    states = ("running", "waiting") if plan.population else ("running",)
    begun = sum(trial.state in states for trial in trials)
    absent = max(0, plan.trials - len(trials)) * (not plan.population)
    again = finalists(plan, trials)
    runs = len(again) * len(plan.final_seeds)
    ended = sum(trial.has_fresh(seed) for trial in again for seed in plan.final_seeds)
    missing = runs - ended if ended or not (absent or begun) else 0  # else they come later
    parts = [f"{absent} of {plan.trials} trials have not begun"] if absent else []
    parts += [f"{begun} {'has' if begun == 1 else 'have'} begun and not ended"] if begun else []
    parts += [f"{missing} of {runs} runs with fresh seeds have not ended"] if missing else []
    return [f"Not finished: {', '.join(parts)}."] if parts else []


def rows(plan: Plan, trials: list[Trial]) -> list[dict[str, Any]]:
    """Return the table of trials as plain data, in the order of their numbers."""
    seeds = fresh_seeds(plan, trials)
    return [_row(plan, trial, seeds) for trial in trials]


def _row(plan: Plan, trial: Trial, seeds: list[int]) -> dict[str, Any]:
    count, metric = len(plan.seeds), plan.metric
    rung = trial.rung(count)
    measured = list(trial.measured[rung].values()) if rung >= 0 else []
    values = [metric.value(each) for each in measured]
    known = [value for value in values if value is not None]
    fresh = fresh_of(plan, trial, seeds)
    return {
        "number": trial.number,
        "state": trial.state,
        "env_steps": max((each["env_steps"] for each in measured), default=0),
        "value": sum(known) / len(known) if known and len(known) == len(values) else None,
        "fresh": None if fresh is None else fresh.mean,
        "fresh_interval": None if fresh is None else fresh.interval,
        "seconds": round(trial.seconds, 1),
        "reason": trial.reason,
        "is_preset": trial.is_preset,
        "values": trial.values,
    }


def describe(plan: Plan, trials: list[Trial], most: int = 10) -> str:
    """Format the best trials, the preset and the failures as text."""
    lines, order, seeds = [], best_first(plan, trials), fresh_seeds(plan, trials)
    shown = order[:most] + [t for t in order[most:] if t.is_preset]
    table = [heads(plan), *(cells(plan, trial, seeds) for trial in shown)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in table]
    if len(order) > len(shown):
        lines.append(f"and {len(order) - len(shown)} more")
    failed = [trial for trial in trials if trial.state == "failed"]
    lines += [f"{trial.name} failed: {trial.reason}" for trial in failed[:most]]
    if len(failed) > most:
        lines.append(f"and {len(failed) - most} more failed")
    return "\n".join([*lines, *verdict(plan, trials)])


def verdict(plan: Plan, trials: list[Trial]) -> list[str]:
    """Return the best trial against the preset, in sentences."""
    best = best_of(plan, trials)
    if best is None:
        return ["No trial was measured."]
    preset = next((trial for trial in trials if trial.is_preset), None)
    copied = [
        f"{env_steps:,} env steps of trial {n}" for n, env_steps in lineage(best, trials, plan)
    ]
    ancestry = [f"Trial {best.number} went on from {', from '.join(copied)}."] if copied else []
    seeds = fresh_seeds(plan, trials)
    mine = fresh_of(plan, best, seeds)
    if mine is None:
        row = _row(plan, best, seeds)
        value = plan.metric.describe(row["value"])
        early = "" if best.state == "whole" else f" after {row['env_steps']:,} env steps"
        return [f"Best: {best.name}, {plan.metric.title} {value}{early}.", *ancestry]
    lacking = len(plan.final_seeds) - len(seeds)
    cut = f" ({lacking} more have not ended)" if lacking else ""
    on = f"{_count(len(seeds), 'fresh seed')}{cut}"
    lines = [
        f"Best on {on}: {best.name}, {_fresh_words(plan, mine)}.",
        *ancestry,
    ]
    theirs = None if preset is None else fresh_of(plan, preset, seeds)
    if best is preset:
        return [*lines, "Tuning found nothing better than the preset."]
    if preset is not None and preset.state == "failed":
        lines.append("The preset failed, so there is nothing to compare with.")
    if theirs is None:
        return lines
    lines.append(f"The preset on the same seeds: {_fresh_words(plan, theirs)}.")
    if mine.mean is None or theirs.mean is None:
        return lines
    more, interval = gain(mine, theirs)
    better = "less" if plan.metric.lower_is_better else "more"
    amount = -more if plan.metric.lower_is_better else more
    text = f"That is {amount:,.1f} {better} than the preset"
    if interval is None:
        text += f" with {_count(len(seeds), 'seed')}: it may be chance"
    else:
        low, high = sorted(-x if plan.metric.lower_is_better else x for x in interval)
        sure = "" if low > 0 else ": it may be chance"
        text += f", seed by seed (95 % interval {low:,.1f} to {high:,.1f}){sure}"
    return [*lines, f"{text}."]


def best_toml(plan: Plan, trials: list[Trial], best: Trial) -> str:
    """Return the settings of the best trial for `headrace train ENV --config`, and how found."""
    about = [
        f"Found by headrace {plan.version} {plan.verb} on {plan.env}: "
        f"{len(trials)} trials, {sum(t.seconds for t in trials) / 60:.1f} minutes of training.",
        f"Searched with seeds {_words(plan.seeds)}, {plan.method}, compared by "
        f"{plan.metric.title}.",
    ]
    if seeds := fresh_seeds(plan, trials):
        about.append(f"Measured again with seeds {_words(seeds)}.")
    about += verdict(plan, trials)
    if plan.metric.is_evaluated:
        about.append(
            "These returns are of the likeliest actions, as headrace eval RUN_DIR --seed "
            f"{plan.seed} measures them (with fresh seeds: --seed {plan.seed + 1}); the mean "
            "return of training is that of exploring ones."
        )
    about.append(f"To train with it: {plan.train_command(Path(BEST))}")
    settings = {"algo": plan.algo, "total_env_steps": plan.total_env_steps}
    settings |= plan.fixed | plan.sizes | best.changes
    if plan.metric.goal is not None:
        settings["stop_at_return"] = plan.metric.goal
    known = {name: value for name, value in sorted(settings.items()) if value is not None}
    for name in [name for name, value in known.items() if _has_none(value)]:
        about.append(f"Give this yourself, since TOML has no None: {name}={known.pop(name)}")
    return toml_text(about, known)


def write_best(folder: Path, plan: Plan, trials: list[Trial]) -> Path | None:
    """Write `best.toml`; None if no trial was measured. RunDirError if there is no room."""
    best = best_of(plan, trials)
    if best is None:
        return None
    with writable(folder):
        write_whole(folder / BEST, best_toml(plan, trials, best).encode())
    return folder / BEST


def heads(plan: Plan) -> list[str]:
    """Return the names of a table's columns."""
    again = ["fresh seeds"] if plan.final_seeds else []
    return ["trial", plan.metric.title, "env steps", *again, *plan.space]


def cells(plan: Plan, trial: Trial, seeds: list[int]) -> list[str]:
    """Return the row of a trial in a table, as text; `seeds` are the fresh ones."""
    row = _row(plan, trial, seeds)
    fresh = fresh_of(plan, trial, seeds)
    again = [] if not plan.final_seeds else ["" if fresh is None else _fresh_words(plan, fresh)]
    return [
        trial.name.removeprefix("trial "),
        plan.metric.describe(row["value"]),
        f"{row['env_steps']:,}",
        *again,
        *(_short(trial.values.get(name)) for name in plan.space),
    ]


def _fresh_words(plan: Plan, fresh: Fresh) -> str:
    reached = sum(value is not None for value in fresh.values)
    if fresh.mean is None:
        return f"{reached} of {len(fresh.values)} seeds"
    text = plan.metric.describe(fresh.mean)
    if fresh.interval is not None:
        text += f" [{fresh.interval[0]:,.1f}, {fresh.interval[1]:,.1f}]"
    return text


@functools.cache  # a table asks several times
def _interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    if len(values) < MIN_FOR_INTERVAL:
        return None
    low, high = bootstrap_interval(np.array(values))
    return float(low), float(high)


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _words(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    return " and ".join(map(str, numbers))


def _has_none(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_has_none, value)) if isinstance(value, list | tuple) else value is None
