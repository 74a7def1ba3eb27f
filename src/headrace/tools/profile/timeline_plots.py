"""What processes did when, as pictures, and as a trace that ui.perfetto.dev opens.

The pictures of a span have one colour everywhere: related work has related hues, and waiting is
grey and striped. Left out: keeping laps (`meter.py`), their file (`storage/timeline.py`).
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.meter import SPANS, Laps
from headrace.spec import Array
from headrace.tools import plotting

COLORS = {
    "start": "#5b6676",
    "env_step": "#1f6fb4",
    "env_reset": "#86bde6",
    "infer": "#e08a1e",
    "rollout": "#f3cd7f",
    "wait": "#c9cdd2",
    "transport": "#a05195",
    "learn": "#12806a",
    "allreduce": "#5fb89c",
    "ranks": "#b3dccb",
    "publish": "#d8a5cf",
    "eval": "#8c2d3f",
    "log": "#94714a",
    "checkpoint": "#cf5a3c",
    "other": "#e6e2da",
}
"""Of each span. Neighbours differ in lightness too, for eyes that tell few hues apart."""
STRIPE = "#9aa1a9"
"""On `wait`."""

_MOST_BARS = 32
_BAR_PX, _GAP_PX, _STRIPES_PX = 26, 6, 6
_WAIT, _NOTHING = SPANS.index("wait"), len(SPANS)
_LEARNER = re.compile(r"learner|rank \d+")


def is_learner(name: str) -> bool:
    """Whether a track is a learner's; else it is a sampler's, or that of who acts for them."""
    return _LEARNER.fullmatch(name) is not None


def in_order(names: list[str]) -> list[str]:
    """Learners first; worker 2 before worker 10."""

    def key(name: str) -> Any:
        words = re.split(r"(\d+)", name)
        return not is_learner(name), [int(w) if w.isdigit() else w for w in words]

    return sorted(names, key=key)


def window(tracks: dict[str, Laps], updates: int = 3) -> tuple[float, float]:
    """When the last updates of the learner began and ended (s); all there is, if these are fewer.

    Args:
        tracks: at least one.
        updates: how many; each ends as its weights have been published.
    """
    laps = tracks[in_order(list(tracks))[0]]
    publish, learn = SPANS.index("publish"), SPANS.index("learn")
    ends, learned = [], False
    for span, end in zip(laps.spans, laps.ends, strict=True):
        if span == publish and learned:
            ends.append(end)
            learned = False
        learned = learned or span == learn
    if not ends:
        return laps.begin, laps.ends[-1] if laps.ends else laps.begin
    return ends[-updates - 1] if len(ends) > updates else laps.begin, ends[-1]


def mixture(laps: Laps, edges: Array) -> Array:
    """Which share of each interval a process spent in each span.

    Args:
        laps: of the process.
        edges: `[n + 1]`, ascending (s).

    Returns:
        `[n, len(SPANS)]`; a row adds up to less than 1 where the process has no laps.
    """
    spans = np.frombuffer(bytes(laps.spans), np.uint8)
    knots = np.concatenate([[laps.begin], np.array(laps.ends)])
    first = max(0, int(np.searchsorted(knots, edges[0], "right")) - 1)
    last = int(np.searchsorted(knots, edges[-1], "left"))
    spans, knots = spans[first:last], knots[first : last + 1]
    shares = np.zeros((len(edges) - 1, len(SPANS)))
    if not len(spans):
        return shares
    took = np.diff(knots)
    for span in np.unique(spans):
        # Seconds in this span until any moment: linear between the ends of laps.
        until = np.concatenate([[0.0], np.cumsum(np.where(spans == span, took, 0.0))])
        shares[:, span] = np.diff(np.interp(edges, knots, until))
    return shares / np.diff(edges)[:, None]


def bars(tracks: dict[str, Laps], edges: Array) -> Array:
    """The picture of a timeline: one bar for each process, one column for each interval.

    What is shorter than a column shows as a mixture: each span fills its share of the height. So
    the picture has the same size whatever the number of laps.

    Returns:
        `[pixels down, columns, 4]`, uint8: RGBA; clear where there are no laps.
    """
    palette = np.array([[*_rgb(COLORS[span]), 255] for span in SPANS] + [[0, 0, 0, 0]], np.uint8)
    height = (np.arange(_BAR_PX)[::-1] + 0.5) / _BAR_PX
    down, across = np.indices((_BAR_PX, len(edges) - 1))
    is_stripe = (down + across) % _STRIPES_PX < _STRIPES_PX // 3
    gap = np.zeros((_GAP_PX // 2, len(edges) - 1, 4), np.uint8)
    parts = []
    for laps in tracks.values():
        until = np.cumsum(mixture(laps, edges), axis=1)
        span = (until[None] <= height[:, None, None]).sum(axis=-1)  # len(SPANS): none
        bar = palette[np.minimum(span, _NOTHING)]
        bar[(span == _WAIT) & is_stripe, :3] = _rgb(STRIPE)
        parts += [gap, bar, gap]
    return np.concatenate(parts)


def draw_timeline(
    axes: Any,
    tracks: dict[str, Laps],
    begin: float,
    end: float,
    *,
    columns: int = 1200,
    most: int = _MOST_BARS,
) -> None:
    """Draw what each process did between two moments, from `begin` on in ms or s.

    Args:
        axes: matplotlib's.
        tracks: by name; they are drawn in the order of `in_order`.
        begin: in the clock of the laps (s).
        end: likewise.
        columns: pixels across.
        most: processes shown; a label says how many are not.
    """
    names = in_order(list(tracks))
    shown = {name: tracks[name] for name in names[:most]}
    unit, scale = ("s", 1.0) if end - begin >= 2.0 else ("ms", 1e3)
    picture = bars(shown, np.linspace(begin, max(end, begin + 1e-6), columns + 1))
    extent = (0.0, max(end - begin, 1e-6) * scale, len(shown), 0.0)
    axes.imshow(picture, extent=extent, aspect="auto", interpolation="none")
    axes.set_yticks(np.arange(len(shown)) + 0.5, list(shown))
    axes.tick_params(axis="y", length=0)
    left = len(names) - len(shown)
    axes.set_xlabel(unit + (f"    (and {left} more processes)" if left else ""))


def draw_shares(axes: Any, shares: dict[str, dict[str, float]]) -> None:
    """Draw one bar for each process, or group of them, divided by span.

    Args:
        axes: matplotlib's.
        shares: seconds or shares by span, by name; each bar is drawn as 100 %.
    """
    totals = [sum(of.values()) or 1.0 for of in shares.values()]
    left = np.zeros(len(shares))
    for span in SPANS:
        widths = [
            100 * of.get(span, 0.0) / t for of, t in zip(shares.values(), totals, strict=True)
        ]
        if any(widths):
            axes.barh(range(len(shares)), widths, 0.7, left, label=span, **style(span))
        left += widths
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set(xlim=(0, 100), xlabel="% of time")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def draw(path: Path, tracks: dict[str, Laps]) -> None:
    """Draw the last updates of all processes, and the shares of all their time, as a picture.

    Args:
        path: where to (PNG, PDF, SVG).
        tracks: what each process did when.

    Raises:
        ConfigError: the name does not end in a format that can be written.
        MissingExtraError: without the `plot` extra.
    """
    shares = grouped({name: seconds(laps) for name, laps in tracks.items()})
    rows = min(len(tracks), _MOST_BARS)
    size = (10, 2.2 + 0.22 * rows + 0.4 * len(shares))
    figure = plotting.library().figure.Figure(figsize=size, layout="constrained")
    above, below = figure.subplots(2, height_ratios=[0.22 * rows + 0.6, 0.4 * len(shares) + 0.6])
    draw_timeline(above, tracks, *window(tracks), most=_MOST_BARS)
    above.set_title("The last updates", loc="left", fontsize="medium")
    draw_shares(below, shares)
    below.set_title("All the time", loc="left", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=8, fontsize="small", frameon=False)
    plotting.save(figure, path)


def arrays(laps: Laps) -> tuple[Array, Array]:
    """Index of the span, and seconds, of each lap."""
    took = np.diff(np.array(laps.ends), prepend=laps.begin)
    return np.frombuffer(bytes(laps.spans), np.uint8), took


def seconds(laps: Laps) -> dict[str, float]:
    """By span."""
    span, took = arrays(laps)
    totals = np.bincount(span, took, len(SPANS))
    return {name: float(s) for name, s in zip(SPANS, totals, strict=True) if s > 0.0}


def style(span: str) -> dict[str, Any]:
    """How matplotlib is to fill an area of this span."""
    striped = {"hatch": "/////", "edgecolor": STRIPE} if span == "wait" else {}
    return {"facecolor": COLORS[span], "linewidth": 0.0, **striped}


def grouped(shares: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Seconds by span of each learner, and of all samplers together: "samplers (24)"."""
    groups = {name: shares[name] for name in in_order(list(shares)) if is_learner(name)}
    samplers = [of for name, of in shares.items() if not is_learner(name)]
    if samplers:
        spans = {span for of in samplers for span in of}
        together = {s: sum(of.get(s, 0.0) for of in samplers) for s in SPANS if s in spans}
        groups[f"samplers ({len(samplers)})"] = together
    return groups


