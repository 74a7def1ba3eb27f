"""Draws what `uneven.py` measured: sampling efficiency, by step times and contestant.

    python -m benchmarks.figure      # results/uneven.png, from results/uneven.json

And what `cluster.py` did: env steps/s, over the number of workers on Ray (by `table.py` only).
Needs matplotlib (the extra `plot`). Left out: measuring, and tables (`table.py`, which calls it).
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks import cluster
from benchmarks.harness.machine import RESULTS
from benchmarks.uneven import COMPUTING, SLEEPING

COLORS = {
    "Headrace, asynchronous": "#0b4f8a",
    "Headrace, lag 0": "#6baed6",
    "Stable-Baselines3": "#d95f02",
    "Gymnasium": "#fdae6b",
    "Tianshou": "#41ab5d",
    "RLlib": "#807dba",
}
WANTED = 0.95
"""What asynchronous sampling is to reach."""


def panels(results):
    """By title, the tables by what stands below their bars; a panel without tables is left out."""
    found = {
        prefix: {
            title.removeprefix(f"{prefix}: "): table
            for title, table in results["tables"].items()
            if title.startswith(f"{prefix}: ")
        }
        for prefix in (SLEEPING, COMPUTING)
    }
    return {title: tables for title, tables in found.items() if tables}


def bars(tables):
    """By the name in the legend, (place, share of the limit) of each bar; those without: none."""
    found = {}
    for place, table in enumerate(tables.values()):
        for row in table["contestants"]:
            # How many are waited for, or run, differs between the panels: not in the legend.
            name = row["name"] if row["name"] in COLORS else row["name"].partition(",")[0]
            bars_of = found.setdefault(name, [])
            if row["of_limit"] is not None:
                bars_of.append((place, row["of_limit"]))
    return found


def draw(results, output):
    """Draw `results` (as in `uneven.json`) into the file `output`.

    Raises:
        ModuleNotFoundError: without matplotlib.
        ValueError: nothing in them can be drawn.
    """
    from matplotlib.figure import Figure

    found = panels(results)
    if not found:
        raise ValueError(f"no table begins with {SLEEPING!r} or {COMPUTING!r}")
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    widths = [len(tables) for tables in found.values()]
    all_axes = figure.subplots(1, len(found), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (title, tables) in zip(all_axes, found.items(), strict=True):
        of = bars(tables)
        width = 0.84 / len(of)
        for number, (name, drawn) in enumerate(of.items()):
            left = (number - (len(of) - 1) / 2) * width
            places, shares = (
                [place + left for place, _ in drawn],
                [100 * share for _, share in drawn],
            )
            axes.bar(places, shares, width, label=name, color=COLORS[name])
        axes.axhline(100 * WANTED, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=title, ylim=(0, 105))
        axes.set_xticks(range(len(tables)), [name.replace(", ", "\n") for name in tables])
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[0].set_ylabel("sampling efficiency, %")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(output, dpi=120)


def scaled(results):
    """By number of workers on Ray: (median, least, most) env steps/s; those that failed: none."""
    rows = results["tables"].get(cluster.SCALED, {"contestants": []})["contestants"]
    return {
        int(row["name"].partition(" ")[0]): (row["median"], row["min"], row["max"])
        for row in rows
        if row["median"] is not None
    }


def draw_scaled(results, output):
    """Draw `results` (as in `cluster.json`) into the file `output`, beside the ideal line.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.figure import Figure

    found = scaled(results)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ends = [0, max(found)]
    rate = 1000 / cluster.SCALING_MS
    ideal = f"{cluster.SCALING_MS} ms a step, and nobody waits"
    axes.plot(ends, [rate * count for count in ends], color="black", linewidth=0.8, label=ideal)
    medians, least, most = zip(*found.values(), strict=True)
    spread = [
        [median - low for median, low in zip(medians, least, strict=True)],
        [high - median for median, high in zip(medians, most, strict=True)],
    ]
    color = COLORS["Headrace, asynchronous"]
    axes.errorbar(list(found), medians, spread, fmt="o-", color=color, label="Headrace", capsize=3)
    axes.set(xlabel="workers on Ray", ylabel="env steps/s", xlim=0, ylim=0)
    axes.set_xticks(list(found))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "uneven.json", metavar="JSON")
    parser.add_argument("--output", type=Path, metavar="PNG", help="default: beside the results")
    args = parser.parse_args()
    output = args.output or args.results.with_suffix(".png")
    try:
        draw(json.loads(args.results.read_text()), output)
    except ModuleNotFoundError as error:
        sys.exit(f"No figure ({error}). To install what it needs: pip install 'headrace[plot]'")
    except ValueError as error:
        sys.exit(f"No figure of {args.results}: {error}")
    print(f"Written: {output}")


if __name__ == "__main__":
    main()
