"""The parts of a report with figures: curves, shares of time, timeline, lag."""

from collections.abc import Iterable

import numpy as np

from headrace.meter import SPANS
from headrace.spec import Array
from headrace.tools.profile import timeline_plots
from headrace.tools.report import figures
from headrace.tools.report.figures import Markup, join, tag
from headrace.tools.report.history import Curve, History

_MINUS = "\N{MINUS SIGN}"
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
    *("mean_return", "eval_return", "mean_length", "eval_length", "env_steps_per_s"),
    *("lag_acting", "lag_acting_max", "lag_learning", "lag_learning_max", *_LAG),
    *("iteration", "env_steps", "learner_steps", "agent_steps", "episodes", "wall_s"),
}
_MAX_AREAS = 200
_MIN_SHARE = 0.001  # of a span that is listed
_UPDATES = 3

Lines = dict[int, Curve]
"""The curves of one metric, by the number of their policy."""
_ALL_POLICIES = -1


def curves(history: History) -> Markup:
    """Draw return, speed and the learner's metrics over env steps."""
    if not history.rows:
        return tag("p", "No update has been made yet.", class_="note")
    returns = _metric(history, "mean_return")
    if len(returns) > 1:
        returns.pop(_ALL_POLICIES, None)  # the mean over policies says little of a game
    evaluated = next(iter(_metric(history, "eval_return").values()), None)
    parts = []
    if returns:
        note = "dots: evaluations" if evaluated else ""
        parts.append(_panel("mean_return", returns, note=note, mark=evaluated))
    else:
        parts.append(tag("p", "No episode has ended yet.", class_="note"))
    if len((speed := history.speed()).mean):
        parts.append(_panel("env_steps_per_s", {_number_of_whole(history): speed}))
    if lengths := _metric(history, "mean_length"):
        parts.append(_panel("mean_length", lengths, note="env steps"))
    constant: list[Markup] = []
    for name in _learner_metrics(history):
        lines = _metric(history, name)
        if not lines:
            continue
        if all(curve.low.min() == curve.high.max() for curve in lines.values()):
            values = " / ".join(dict.fromkeys(number(float(c.mean[0])) for c in lines.values()))
            constant.append(join(tag("code", name), " ", values))
        else:
            parts.append(_panel(name, lines))
    note_tag = None
    if constant:
        listed = join(*(join(", " if i else "", one) for i, one in enumerate(constant)))
        note_tag = tag("p", "Constant: ", listed, ".", class_="note")
    return join(_legend_of_policies(history.policies), _grid(parts), note_tag)


def lag(history: History) -> Markup | None:
    """Draw the age of the weights and the queues; None for a run without lag."""
    parts = []
    for name in ("lag_acting", "lag_learning"):
        lines, most = _metric(history, name), _metric(history, f"{name}_max")
        if lines:
            both = [*lines.values(), *most.values()]
            note = "updates: mean / most" if most else "updates"
            parts.append(_panel(name, dict(enumerate(both)), note=note))
    for name, note in _LAG.items():
        if lines := _metric(history, name):
            parts.append(_panel(name, lines, note=note))
    return _grid(parts) if parts else None


def time_spent(history: History) -> Markup:
    """Draw the shares of time by span, in total and over time."""
    parts, totals = [], {}
    for role in ("learner", "workers"):
        wall_s, seconds = _thin(*history.seconds(role))
        if not seconds.sum():
            continue
        parts.append(_figure(role, figures.over_time(role, wall_s, seconds), "over wall time"))
        totals[role] = dict(zip(SPANS, seconds.sum(axis=0).tolist(), strict=True))
    if not totals:
        return tag("p", "This run's metrics have no spans of time.", class_="note")
    used = [span for span in SPANS if any(_share(s, span) >= _MIN_SHARE for s in totals.values())]
    note = "Spans below 0.1 % are left out of the table."
    if "workers" not in totals:
        note = f"The learner's process steps the environments itself. {note}"
    bars = [_bar(name, spans) for name, spans in totals.items()]
    return join(
        _legend(used),
        tag("div", *bars, class_="bars"),
        tag("div", *parts, class_="grid wider"),
        _table_of_seconds(used, totals),
        tag("p", note, class_="note"),
    )


