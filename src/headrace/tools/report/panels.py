"""The parts of a report that are figures: curves, shares of time, timeline, lag.

Left out: how a figure is drawn (`figures.py`), and the rest of the page (`page.py`).
"""

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
    "loss",
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "clip_fraction",
    "explained_variance",
    "grad_norm",
    "lr",
)
_LAG = {
    "queue_depth": "batches that wait",
    "workers_wait_s": "of all workers so far",
}
# What has a place of its own on the page, or is a count.
_ELSEWHERE = {
    *("mean_return", "eval_return", "mean_length", "eval_length", "env_steps_per_s"),
    *("lag_acting", "lag_acting_max", "lag_learning", "lag_learning_max", *_LAG),
    *("iteration", "env_steps", "learner_steps", "agent_steps", "episodes", "wall_s"),
}
_MOST_AREAS = 200
_LEAST = 0.001  # of a share, to be in a table
_UPDATES = 3

Lines = dict[int, Curve]
"""The curves of one metric, by the number of their policy."""
_TOGETHER = -1  # of several policies


def curves(history: History) -> Markup:
    """Return and speed, then what the learner says of itself: small figures over env steps."""
    if not history.rows:
        return tag("p", "No update has been made yet.", class_="note")
    returns = _of(history, "mean_return")
    if len(returns) > 1:
        returns.pop(_TOGETHER, None)  # the mean over policies says little of a game
    evaluated = next(iter(_of(history, "eval_return").values()), None)
    parts = []
    if returns:
        note = "dots: evaluations" if evaluated else ""
        parts.append(_panel("mean_return", returns, note=note, mark=evaluated))
    else:
        parts.append(tag("p", "No episode has ended yet.", class_="note"))
    if len((speed := history.speed()).mean):
        parts.append(_panel("env_steps_per_s", {_alone(history): speed}))
    if lengths := _of(history, "mean_length"):
        parts.append(_panel("mean_length", lengths, note="env steps"))
    constant: list[Markup] = []
    for name in _learning(history):
        found = _of(history, name)
        if not found:
            continue
        if all(curve.low.min() == curve.high.max() for curve in found.values()):
            values = " / ".join(dict.fromkeys(number(float(c.mean[0])) for c in found.values()))
            constant.append(join(tag("code", name), " ", values))
        else:
            parts.append(_panel(name, found))
    said = None
    if constant:
        listed = join(*(join(", " if i else "", one) for i, one in enumerate(constant)))
        said = tag("p", "Constant: ", listed, ".", class_="note")
    return join(_legend_of_policies(history.policies), _grid(parts), said)


def lag(history: History) -> Markup | None:
    """How old weights are, and what waits; None: this run has no lag."""
    parts = []
    for name in ("lag_acting", "lag_learning"):
        found, most = _of(history, name), _of(history, f"{name}_max")
        if found:
            both = [*found.values(), *most.values()]
            note = "updates: mean / most" if most else "updates"
            parts.append(_panel(name, dict(enumerate(both)), note=note))
    for name, note in _LAG.items():
        if found := _of(history, name):
            parts.append(_panel(name, found, note=note))
    return _grid(parts) if parts else None


def time_spent(history: History) -> Markup:
    """Shares of time by span, in all and over time."""
    parts, totals = [], {}
    for of in ("learner", "workers"):
        wall_s, seconds = _thinned(*history.seconds(of))
        if not seconds.sum():
            continue
        parts.append(_figure(of, figures.over_time(of, wall_s, seconds), "over wall time"))
        totals[of] = dict(zip(SPANS, seconds.sum(axis=0).tolist(), strict=True))
    if not totals:
        return tag("p", "This run's metrics do not say where its time went.", class_="note")
    used = [span for span in SPANS if any(_share(of, span) >= _LEAST for of in totals.values())]
    note = "Spans below 0.1 % are left out of the table."
    if "workers" not in totals:
        note = f"The learner's process steps the environments itself. {note}"
    bars = [_bar(name, of) for name, of in totals.items()]
    return join(
        _legend(used),
        tag("div", *bars, class_="bars"),
        tag("div", *parts, class_="grid wider"),
        _table_of_seconds(used, totals),
        tag("p", note, class_="note"),
    )


