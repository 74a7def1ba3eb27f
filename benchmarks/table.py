"""Makes the tables of benchmarks/README.md and docs/ from the results that are there.

    python -m benchmarks.table      # rewrites the pages between markers, and draws the figures

The first table has what Headrace reached, beside the best peer and the limit; the others have all
contestants. Left out: measuring, drawing (`figure.py`, `front_page.py`).
"""

import json
from functools import partial
from pathlib import Path

from benchmarks import (
    autoscale,
    cluster,
    cluster_bytes,
    diagnosis,
    dqn,
    export,
    figure,
    front_page,
    gpu,
    gpu_steps,
    losses,
    minibatch,
    offline,
    own_topology,
    predict,
    replay,
    replay_ratio,
    tag,
    topology,
    uneven,
)
from benchmarks.games import classic, league, matrix, speed, spread, taggers
from benchmarks.harness.machine import RESULTS, ROOT
from benchmarks.harness.turns import number, why_not
from benchmarks.tune import cartpole as tune_cartpole
from benchmarks.tune import helped as tune_helped
from benchmarks.tune import population as tune_population

FILES = (
    "limits", "cartpole", "cheetah", "atari", "uneven", "lag", "kernels", "start", "guards",
    "cluster", "dqn", "replay_ratio", "replay",
)  # fmt: skip
"""In the order of the tables; one that has not been measured is left out."""
NOT_IN_ALL = ("inference",)
"""Measured by themselves: works in rows, and two contestants beside each other."""
PARTS = {
    predict: "docs/profile.md",
    diagnosis: "docs/profile.md",
    autoscale: "docs/scaling.md",
    topology: "docs/scaling.md",
    own_topology: "docs/scaling.md",
    gpu: "docs/scaling.md",
    gpu_steps: "docs/scaling.md",
    offline: "docs/offline.md",
    export: "docs/export.md",
    losses: "docs/plan.md",
    minibatch: "benchmarks/README.md",
    tune_cartpole: "benchmarks/README.md",
    tune_helped: "benchmarks/README.md",
    tune_population: "benchmarks/README.md",
    classic: "docs/environments.md",
    spread: "docs/environments.md",
    matrix: "docs/leagues.md",
    taggers: "docs/leagues.md",
}
"""Scripts whose tables stand in a page of their own, between markers with their name."""
WHOLE = {
    "parallel": "docs/sac.md",
    "continuous": "docs/sac.md",
    "waiting": "docs/scaling.md",
    speed.NAME: "docs/environments.md",
    league.NAME: "docs/leagues.md",
}
"""Comparisons whose tables of all contestants stand in such a page."""
HEADLINES = {
    "PPO training, CartPole-v1": (
        "Headrace, 2 learners",
        "Headrace, 2 workers",
        "Headrace, inline",
        "Headrace, 1 core",
    ),
    "CartPole-v1, from the start of the process until it is solved": ("Headrace, its preset",),
    "PPO training, HalfCheetah-v5": (
        "Headrace, 2 learners",
        "Headrace, 2 workers",
        "Headrace, inline",
    ),
    "Stepping, Breakout, 8 environments": ("Headrace, 8 envs",),
    "Stepping, Breakout, 32 environments": ("Headrace, 32 envs",),
    "PPO training, Breakout": ("Headrace", "Headrace, bf16"),
    **{each.title: (uneven.ASYNCHRONOUS,) for each in uneven.comparisons()},
    "CartPole, 16,384 environments alone": ("2 processes", "one thread"),
    "TagGridWorld, 5 agents, 2,000 environments alone": ("2 processes",),
    "TagContinuous, 110 agents, 100 environments alone": ("2 processes",),
    "PPO training, headrace/CartPole-v1, 1,024 environments": ("2 learners", "1 learner"),
    "headrace/CartPole-v1, from the start of the process until it is solved": ("1 learner",),
    "PPO training, headrace/TagGridWorld-v0": ("2 learners",),
    "PPO training, headrace/TagContinuous-v0": ("2 learners",),
    "Start of 24 workers": ("Headrace, 24 workers",),
    cluster.UNEVEN: (cluster.RAY_24,),
    **{each.title: (cluster.RAY,) for each in cluster.costs()},
    cluster.SCALED: ("24 workers",),
    **{title: ("Headrace",) for title in dqn.TITLES.values()},
    dqn.TITLES["breakout"]: ("Headrace", "Headrace, bf16"),
    replay_ratio.TITLE: ("no flags of topology",),
    **{replay.title(env): ("Headrace",) for env in replay.ENV_STEPS},
}
"""What the first table shows: title of a table -> its contestants."""


