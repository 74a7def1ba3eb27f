"""Metrics as arrays, and curves over env steps: of one run, or of several with their interval.

Left out: pictures (`tools/plotting.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.spec import Array
from headrace.storage.metrics import returns_by_policy
from headrace.tools.runs.statistics import bootstrap_interval, mean

_NUM_POINTS = 200


class Curve(NamedTuple):
    """A metric over env steps: the mean and a range at each of `[n]` points."""

    env_steps: Array
    mean: Array
    low: Array
    high: Array


def column(rows: Sequence[Mapping[str, Any]], name: str) -> Array:
    """Return `[rows]` values of a metric; NaN where a row has none."""
    values = [row.get(name) for row in rows]
    return np.array([v if isinstance(v, int | float) else np.nan for v in values], np.float64)


def curve_of(rows: Sequence[Mapping[str, Any]], name: str) -> Curve:
    """Return a metric of one run where it is known. Its range is the value itself."""
    env_steps, values = column(rows, "env_steps"), column(rows, name)
    known = np.isfinite(values)
    values = values[known]
    return Curve(env_steps[known], values, values, values)


def curves_by_policy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return a run's mean returns of each policy; with one policy, by the name ""."""
    names = returns_by_policy(rows[-1]) if rows else {}
    return {name: curve_of(rows, f"{name}/mean_return") for name in names} or {
        "": curve_of(rows, "mean_return")
    }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of several runs' curves, with its 95 % bootstrap interval at each point.

    Each curve is interpolated to the same 200 points. They lie where all curves are known: from the
    latest beginning to the earliest end. There are none if no such place is. With one curve the
    range is the mean itself.
    """
    curves = [curve for curve in curves if len(curve.mean)]
    begin = max((curve.env_steps[0] for curve in curves), default=1.0)
    end = min((curve.env_steps[-1] for curve in curves), default=0.0)
    if begin > end:
        nothing = np.empty(0)
        return Curve(nothing, nothing, nothing, nothing)
    env_steps = np.unique(np.linspace(begin, end, _NUM_POINTS))
    values = np.stack([np.interp(env_steps, curve.env_steps, curve.mean) for curve in curves])
    middle = mean(values)
    if len(curves) == 1:
        return Curve(env_steps, middle, middle, middle)
    return Curve(env_steps, middle, *bootstrap_interval(values))