def timeline(history: History) -> Markup:
    """Draw the spans of each process in the last updates, or say how to record them."""
    if history.timeline_error:
        return tag("p", history.timeline_error, class_="note")
    if not history.laps:
        if history.config["settings"].get("timeline"):
            return tag("p", "The timeline is written when the run ends.", class_="note")
        command = tag("code", "headrace train ... --timeline")
        return tag("p", "This run has no timeline. To record one: ", command, class_="note")
    begin, end = timeline_plots.last_updates(history.laps, _UPDATES)
    edges = np.array([begin, max(end, begin + 1e-6)])
    shares = np.sum(
        [timeline_plots.span_shares(laps, edges)[0] for laps in history.laps.values()], axis=0
    )
    used = [span for span, share in zip(SPANS, shares, strict=True) if share >= _MIN_SHARE]
    picture = figures.timeline(history.laps, begin, end)
    text = "The last updates of the learner. Spans that are too short to be seen fill their share "
    text += "of the height."
    wide = tag("div", picture, class_="wide")
    return join(_legend(used), wide, tag("p", text, class_="note"))


def number(value: float) -> str:
    """Format a number with 4 significant digits and thousands separators."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", _MINUS)


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


def _panel(name: str, curves: Lines, *, note: str = "", mark: Curve | None = None) -> Markup:
    last = " / ".join(number(float(curve.mean[-1])) for curve in curves.values())
    return _figure(name, figures.small(name, curves, mark=mark), note, last)


def _figure(name: str, picture: Markup, note: str = "", last: str = "") -> Markup:
    value = tag("span", last, class_="value") if last else None
    note_tag = tag("span", note, class_="note") if note else None
    title = tag("span", tag("b", name), " ", note_tag)
    return tag("figure", tag("figcaption", title, value), picture)


def _grid(parts: Iterable[Markup]) -> Markup:
    return tag("div", *parts, class_="grid")


def _legend_of_policies(policies: list[str]) -> Markup | None:
    if len(policies) < 2:
        return None
    return tag("ul", *(
        tag("li", tag("i", style=f"background: var(--{figures.line_color(i)})"), policy)
        for i, policy in enumerate(policies)
    ), class_="legend")  # fmt: skip


def _legend(spans: Iterable[str]) -> Markup:
    return tag("ul", *(
        tag("li", _swatch(span), span) for span in spans
    ), class_="legend")  # fmt: skip


def _swatch(span: str) -> Markup:
    return tag("i", style=f"background: {_fill(span)}")


def _fill(span: str) -> str:
    color = timeline_plots.COLORS[span]
    striped = f"repeating-linear-gradient(135deg, {timeline_plots.STRIPE} 0 1px, {color} 1px 4px)"
    return striped if span == "wait" else color


def _bar(name: str, seconds: dict[str, float]) -> Markup:
    parts = [
        tag("i", style=f"flex-grow: {share:.4f}; background: {_fill(span)}",
            title=f"{span} {share:.1%}")
        for span in SPANS
        if (share := _share(seconds, span)) > 0
    ]  # fmt: skip
    return join(tag("b", name), tag("div", *parts, class_="bar"))


def _share(seconds: dict[str, float], span: str) -> float:
    return seconds[span] / (sum(seconds.values()) or 1.0)


def _table_of_seconds(spans: list[str], totals: dict[str, dict[str, float]]) -> Markup:
    """Tabulate total seconds and shares, the largest first."""
    largest = {span: max(_share(s, span) for s in totals.values()) for span in spans}
    head = tag(
        "tr", tag("th", "span"), *(tag("th", role, colspan=2, class_="num") for role in totals)
    )
    rows = []
    for span in sorted(spans, key=lambda span: -largest[span]):
        cells = [tag("td", _swatch(span), tag("code", span))]
        for seconds in totals.values():
            share = _share(seconds, span)
            texts = (f"{seconds[span]:,.1f} s", f"{share:.1%}") if share >= _MIN_SHARE else ("", "")
            cells += [tag("td", text, class_="num") for text in texts]
        rows.append(tag("tr", *cells))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="spans")


def _thin(wall_s: Array, seconds: Array) -> tuple[Array, Array]:
    """Add up neighbouring intervals, for at most `_MAX_AREAS` areas."""
    step = -(-len(wall_s) // _MAX_AREAS) or 1
    begins = np.arange(0, len(wall_s), step)
    if not len(begins):
        return wall_s, seconds
    ends = np.append(begins[1:], len(wall_s)) - 1
    return wall_s[ends], np.add.reduceat(seconds, begins, axis=0)
