"""`headrace compare`: the results of groups of runs, and how sure the differences are.

Left out: the picture (`tools/plotting.py`) and the page (`page.py`).
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from headrace.catalog.returns import format_return
from headrace.errors import ConfigError, RunDirError
from headrace.spec import Array
from headrace.storage.metrics import FILE, read_metrics
from headrace.tools.plotting import draw_lines
from headrace.tools.runs.curves import Curve, column, curve_of, curves_by_policy, mean_curve
from headrace.tools.runs.groups import Group, differences, format_setting, group
from headrace.tools.runs.listing import NONE, format_table
from headrace.tools.runs.records import RunRecord, load_runs
from headrace.tools.runs.statistics import (
    bootstrap_interval,
    interquartile_mean,
    mean,
    probability_interval,
    probability_of_improvement,
)

TRAINING, EVALUATION = "the last 100 training episodes", "the last evaluation"
_MIN_FOR_IQM = 3
_MAX_FOR_ALL_PAIRS = 3


@dataclass(frozen=True)
class Result:
    """The result of one group, or of one policy of its runs.

    Attributes:
        policy: "" with one policy.
        seeds, env_steps, returns: of each run that has a return.
        curve: mean return of the last 100 training episodes over env steps, as the mean over runs.
    """

    label: str
    env: str
    policy: str
    seeds: tuple[int, ...]
    env_steps: tuple[int, ...]
    returns: Array
    curve: Curve

    @property
    def mean_return(self) -> float:
        """Mean over the runs; NaN without one."""
        return float(mean(self.returns)) if len(self.returns) else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of its 95 % bootstrap interval; NaN with fewer than two runs."""
        low, high = bootstrap_interval(self.returns)
        return float(low), float(high)

    @property
    def iqm(self) -> float:
        """The interquartile mean over the runs; NaN with fewer than three."""
        enough = len(self.returns) >= _MIN_FOR_IQM
        return float(interquartile_mean(self.returns)) if enough else math.nan


@dataclass(frozen=True)
class Pair:
    """The probability that a run of `better` has a higher return than one of `than`.

    Attributes:
        interval: the ends of its 95 % bootstrap interval; NaN if either group has one run.
    """

    better: str
    than: str
    probability: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, side by side.

    Attributes:
        of: episodes that a run's return is the mean of: `TRAINING` or `EVALUATION`.
        groups: the groups; `results`: theirs, one for each policy.
        pairs: each two results in the same environment; of more than three each with the first.
        settings: settings that differ between groups -> their values, in the order of the groups.
    """

    of: str
    groups: list[Group]
    results: list[Result]
    pairs: list[Pair]
    settings: dict[str, list[Any]]

    def draw(self, output: Path) -> None:
        """Draw the curves, a panel for each environment; raises as `plotting.check_output`."""
        draw_lines({env: list(lines) for env, lines in self.panels()}, output)

    def panels(self) -> Iterator[tuple[str, list[tuple[str, Curve]]]]:
        """Yield each environment with the labelled curves of its groups."""
        for env in dict.fromkeys(result.env for result in self.results):
            yield env, [(each.label, each.curve) for each in self.results if each.env == env]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain data; what is unknown is null."""
        return {
            "return_of": self.of,
            "groups": [
                {
                    "label": result.label,
                    "env": result.env,
                    "policy": result.policy or None,
                    "seeds": result.seeds,
                    "env_steps": result.env_steps,
                    "returns": result.returns.tolist(),
                    "mean_return": _plain(result.mean_return),
                    "interval": list(map(_plain, result.interval)),
                    "iqm": _plain(result.iqm),
                }
                for result in self.results
            ],
            "pairs": [
                {
                    "x": pair.better,
                    "y": pair.than,
                    "probability_of_improvement": pair.probability,
                    "interval": list(map(_plain, pair.interval)),
                }
                for pair in self.pairs
            ],
            "settings": {
                name: dict(zip((each.label for each in self.groups), values, strict=True))
                for name, values in self.settings.items()
            },
        }

    @property
    def legend(self) -> str:
        """What the numbers are."""
        return (
            f"A return is the mean over runs, of each run that of {self.of}. Intervals: 95 %, by "
            "bootstrap over runs. IQM: interquartile mean."
        )

    def describe(self) -> str:
        """Return the tables as text."""
        tables = [self.result_table(), self.pair_table(), self.setting_table()]
        right = ({2, 3, 4, 5}, {2, 3}, set[int]())
        lines = [self.legend]
        for (heads, rows), columns in zip(tables, right, strict=True):
            if rows:
                lines += ["", format_table(heads, rows, columns)]
        return "\n".join(lines)

    def result_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the cells of the table of results."""
        heads = ["group", "seeds", "env steps", "mean return", "95 % interval", "IQM"]
        return heads, [
            [
                each.label,
                ", ".join(map(str, each.seeds)) or NONE,
                _range(each.env_steps),
                _number(each.mean_return),
                _between(each.interval, _number),
                _number(each.iqm),
            ]
            for each in self.results
        ]

    def pair_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the cells of the table of probabilities of improvement."""
        return ["X", "Y", "P(X > Y)", "95 % interval"], [
            [pair.better, pair.than, _share(pair.probability), _between(pair.interval, _share)]
            for pair in self.pairs
        ]

    def setting_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the cells of the table of settings that differ."""
        rows = [
            [name, *(NONE if each is None else format_setting(each) for each in values)]
            for name, values in self.settings.items()
        ]
        return ["setting", *(each.label for each in self.groups)], rows


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare runs, in groups that have the same settings but for seed and speed.

    Args:
        paths: directories of runs, or folders with runs. Damaged runs below a folder, and runs
            without an update, are left out with a warning. Another warns of equal seeds in a group.

    Raises:
        ConfigError: nothing was given.
        RunDirError: a directory does not exist, holds no run, or its run is damaged.
    """
    if not paths:
        raise ConfigError("No run directory was given.\nExample: headrace compare runs/A runs/B")
    groups = group(_found(paths))
    for of in groups:
        if again := sorted({str(seed) for seed in of.seeds if of.seeds.count(seed) > 1}):
            warnings.warn(
                f"{of.label}: more than one run has seed {', '.join(again)}. Such runs are alike, "
                "and the intervals are too narrow.",
                stacklevel=2,
            )
    rows = {each.dir: read_metrics(each.dir) for of in groups for each in of.records}
    # Not of games: an evaluation has no return of each policy.
    by_evaluation = all("eval_return" in _names(of) and not _is_game(of) for of in rows.values())
    results = [each for of in groups for each in _results(of, rows, by_evaluation)]
    names = differences(each.settings for each in groups)
    return Comparison(
        EVALUATION if by_evaluation else TRAINING,
        groups,
        results,
        list(_pairs(results)),
        {name: [each.settings.get(name) for each in groups] for name in names},
    )


