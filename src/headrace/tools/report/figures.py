"""Figures of the page, as SVG by matplotlib.

Lines, text and grids have the colours of the style sheet (`report.css`), so that they follow its
light and dark schemes. Spans have the colours of `timeline_plots.py`.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from headrace.meter import SPANS, Laps
from headrace.spec import Array
from headrace.tools import plotting
from headrace.tools.profile.timeline_plots import draw_timeline, fill_style
from headrace.tools.runs.curves import Curve

# Placeholders for the names of the style sheet, which matplotlib does not know.
_INK, _MUTED, _GRID = "#010101", "#010102", "#010103"
_NUM_LINES = 6
_COLORS = {"ink": _INK, "muted": _MUTED, "grid": _GRID}
_COLORS |= {f"line-{i}": f"#0101{0x10 + i:02x}" for i in range(_NUM_LINES)}
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 8.0,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.facecolor": "none",
    "axes.grid.axis": "y",
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.4,
    "lines.solid_joinstyle": "round",
    "xtick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "xtick.major.size": 3.0,
    "ytick.color": _GRID,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0.0,
}
_SMALL, _WIDER, _LARGE = (3.5, 1.75), (4.6, 1.75), (7.6, 3.6)


def small(name: str, curves: Mapping[int, Curve], *, mark: Curve | None = None) -> Markup:
    """Draw a metric over env steps: a curve for each policy (-1: all policies), and points.

    A single curve has its range.
    """

    def draw(axes: Any) -> None:
        _draw_curves(axes, curves, with_ranges=len(curves) == 1)
        if mark is not None:
            axes.plot(mark.env_steps, mark.mean, "o", color=_INK, markersize=2.6, zorder=3)

    return _svg(f"{name} over env steps", _SMALL, draw)


def large(name: str, curves: Mapping[int, Curve], faint: Iterable[Curve] = ()) -> Markup:
    """Draw a metric of several groups of runs over env steps, each with its range.

    Args:
        faint: curves that are drawn below these without a colour.
    """

    def draw(axes: Any) -> None:
        for curve in faint:
            axes.plot(curve.env_steps, curve.mean, color=_MUTED, alpha=0.35, linewidth=0.8)
        _draw_curves(axes, curves, with_ranges=True)
        axes.locator_params(nbins=8)
        axes.set(xlabel="env steps")

    return _svg(f"{name} over env steps", _LARGE, draw)


def parallel(
    name: str, axis_names: Sequence[str], lines: Mapping[int, Sequence[float]], faint: Any
) -> Markup:
    """Draw parallel coordinates: an upright axis for each name, a line for each point.

    Args:
        lines: number of a colour -> places on the axes, from 0 (the lower end) to 1.
        faint: such places, of lines that are drawn without a colour.
    """

    def draw(axes: Any) -> None:
        x = range(len(axis_names))
        for places in faint:
            axes.plot(x, places, color=_MUTED, alpha=0.3, linewidth=0.8)
        for number, places in lines.items():
            style = "--" if _is_dashed(number) else "-"
            axes.plot(x, places, color=_COLORS[line_color(number)], linestyle=style, zorder=2)
        axes.set_xticks(list(x), axis_names, rotation=25, ha="right")
        axes.set_yticks([])
        axes.set(ylim=(-0.04, 1.04), xlim=(-0.1, len(axis_names) - 0.9))
        axes.grid(True, axis="x")

    return _svg(name, _LARGE, draw)


def _draw_curves(axes: Any, curves: Mapping[int, Curve], *, with_ranges: bool) -> None:
    for number, curve in curves.items():
        color, x = _COLORS[line_color(number)], curve.env_steps
        if with_ranges and (curve.high > curve.low).any():
            axes.fill_between(
                x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0, zorder=1
            )
        marker = "." if len(x) == 1 else ""
        style = "--" if _is_dashed(number) else "-"
        axes.plot(x, curve.mean, color=color, linestyle=style, marker=marker, zorder=2)
    axes.grid(True)
    axes.locator_params(axis="x", nbins=4)
    axes.locator_params(axis="y", nbins=4)
    axes.xaxis.set_major_formatter(_short)
    axes.yaxis.set_major_formatter(_short)
    axes.margins(x=0.01, y=0.08)


def over_time(name: str, wall_s: Array, seconds: Array) -> Markup:
    """Draw shares of time by span over wall time, as stacked areas.

    Args:
        wall_s: `[n]` ends of the intervals.
        seconds: `[n, len(SPANS)]` seconds in each interval.
    """
    shares = 100 * seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-12)
    ends, unit = _scale_time(wall_s)

    def draw(axes: Any) -> None:
        edges, base = np.append(0.0, ends), np.zeros(len(ends))
        for span, share in zip(SPANS, shares.T, strict=True):
            if share.any():
                axes.stairs(base + share, edges, baseline=base, fill=True, **fill_style(span))
            base = base + share
        axes.set(ylim=(0, 100), xlim=(0, edges[-1]), xlabel=unit)
        axes.set_yticks([0, 50, 100], ["0", "50 %", "100 %"])
        axes.locator_params(axis="x", nbins=5)

    return _svg(f"Shares of time, {name}, over wall time", _WIDER, draw)


def timeline(tracks: dict[str, Laps], begin: float, end: float) -> Markup:
    """Draw the spans of each process between two moments."""
    size = (10.8, 0.55 + 0.26 * min(len(tracks), 32))
    return _svg("Timeline", size, lambda axes: draw_timeline(axes, tracks, begin, end))


def line_color(number: int) -> str:
    """Return the style sheet's name of a policy's colour; the last one is for all policies."""
    return f"line-{-1 % _NUM_LINES if number < 0 else number % (_NUM_LINES - 1)}"


def line_fill(number: int) -> str:
    """Return the CSS background that stands for a line in a legend."""
    color = f"var(--{line_color(number)})"
    striped = f"repeating-linear-gradient(90deg, {color} 0 4px, transparent 4px 6px)"
    return striped if _is_dashed(number) else color


def _is_dashed(number: int) -> bool:
    """Return whether a line is dashed: every other round of the colours."""
    return number >= 0 and number // (_NUM_LINES - 1) % 2 == 1


def _scale_time(wall_s: Array) -> tuple[Array, str]:
    longest = wall_s[-1] if len(wall_s) else 0.0
    for scale, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * scale:
            return wall_s / scale, unit
    return wall_s, "seconds"


def _short(value: float, _position: int | None = None) -> str:
    """Format a tick: 20k for 20000, 3e-05 for 0.00003."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{letter}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _svg(label: str, size: tuple[float, float], draw: Callable[[Any], None]) -> Markup:
    """Draw a figure of `size` inches as an SVG element."""
    library, file = plotting.library(), io.StringIO()
    with library.rc_context({**_SETTINGS, "svg.hashsalt": label}):
        figure = library.figure.Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg)
    # Keep only ids that are referred to: ids must be unique on a page with several figures.
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    for name, color in _COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    # Coordinates in hundredths of a point.
    svg = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d{2})\d+", r"\1", m[0]), svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    opening = f'<svg {view[0]} role="img" aria-label="{escape(label)}">'
    return Markup(re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip())
