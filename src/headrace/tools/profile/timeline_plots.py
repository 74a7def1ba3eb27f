"""Timelines of processes: pictures, shares of time, and a trace that ui.perfetto.dev opens.

A span has the same colour in all pictures. Related work has related hues; waiting is grey and
striped.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.meter import SPANS, Laps
from headrace.spec import Array
from headrace.tools import plotting
from headrace.training.calibration import lap_arrays

COLORS = {
    "start": "#5b6676",
    "env_step": "#1f6fb4",
    "env_reset": "#86bde6",
    "infer": "#e08a1e",
    "rollout": "#f3cd7f",
    "wait": "#c9cdd2",
    "transport": "#a05195",
    "replay": "#7a9a2b",
    "learn": "#12806a",
    "allreduce": "#5fb89c",
    "ranks": "#b3dccb",
    "publish": "#d8a5cf",
    "eval": "#8c2d3f",
    "log": "#94714a",
    "checkpoint": "#cf5a3c",
    "other": "#e6e2da",
}
"""Color of each span. Neighbours differ in lightness too, for colour-blind readers."""
STRIPE = "#9aa1a9"
"""Color of the stripes on `wait`."""
FOR_WORKERS, FOR_LEARNER = "wait for workers", "wait for learner"
"""Parts of a worker's `wait`: while its learner waits too (lock-step waste or an empty queue), and
while its learner learns."""

_MAX_BARS = 32
_COLUMNS, _BAR_PX, _GAP_PX, _STRIPES_PX = 1200, 26, 6, 6
_WAIT, _NOTHING = SPANS.index("wait"), len(SPANS)
_LEARNER = re.compile(r"learner|rank \d+")


def is_learner(name: str) -> bool:
    """Return True for a learner's track; False for a worker's or an inference server's."""
    return _LEARNER.fullmatch(name) is not None


def sort_tracks(names: Iterable[str]) -> list[str]:
    """Sort names of tracks: learners first, worker 2 before worker 10."""

    def key(name: str) -> Any:
        words = re.split(r"(\d+)", name)
        return not is_learner(name), [int(w) if w.isdigit() else w for w in words]

    return sorted(names, key=key)


def last_updates(tracks: dict[str, Laps], updates: int = 3) -> tuple[float, float]:
    """Return begin and end (s) of the first learner's last updates.

    An update ends when its weights have been published. All of the timeline is returned if it has
    fewer updates.
    """
    laps = tracks[sort_tracks(tracks)[0]]
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


def span_shares(laps: Laps, edges: Array) -> Array:
    """Return the share of each interval that a process spent in each span.

    Args:
        edges: `[n + 1]` seconds, ascending.

    Returns:
        `[n, len(SPANS)]`; a row adds up to less than 1 where the process has no laps.
    """
    spans, knots = lap_arrays(laps)
    first = max(0, int(np.searchsorted(knots, edges[0], "right")) - 1)
    last = int(np.searchsorted(knots, edges[-1], "left"))
    spans, knots = spans[first:last], knots[first : last + 1]
    shares = np.zeros((len(edges) - 1, len(SPANS)))
    for span in np.unique(spans):
        shares[:, span] = np.diff(np.interp(edges, knots, _seconds_until(spans, knots, span)))
    return shares / np.diff(edges)[:, None]


def _seconds_until(spans: Array, knots: Array, span: int) -> Array:
    """Return `[n + 1]` seconds in a span until each knot; it is linear between them."""
    return np.append(0.0, np.cumsum(np.where(spans == span, np.diff(knots), 0.0)))