def _found(paths: Sequence[Path]) -> list[RunRecord]:
    """Return the runs in and below directories, each once."""
    found: dict[Path, RunRecord] = {}
    for path in paths:
        records = load_runs(path)
        if not records:
            raise RunDirError(
                f"{path} is not a run directory, and there is none below it.\n"
                "Expected one that `headrace train` has written to (see runs/)."
            )
        for record in records:
            if record.damage and record.dir == path:
                raise RunDirError(record.damage)
            if record.damage:
                warnings.warn(f"Left out: {record.damage}", stacklevel=3)
            elif not (record.dir / FILE).exists():
                warnings.warn(f"Left out: {record.dir} has no update yet.", stacklevel=3)
            else:
                found.setdefault(record.dir.resolve(), record)
    if not found:
        raise RunDirError(f"No run in {', '.join(map(str, paths))} has an update to compare.")
    return list(found.values())


def _names(rows: list[dict[str, Any]]) -> set[str]:
    return {name for row in rows for name in row}


def _is_game(rows: list[dict[str, Any]]) -> bool:
    return "" not in curves_by_policy(rows)


def _results(
    of: Group, rows: dict[Path, list[dict[str, Any]]], by_evaluation: bool
) -> Iterator[Result]:
    """Yield the result of each policy of a group."""
    curves = [curves_by_policy(rows[record.dir]) for record in of.records]
    for policy in dict.fromkeys(name for by_policy in curves for name in by_policy):
        known, lines, returns = list[RunRecord](), list[Curve](), list[float]()
        for record, by_policy in zip(of.records, curves, strict=True):
            line = by_policy.get(policy, curve_of((), ""))
            values = column(rows[record.dir], "eval_return") if by_evaluation else line.mean
            values = values[np.isfinite(values)]
            if not len(values):
                warnings.warn(f"Left out: {record.dir} has no return yet.", stacklevel=4)
                continue
            known.append(record)
            lines.append(line)
            returns.append(float(values[-1]))
        yield Result(
            f"{of.label}: {policy}" if policy else of.label,
            of.env,
            policy,
            tuple(int(record.settings["seed"]) for record in known),
            tuple(record.env_steps for record in known),
            np.array(returns),
            mean_curve(lines),
        )


def _pairs(results: list[Result]) -> Iterator[Pair]:
    """Yield the probabilities of improvement among results that can be compared."""
    alike: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if len(result.returns):
            alike.setdefault((result.env, result.policy), []).append(result)
    for those in alike.values():
        first = those[0]
        pairs = (
            combinations(those, 2)
            if len(those) <= _MAX_FOR_ALL_PAIRS
            else ((first, other) for other in those[1:])
        )
        for before, after in pairs:
            samples = after.returns, before.returns
            yield Pair(
                after.label,
                before.label,
                probability_of_improvement(*samples),
                probability_interval(*samples),
            )


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return format_return(value) if math.isfinite(value) else NONE


def _share(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else NONE


def _between(interval: tuple[float, float], text: Any) -> str:
    low, high = interval
    return f"[{text(low)}, {text(high)}]" if math.isfinite(low) else NONE


def _range(steps: Sequence[int]) -> str:
    if not steps:
        return NONE
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