def time_line(history: History) -> Markup:
    """What each process did in the last updates, or how to have that kept."""
    if history.no_timeline:
        return tag("p", history.no_timeline, class_="note")
    if not history.laps:
        if history.config["settings"].get("timeline"):
            return tag("p", "It is written when the run ends.", class_="note")
        how = tag("code", "headrace train ... --timeline")
        what = " keeps what each process did when."
        return tag("p", "This run kept none. ", how, what, class_="note")
    begin, end = timeline_plots.last_updates(history.laps, _UPDATES)
    edges = np.array([begin, max(end, begin + 1e-6)])
    shares = np.sum(
        [timeline_plots.span_shares(of, edges)[0] for of in history.laps.values()], axis=0
    )
    used = [span for span, share in zip(SPANS, shares, strict=True) if share >= _LEAST]
    picture = figures.timeline(history.laps, begin, end)
    text = "The last updates of the learner. Where spans are shorter than can be seen, each fills "
    text += "its share of the height."
    wide = tag("div", picture, class_="wide")
    return join(_legend(used), wide, tag("p", text, class_="note"))


def number(value: float) -> str:
    """A number for people: 4 digits that count, thousands apart."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("-", _MINUS)


def _of(history: History, name: str) -> Lines:
    """The curves of a metric that has any value."""
    found = {i: f"{policy}/{name}" for i, policy in enumerate(history.policies)}
    found[_alone(history)] = name
    curves = {number: history.curve(column) for number, column in found.items()}
    return {number: curve for number, curve in curves.items() if len(curve.mean)}


def _alone(history: History) -> int:
    return _TOGETHER if history.policies else 0


def _learning(history: History) -> list[str]:
    """Names of the metrics that are none of the above; those that all know come first."""
    policies = {f"{policy}/" for policy in history.policies}
    found: dict[str, None] = {}
    rows = history.rows
    for row in (*rows[:1], *rows[len(rows) // 2 :][:1], *rows[-1:]):
        for name in row:
            start, slash, rest = name.partition("/")
            plain = rest if start + slash in policies else name
            if plain not in _ELSEWHERE and not name.startswith(("seconds/", "ledger/")):
                found[plain] = None
    first = [name for name in _FIRST if name in found]
    return first + [name for name in found if name not in first]


def _panel(name: str, curves: Lines, *, note: str = "", mark: Curve | None = None) -> Markup:
    last = " / ".join(number(float(curve.mean[-1])) for curve in curves.values())
    return _figure(name, figures.small(name, curves, mark=mark), note, last)


def _figure(name: str, picture: Markup, note: str = "", last: str = "") -> Markup:
    value = tag("span", last, class_="value") if last else None
    said = tag("span", note, class_="note") if note else None
    title = tag("span", tag("b", name), " ", said)
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
    """Seconds and shares in all, the largest first."""
    largest = {span: max(_share(of, span) for of in totals.values()) for span in spans}
    head = tag("tr", tag("th", "span"), *(tag("th", of, colspan=2, class_="num") for of in totals))
    rows = []
    for span in sorted(spans, key=lambda span: -largest[span]):
        cells = [tag("td", _swatch(span), tag("code", span))]
        for of in totals.values():
            share = _share(of, span)
            said = (f"{of[span]:,.1f} s", f"{share:.1%}") if share >= _LEAST else ("", "")
            cells += [tag("td", text, class_="num") for text in said]
        rows.append(tag("tr", *cells))
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="spans")


def _thinned(wall_s: Array, seconds: Array) -> tuple[Array, Array]:
    """Sums over neighbours, so that there are not too many areas to see."""
    step = -(-len(wall_s) // _MOST_AREAS) or 1
    begins = np.arange(0, len(wall_s), step)
    if not len(begins):
        return wall_s, seconds
    ends = np.append(begins[1:], len(wall_s)) - 1
    return wall_s[ends], np.add.reduceat(seconds, begins, axis=0)
