"""The parts of a report with figures: curves, shares of time, timeline, lag."""

from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from headrace.meter import SPANS
from headrace.spec import Array
from headrace.tools.profile import timeline_plots
from headrace.tools.report import figures
from headrace.tools.report.history import History
from headrace.tools.runs.curves import Curve

MIN_SHARE = 0.001
"""Minimum share of the time of a span that is listed."""
_FIRST = (
    "loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction",
    "explained_variance", "grad_norm", "lr",
)  # fmt: skip
_LAG = {
    "queue_depth": "waiting batches",
    "workers_wait_s": "of all workers so far",
}
# Metrics with their own place on the page, and counts.
_ELSEWHERE = {
    *("mean_return", "eval_return", "mean_length", "eval_length", "eval_env_steps"),
    "env_steps_per_s",
    *("lag_acting", "lag_acting_max", "lag_learning", "lag_learning_max", *_LAG),
    *("iteration", "env_steps", "learner_steps", "agent_steps", "episodes", "wall_s"),
}
_MAX_AREAS = 200

Lines = dict[int, Curve]  # the curves of one metric, by the number of their policy
_ALL_POLICIES = -1


class Panel(NamedTuple):
    """A figure with its caption; `last` has the latest value of each curve."""

    name: str
    picture: Markup
    note: str = ""
    last: str = ""


def curves(history: History) -> tuple[list[Panel], dict[str, str]]:
    """Draw return, speed and the learner's metrics; return the values of constant ones apart."""
    returns = _metric(history, "mean_return")
    if len(returns) > 1:
        returns.pop(_ALL_POLICIES, None)  # the mean over policies says little of a game
    evaluated = next(iter(_metric(history, "eval_return").values()), None)
    note = "dots: evaluations" if evaluated else ""
    panels = [_panel("mean_return", returns, note, mark=evaluated)] if returns else []
    if len((speed := history.speed()).mean):
        panels.append(_panel("env_steps_per_s", {_number_of_whole(history): speed}))
    if lengths := _metric(history, "mean_length"):
        panels.append(_panel("mean_length", lengths, "env steps"))
    constant = {}
    for name in _learner_metrics(history):
        lines = _metric(history, name)
        if any(curve.low.min() < curve.high.max() for curve in lines.values()):
            panels.append(_panel(name, lines))
        elif lines:
            values = dict.fromkeys(number(float(curve.mean[0])) for curve in lines.values())
            constant[name] = " / ".join(values)
    return panels, constant


def lag(history: History) -> list[Panel]:
    """Draw the age of the weights and the queues; [] for a run without lag."""
    panels = []
    for name in ("lag_acting", "lag_learning"):
        lines, most = _metric(history, name), _metric(history, f"{name}_max")
        if lines:
            both = [*lines.values(), *most.values()]
            note = "updates: mean / most" if most else "updates"
            panels.append(_panel(name, dict(enumerate(both)), note))
    for name, note in _LAG.items():
        if lines := _metric(history, name):
            panels.append(_panel(name, lines, note))
    return panels


def time_spent(history: History) -> dict[str, Any]:
    """Draw the shares of time by span.

    Returns:
        panels: shares over wall time; seconds, shares: in total, by role and span; largest: the
        largest share of each span that is listed.
    """
    panels, totals, shares = [], {}, {}
    for role in ("learner", "workers"):
        wall_s, seconds = _thin(*history.seconds(role))
        if not (total := seconds.sum()):
            continue
        panels.append(Panel(role, figures.over_time(role, wall_s, seconds), "over wall time"))
        totals[role] = dict(zip(SPANS, seconds.sum(axis=0).tolist(), strict=True))
        shares[role] = {span: s / total for span, s in totals[role].items()}
    largest = {span: max((of[span] for of in shares.values()), default=0.0) for span in SPANS}
    listed = {span: share for span, share in largest.items() if share >= MIN_SHARE}
    return {"panels": panels, "seconds": totals, "shares": shares, "largest": listed}


def timeline(history: History) -> dict[str, Any] | None:
    """Draw the spans of each process in the last updates; None without a timeline."""
    if not history.laps:
        return None
    begin, end = timeline_plots.last_updates(history.laps)
    edges = np.array([begin, max(end, begin + 1e-6)])
    shares = sum(timeline_plots.span_shares(laps, edges)[0] for laps in history.laps.values())
    spans = [span for span, share in zip(SPANS, shares, strict=True) if share >= MIN_SHARE]
    return {"spans": spans, "picture": figures.timeline(history.laps, begin, end)}


def number(value: float) -> str:
    """Format a number with 4 significant digits and thousands separators."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def fill(span: str) -> str:
    """Return the CSS background of a span."""
    color, stripe = timeline_plots.COLORS[span], timeline_plots.STRIPE
    striped = f"repeating-linear-gradient(135deg, {stripe} 0 1px, {color} 1px 4px)"
    return striped if span == "wait" else color


def _metric(history: History, name: str) -> Lines:
    """Return the curves of a metric that have a value."""
    columns = {i: f"{policy}/{name}" for i, policy in enumerate(history.policies)}
    columns[_number_of_whole(history)] = name
    curves = {number: history.curve(column) for number, column in columns.items()}
    return {number: curve for number, curve in curves.items() if len(curve.mean)}


def _number_of_whole(history: History) -> int:
    return _ALL_POLICIES if history.policies else 0


def _learner_metrics(history: History) -> list[str]:
    """Return the names of all other metrics, the common ones first."""
    policies = {f"{policy}/" for policy in history.policies}
    names: dict[str, None] = {}
    rows = history.rows
    for row in (*rows[:1], *rows[len(rows) // 2 :][:1], *rows[-1:]):
        for name in row:
            start, slash, rest = name.partition("/")
            plain = rest if start + slash in policies else name
            if plain not in _ELSEWHERE and not name.startswith(("seconds/", "ledger/")):
                names[plain] = None
    first = [name for name in _FIRST if name in names]
    return first + [name for name in names if name not in first]


def _panel(name: str, curves: Lines, note: str = "", mark: Curve | None = None) -> Panel:
    last = " / ".join(number(float(curve.mean[-1])) for curve in curves.values())
    return Panel(name, figures.small(name, curves, mark=mark), note, last)


def _thin(wall_s: Array, seconds: Array) -> tuple[Array, Array]:
    """Add up neighbouring intervals, for at most `_MAX_AREAS` areas."""
    step = -(-len(wall_s) // _MAX_AREAS) or 1
    begins = np.arange(0, len(wall_s), step)
    if not len(begins):
        return wall_s, seconds
    ends = np.append(begins[1:], len(wall_s)) - 1
    return wall_s[ends], np.add.reduceat(seconds, begins, axis=0)