def render_bars(tracks: dict[str, Laps], edges: Array) -> Array:
    """Render a timeline: one bar for each process, one column for each interval.

    Spans shorter than a column share its height. So the size of the picture does not depend on the
    number of laps.

    Returns:
        `[pixels down, columns, 4]`, uint8: RGBA; clear where there are no laps.
    """
    palette = np.array(
        [[*bytes.fromhex(COLORS[span][1:]), 255] for span in SPANS] + [[0, 0, 0, 0]], np.uint8
    )
    height = (np.arange(_BAR_PX)[::-1] + 0.5) / _BAR_PX
    down, across = np.indices((_BAR_PX, len(edges) - 1))
    is_stripe = (down + across) % _STRIPES_PX < _STRIPES_PX // 3
    gap = np.zeros((_GAP_PX // 2, len(edges) - 1, 4), np.uint8)
    parts = []
    for laps in tracks.values():
        until = np.cumsum(span_shares(laps, edges), axis=1)
        span = (until[None] <= height[:, None, None]).sum(axis=-1)  # len(SPANS): none
        bar = palette[np.minimum(span, _NOTHING)]
        bar[(span == _WAIT) & is_stripe, :3] = list(bytes.fromhex(STRIPE[1:]))
        parts += [gap, bar, gap]
    return np.concatenate(parts)


def draw_timeline(
    axes: Any, tracks: dict[str, Laps], begin: float, end: float, *, max_bars: int = _MAX_BARS
) -> None:
    """Draw what the first `max_bars` processes did between two moments on the laps' clock (s)."""
    names = sort_tracks(tracks)
    shown = {name: tracks[name] for name in names[:max_bars]}
    unit, scale = ("s", 1.0) if end - begin >= 2.0 else ("ms", 1e3)
    picture = render_bars(shown, np.linspace(begin, max(end, begin + 1e-6), _COLUMNS + 1))
    extent = (0.0, max(end - begin, 1e-6) * scale, len(shown), 0.0)
    axes.imshow(picture, extent=extent, aspect="auto", interpolation="none")
    axes.set_yticks(np.arange(len(shown)) + 0.5, list(shown))
    axes.tick_params(axis="y", length=0)
    left = len(names) - len(shown)
    axes.set_xlabel(unit + (f"    (and {left} more processes)" if left else ""))


def draw_shares(axes: Any, shares: dict[str, dict[str, float]]) -> None:
    """Draw one bar of 100 % for each process or group, divided by span."""
    table = np.array([[spans.get(span, 0.0) for span in SPANS] for spans in shares.values()])
    table *= 100 / np.maximum(table.sum(axis=1, keepdims=True), 1e-12)
    left = np.cumsum(table, axis=1) - table
    for i, span in enumerate(SPANS):
        if table[:, i].any():
            place = (range(len(shares)), table[:, i], 0.7, left[:, i])
            axes.barh(*place, label=span, **fill_style(span))
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set(xlim=(0, 100), xlabel="% of time")
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def draw_profile(path: Path, tracks: dict[str, Laps]) -> None:
    """Draw the last updates and the shares of time of all processes; raises as `plotting.save`."""
    shares = group_workers({name: seconds_by_span(laps) for name, laps in tracks.items()})
    rows = min(len(tracks), _MAX_BARS)
    size = (10, 2.2 + 0.22 * rows + 0.4 * len(shares))
    figure = plotting.library().figure.Figure(figsize=size, layout="constrained")
    above, below = figure.subplots(2, height_ratios=[0.22 * rows + 0.6, 0.4 * len(shares) + 0.6])
    draw_timeline(above, tracks, *last_updates(tracks))
    above.set_title("The last updates", loc="left", fontsize="medium")
    draw_shares(below, shares)
    below.set_title("All the time", loc="left", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=8, fontsize="small", frameon=False)
    plotting.save(figure, path)


def seconds_by_span(laps: Laps) -> dict[str, float]:
    """Return the total seconds of each span that occurs."""
    spans, knots = lap_arrays(laps)
    totals = np.bincount(spans, np.diff(knots), len(SPANS))
    return {name: float(s) for name, s in zip(SPANS, totals, strict=True) if s > 0.0}


def fill_style(span: str) -> dict[str, Any]:
    """Return matplotlib's keywords to fill an area of this span."""
    striped = {"hatch": "/////", "edgecolor": STRIPE} if span == "wait" else {}
    return {"facecolor": COLORS[span], "linewidth": 0.0, **striped}


def group_workers(seconds: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return seconds by span of each learner, and the mean of all workers."""
    groups = {name: seconds[name] for name in sort_tracks(seconds) if is_learner(name)}
    workers = [spans for name, spans in seconds.items() if not is_learner(name)]
    if workers:
        used = dict.fromkeys(span for spans in workers for span in spans)
        mean = {s: sum(spans.get(s, 0.0) for spans in workers) / len(workers) for s in used}
        groups[f"{len(workers)} workers, mean"] = mean
    return groups


def write_trace(path: Path, tracks: dict[str, Laps]) -> None:
    """Write laps as JSON in the Chrome trace event format, which ui.perfetto.dev opens.

    `traceEvents` has names of processes, and complete events (µs after the earliest lap). Events
    are written one by one, to need little memory. The file is complete, or ConfigError is raised.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for i, event in enumerate(_trace_events(tracks)):
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


def _trace_events(tracks: dict[str, Laps]) -> Iterator[dict[str, Any]]:
    names = sort_tracks(tracks)
    origin = min((tracks[name].begin for name in names), default=0.0)
    for pid, name in enumerate(names, start=1):
        process = {"ph": "M", "pid": pid, "tid": pid}
        yield process | {"name": "process_name", "args": {"name": name}}
        yield process | {"name": "process_sort_index", "args": {"sort_index": pid}}
        category = "learner" if is_learner(name) else "worker"
        spans, knots = lap_arrays(tracks[name])
        # In whole tenths of a microsecond, so that an event ends exactly where the next begins.
        tenths = np.maximum.accumulate(np.rint((knots - origin) * 1e7).astype(np.int64)).tolist()
        for span, begin, end in zip(spans, tenths, tenths[1:], strict=False):
            event = {"ph": "X", "name": SPANS[span], "cat": category, "pid": pid, "tid": pid}
            yield event | {"ts": begin / 10, "dur": (end - begin) / 10}


def seconds_by_process(tracks: dict[str, Laps], begin: float = 0.0) -> dict[str, dict[str, float]]:
    """Return seconds by span of each process after `begin` (s since 1970).

    The `wait` of a worker is divided into `FOR_WORKERS` and `FOR_LEARNER`.
    """
    tracks = {name: _laps_since(laps, begin) for name, laps in tracks.items()}
    seconds = {name: seconds_by_span(laps) for name, laps in tracks.items()}
    for name, laps in tracks.items():
        if not is_learner(name) and "wait" in seconds[name]:
            rank = name.partition(",")[0] if "," in name else "learner"
            waited = seconds[name].pop("wait")
            both = _common_wait(laps, tracks[rank]) if rank in tracks else 0.0
            seconds[name] |= {FOR_WORKERS: both, FOR_LEARNER: max(0.0, waited - both)}
    return seconds


def _laps_since(laps: Laps, begin: float) -> Laps:
    first = int(np.searchsorted(np.array(laps.ends), begin, "right"))
    later = Laps(max(laps.begin, begin))
    later.spans, later.ends = laps.spans[first:], laps.ends[first:]
    return later


def _common_wait(worker: Laps, learner: Laps) -> float:
    """Return the seconds in which the worker and the learner wait at the same time."""
    spans, moments = lap_arrays(learner)
    waited = _seconds_until(spans, moments, _WAIT)
    spans, knots = lap_arrays(worker)
    during = np.diff(np.interp(knots, moments, waited))
    return float(during[spans == _WAIT].sum())
