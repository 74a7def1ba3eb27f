"""Draws learning curves of presets. Left out: which, and what stands beside them (`page.py`)."""

import statistics

from headrace.tools.plotting import library

COLORS = {
    "ppo": "#0b4f8a", "appo": "#6baed6", "a2c": "#807dba", "impala": "#41ab5d", "pqn": "#999999",
    "dqn": "#d95f02", "dqn rainbow": "#e7298a", "sac": "#e6ab02", "td3": "#66a61e",
}  # fmt: skip


def draw(pictures, folder):
    """Draw a picture for each name: a panel for each task, a line for each seed.

    `pictures`: name -> (title, runs, what others reached, dashed, or None) of each panel.
    """
    for name, panels in pictures.items():
        columns = min(4, len(panels))
        rows = -(-len(panels) // columns)
        figure = library().figure.Figure(figsize=(3 * columns, 2.2 * rows), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            _panel(axes, *panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.savefig(folder / f"{name}.png", dpi=90, metadata={"Software": None})


def draw_compared(tasks, path):
    """Draw a panel for each environment, with a line for each algorithm: the mean of its seeds."""
    columns = min(4, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = library().figure.Figure(figsize=(3 * columns, 2.4 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    lines = {}
    for axes, (env, of) in zip(grid, tasks.items(), strict=False):
        for algo, task in of.items():
            (lines[algo],) = axes.plot(*_mean_curve(task["runs"]), color=COLORS[algo])
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")  # powers of ten alone have room
        axes.set_title(env, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
    for axes in grid[len(tasks) :]:
        axes.set_axis_off()
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=9, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _mean_curve(runs):
    """Env steps, and the mean over seeds, where all of them have a return."""
    curves = [
        dict(zip(run["curve"]["env_steps"], run["curve"]["mean_return"], strict=True))
        for run in runs
    ]
    shared = [step for step in curves[0] if all(curve.get(step) is not None for curve in curves)]
    return shared, [statistics.fmean(curve[step] for curve in curves) for step in shared]


def _panel(axes, title, runs, theirs):
    for run in runs:
        axes.plot(
            run["curve"]["env_steps"], run["curve"]["mean_return"], color="#0b4f8a", alpha=0.7
        )
    if theirs is not None:
        axes.axhline(theirs.mean_return, color="#d95f02", linestyle="--", linewidth=1)
    axes.set_title(title, fontsize=7)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)