def perfetto(tracks: dict[str, Laps]) -> dict[str, Any]:
    """Laps in the Chrome trace event format, which ui.perfetto.dev opens.

    Returns:
        `traceEvents`: names of processes, and complete events (µs from the earliest lap on).
    """
    return {"traceEvents": list(_events(tracks)), "displayTimeUnit": "ms"}


def write_trace(path: Path, tracks: dict[str, Laps]) -> None:
    """Write `perfetto(tracks)` as JSON, event by event: in little memory, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for i, event in enumerate(_events(tracks)):
                file.write(",\n" if i else "\n")
                file.write(json.dumps(event))
            file.write("\n]}\n")
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(
            f"The trace {path} cannot be written: {error.strerror or error}.\n"
            "Name a file in a folder that exists and has room."
        ) from None


def _events(tracks: dict[str, Laps]) -> Iterator[dict[str, Any]]:
    names = in_order(list(tracks))
    origin = min((tracks[name].begin for name in names), default=0.0)
    for pid, name in enumerate(names, start=1):
        of = {"ph": "M", "pid": pid, "tid": pid}
        yield of | {"name": "process_name", "args": {"name": name}}
        yield of | {"name": "process_sort_index", "args": {"sort_index": pid}}
        laps, category = tracks[name], "learner" if is_learner(name) else "sampler"
        # In whole tenths of a microsecond, so that an event ends exactly where the next begins.
        knots = np.concatenate([[laps.begin], np.array(laps.ends)]) - origin
        tenths = np.maximum.accumulate(np.rint(knots * 1e7).astype(np.int64)).tolist()
        for span, begin, end in zip(laps.spans, tenths, tenths[1:], strict=False):
            yield {
                "ph": "X",
                "name": SPANS[span],
                "cat": category,
                "pid": pid,
                "tid": pid,
                "ts": begin / 10,
                "dur": (end - begin) / 10,
            }


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


# Where the seconds of a run went: by process and span, and what samplers waited for.


FOR_SAMPLERS, FOR_LEARNER = "wait for samplers", "wait for learner"
"""What the `wait` of a sampler is parted in: the first one is lock-step waste, or a queue that was
empty; the second one is a learner that learns."""


def by_process(tracks: dict[str, Laps], begin: float = 0.0) -> dict[str, dict[str, float]]:
    """Seconds by span of each process, `wait` of samplers in two parts.

    Args:
        tracks: what each process did when.
        begin: what ended before is left out (seconds since 1970).
    """
    tracks = {name: since(laps, begin) for name, laps in tracks.items()}
    found = {}
    for name, laps in tracks.items():
        found[name] = seconds(laps)
        if not is_learner(name) and "wait" in found[name]:
            rank = name.partition(",")[0] if "," in name else "learner"
            waited = found[name].pop("wait")
            both = _both_wait(laps, tracks[rank]) if rank in tracks else 0.0
            found[name] |= {FOR_SAMPLERS: both, FOR_LEARNER: max(0.0, waited - both)}
    return found


def since(laps: Laps, begin: float) -> Laps:
    """What was done later."""
    first = int(np.searchsorted(np.array(laps.ends), begin, "right"))
    later = Laps(max(laps.begin, begin))
    later.spans, later.ends = laps.spans[first:], laps.ends[first:]
    return later


def _both_wait(sampler: Laps, learner: Laps) -> float:
    """Seconds in which a sampler waits, and the learner as well: for other samplers."""
    span, took = arrays(learner)
    moments = np.concatenate([[learner.begin], learner.ends])
    waited = np.concatenate([[0.0], np.cumsum(np.where(span == _WAIT, took, 0.0))])
    span, took = arrays(sampler)
    ends = np.array(sampler.ends)[span == _WAIT]
    begins = ends - took[span == _WAIT]
    return float((np.interp(ends, moments, waited) - np.interp(begins, moments, waited)).sum())
