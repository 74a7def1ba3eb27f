"""Draws the picture of the README: learning curves of presets, and speed beside other trainers.

    python -m benchmarks.front_page      # results/front_page.png, from the results that are there

Needs matplotlib (the extra `plot`). Left out: measuring (`presets/`, `cartpole.py`, ...), the
tables (`table.py`, which calls this).
"""

import json
import sys

from benchmarks.harness.machine import RESULTS, ROOT

OUTPUT = RESULTS / "front_page.png"
CURVES = {
    "CartPole-v1": "CartPole-v1-ppo",
    "LunarLander-v3": "LunarLander-v3-ppo",
    "HalfCheetah-v5": "HalfCheetah-v5-ppo",
}
"""Title of a panel -> the preset's results."""
BARS = {
    ("cartpole", "PPO training, CartPole-v1"): "PPO, CartPole",
    ("cheetah", "PPO training, HalfCheetah-v5"): "PPO, HalfCheetah",
    ("atari", "PPO training, Breakout"): "PPO, Breakout",
    ("uneven", "24 environments that sleep 7 ms: rare stalls"): "24 envs, rare stalls",
    ("uneven", "24 environments that sleep 7 ms: slow resets"): "24 envs, slow resets",
}
"""(benchmark, title of its table) -> label of a group of bars."""
COLORS = {
    "Headrace": "#0b4f8a",
    "plain PPO": "#999999",
    "Stable-Baselines3": "#d95f02",
    "Sample Factory": "#e7298a",
    "Tianshou": "#41ab5d",
    "RLlib": "#807dba",
}


def best_rates(table):
    """Trainer -> env steps/s of its fastest form in a table; limits and other programs: none."""
    rates = {}
    for row in table["contestants"]:
        trainer = row["name"].partition(",")[0]
        if trainer in COLORS and row["median"] is not None and "bf16" not in row["name"]:
            rates[trainer] = max(rates.get(trainer, 0.0), row["median"])
    return rates


def groups(folder=RESULTS):
    """Label -> (trainer -> rate), for the tables that have been measured."""
    found = {}
    for (name, title), label in BARS.items():
        path = folder / f"{name}.json"
        tables = json.loads(path.read_text())["tables"] if path.exists() else {}
        if title in tables:
            found[label] = best_rates(tables[title])
    return found


def draw(folder=RESULTS, output=OUTPUT):
    """Draw the picture.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    top.suptitle(
        "Mean return over env steps: `headrace train ENV`, a line for each seed", fontsize=10
    )
    for axes, (title, name) in zip(top.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for run in json.loads((folder / "presets" / f"{name}.json").read_text())["runs"]:
            curve = run["curve"]
            axes.plot(
                curve["env_steps"],
                curve["mean_return"],
                color=COLORS["Headrace"],
                alpha=0.7,
                linewidth=1.2,
            )
        axes.set_title(title, fontsize=9)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(3, 3))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    bottom.suptitle("Env steps/s, as multiples of Stable-Baselines3 in the same run", fontsize=10)
    axes = bottom.subplots()
    measured = groups(folder)
    width = 0.84 / len(COLORS)
    labelled = set()
    for place, rates in enumerate(measured.values()):
        for number, (trainer, rate) in enumerate(rates.items()):
            share = rate / rates["Stable-Baselines3"]
            left = place + (number - (len(rates) - 1) / 2) * width
            label = None if trainer in labelled else trainer
            labelled.add(trainer)
            axes.bar(left, share, 0.95 * width, color=COLORS[trainer], label=label)
            axes.text(left, share, f"{share:.1f}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(measured)), list(measured), fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.1)
    handles, labels = axes.get_legend_handles_labels()
    bottom.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False,
                  fontsize=9)  # fmt: skip
    figure.savefig(output, dpi=110, metadata={"Software": None})


def main():
    try:
        draw()
    except ModuleNotFoundError as error:
        sys.exit(f"No picture ({error}). To install what it needs: pip install 'headrace[plot]'")
    print(f"Written: {OUTPUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