def load(folder, names=FILES):
    """Results by benchmark, of those that are there."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def spread(row):
    """Median, with the least and the most of the turns."""
    if row["median"] is None:
        return why_not(row)
    return f"{number(row['median'])} ({number(row['min'])} to {number(row['max'])})"


def times(ratio):
    return f"{ratio:.2f} x" if ratio else "-"


def share(ratio):
    return f"{ratio:.0%}" if ratio else "-"


def best_peer(table):
    """The row that the others are compared with, if there is one."""
    peers = [row for row in table["contestants"] if row["of_best_peer"] and row["is_peer"]]
    return max(peers, key=lambda row: row["of_best_peer"], default=None)


def tables(found):
    """Title and table, in order."""
    return [(title, of) for results in found.values() for title, of in results["tables"].items()]


def headlines(found):
    """The first table: Headrace beside the best peer and the limit."""
    lines = ["| | Headrace | best peer | of the peer | of the limit |", "|---|---|---|---|---|"]
    ratios = []
    for title, table in tables(found):
        rows = {row["name"]: row for row in table["contestants"]}
        peer = best_peer(table)
        beside = f"{peer['name']}: {number(peer['median'])}" if peer else "-"
        lines += [
            f"| {title} ({table['work']['unit']}) | {name.removeprefix('Headrace, ')}: "
            f"{spread(rows[name])} | {beside} | {times(rows[name]['of_best_peer'])} "
            f"| {share(rows[name]['of_limit'])} |"
            for name in HEADLINES.get(title, ())
            if name in rows
        ]
        ratios += [
            f"{title}, {name}: {ratio['of_medians']:.3f}."
            for name, ratio in table["ratios"].items()
        ]
    return "\n".join([*lines, *([""] if ratios else []), *ratios, "", *where(found)])


def whole(found):
    """All contestants of all tables, and what else was measured of them."""
    lines = []
    for title, table in tables(found):
        also = list(dict.fromkeys(name for row in table["contestants"] for name in row["also"]))
        columns = [table["work"]["unit"], "of the best peer", "of the limit", *also]
        lines += ["", f"**{title}**", "", f"| | {' | '.join(columns)} |"]
        lines += ["|---" * (1 + len(columns)) + "|"]
        for row in table["contestants"]:
            cells = [spread(row), times(row["of_best_peer"]), share(row["of_limit"])]
            cells += [number(row["also"][name]) if name in row["also"] else "-" for name in also]
            lines.append(f"| {row['name']} | {' | '.join(cells)} |")
        for name, ratio in table["ratios"].items():
            turns = ", ".join(f"{each:.3f}" for each in ratio["of_turns"])
            lines += ["", f"{name}: {ratio['of_medians']:.3f} (in each turn: {turns})"]
    if figure.panels(found.get("uneven", {"tables": {}})):
        lines += ["", "![Sampling efficiency by step times and contestant](results/uneven.png)"]
    if figure.scaled(found.get("cluster", {"tables": {}})):
        lines += ["", "![Env steps/s over workers on Ray](results/cluster_scaling.png)"]
    return "\n".join([*lines[1:], "", *where(found)])


def side_by_side(found):
    """A row for each table of two contestants."""
    lines = []
    for results in found.values():
        first = next(iter(results["tables"].values()))
        names = [row["name"] for row in first["contestants"]]
        also = list(dict.fromkeys(key for row in first["contestants"] for key in row["also"]))
        columns = [f"{name} ({first['work']['unit']})" for name in names]
        columns += [*first["ratios"], "in each turn"]
        columns += [f"{key}: {name}" for key in also for name in names]
        lines += ["", f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for title, table in results["tables"].items():
            rows = table["contestants"]
            cells = [spread(row) for row in rows]
            for ratio in table["ratios"].values():
                cells += [times(ratio["of_medians"]), ", ".join(map(times, ratio["of_turns"]))]
            cells += [share(row["also"].get(key)) for key in also for row in rows]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *where(found)]) if found else ""


def where(found):
    """The machines and commits that these results are of.

    A table that was measured apart (`--only`) may have a `machine` of its own.
    """
    named = {}
    for name, results in found.items():
        tables = results.get("tables", {}).items()
        own = [(title, of["machine"]) for title, of in tables if "machine" in of]
        for what, machine in [(name, results["machine"]), *own]:
            commit = (machine["git_commit"] or "unknown")[:7]
            edited = ", with changes" if machine["git_uncommitted_changes"] else ""
            made = f"{machine['date'][:10]}, commit {commit}{edited}"
            key = f"{machine['cores']} cores, {machine['cpu']}, {made}"
            named.setdefault(key, []).append(what)
    return [f"{', '.join(names)}: {key}." for key, names in named.items()]


def filled_in(page, content, name="bench"):
    """The page, with `content` between the markers of a name; ValueError: there are none."""
    begins, ends = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, begin, rest = page.partition(begins)
    _, end, tail = rest.partition(ends)
    if not begin or not end:
        raise ValueError(f"expected {begins} and then {ends}")
    return f"{head}{begins}\n{content}\n{ends}{tail}"


def pages(root=ROOT, results=RESULTS):
    """Each page as it is to be, by its path."""
    found, more = load(results), load(results, NOT_IN_ALL)
    of_all = whole(found) + ("\n" + side_by_side(more) if more else "")
    if held := load(results, (cluster_bytes.NAME,)):
        told = [cluster_bytes.tables(held[cluster_bytes.NAME]), "", *where(held)]
        of_all += "\n\n" + "\n".join(told)
    made = {root / "benchmarks/README.md": of_all}
    if games := load(results, ("tag",)):
        made[root / "docs/tag.md"] = "\n".join([tag.tables(games["tag"]), "", *where(games)])
    whole_pages = {path: filled_in(path.read_text(), content) for path, content in made.items()}
    page = whole_pages[root / "benchmarks/README.md"]
    whole_pages[root / "benchmarks/README.md"] = filled_in(page, headlines(found), "headlines")
    contents = [(part.NAME, page, partial(of_part, part)) for part, page in PARTS.items()]
    contents += [(name, page, whole) for name, page in WHOLE.items()]
    for name, page, content in contents:
        if held := load(results, (name,)):
            path = root / page
            before = whole_pages.get(path) or path.read_text()
            whole_pages[path] = filled_in(before, content(held), name)
    return whole_pages


def of_part(part, found):
    """What a script of `PARTS` shows, and where it was measured."""
    return "\n".join([part.tables(found[part.NAME]), "", *where(found)])


def main():
    for path, page in pages().items():
        path.write_text(page)
        print(f"Written: {Path(path).relative_to(ROOT)}")
    front_page.main()
    results = load(RESULTS).get("uneven", {"tables": {}})
    if figure.panels(results):
        figure.draw(results, RESULTS / "uneven.png")
        print("Written: benchmarks/results/uneven.png")
    results = load(RESULTS).get("cluster", {"tables": {}})
    if figure.scaled(results):
        figure.draw_scaled(results, RESULTS / "cluster_scaling.png")
        print("Written: benchmarks/results/cluster_scaling.png")
    if games := load(RESULTS, ("tag",)):
        tag.draw(games["tag"], RESULTS / "tag.png")
        print("Written: benchmarks/results/tag.png")


if __name__ == "__main__":
    main()
