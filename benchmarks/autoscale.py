"""Does `headrace autoscale` find sizes that train about as fast as any?

For each work: the search, with its time; a full grid of sizes, each trained once for a while by
`headrace train --stop-after-s`, which knows nothing of trials; then the found sizes and the grid's
best again, in turns. All of them have the batch that the search has to keep, if there is one.
Writes results/autoscale.json.

    python -m benchmarks.autoscale                  # all; about half an hour on two cores
    python -m benchmarks.autoscale --only Cart      # those with this in their name
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headrace
from benchmarks.harness.machine import RESULTS, ROOT, cores, machine
from benchmarks.harness.turns import IDLE_LOAD
from headrace.config.checks import largest_divisor
from headrace.config.resolve import resolve

NAME, FIGURE = "autoscale", "env_steps_per_s"


@dataclass(frozen=True)
class Work:
    """What is searched, and its grid.

    Attributes:
        name: in tables.
        env: to train on.
        learners, workers, envs, steps: the grid's lines; workers and envs are those of all
            learners. No steps: the batch stays as it is.
        seconds: that each point of the grid is trained, with its start.
        settings: that are fixed.
    """

    name: str
    env: str
    learners: tuple[int, ...]
    workers: tuple[int, ...]
    envs: tuple[int, ...]
    steps: tuple[int, ...] = ()
    seconds: float = 12.0
    settings: dict[str, Any] = field(default_factory=dict)

    def grid(self) -> Iterator[dict[str, int]]:
        """Sizes that can be."""
        run = resolve({"env": self.env} | self.settings).run
        batch = run.num_envs * run.num_steps
        for learners, workers, envs in itertools.product(self.learners, self.workers, self.envs):
            for steps in self.steps or (batch // envs,):
                sizes = {"num_learners": learners, "num_envs": envs, "num_steps": steps}
                share, each = envs // learners, workers // learners
                if not self.steps:
                    if batch % envs or envs % learners or workers % learners or each > share:
                        continue
                    vector = largest_divisor(share, share // max(1, each))
                    sizes |= {"num_workers": workers, "envs_per_vector": vector}
                try:
                    resolve({"env": self.env} | self.settings | sizes)
                except headrace.HeadraceError:  # minibatches, for example
                    continue
                yield sizes


def works() -> list[Work]:
    """Must all reach 90 % of the best."""
    few = tuple(n for n in (0, 1, 2, 4, 8) if n <= 2 * cores())
    learners = tuple(n for n in (1, 2, 4, 8) if n <= cores())
    return [
        Work("CartPole", "CartPole-v1", learners, few, (4, 8, 16, 32, 64), seconds=8.0),
        Work("HalfCheetah", "HalfCheetah-v5", learners, few, (4, 8, 16, 32), seconds=9.0),
        Work(
            "Uneven", "benchmarks.peers.uneven:Uneven", (1,), (0, 2, 8, 32, 128), (8, 32, 128),
            seconds=20.0,
        ),
        Work(
            "TagGridWorld", "headrace/TagGridWorld-v0", learners, (0,),
            (500, 1000, 2000, 4000, 8000), (20, 40), seconds=10.0,
        ),
    ]  # fmt: skip


def train(work: Work, sizes: dict[str, int], seconds: float) -> float | None:
    """Env steps/s of a training; None: it failed."""
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in (work.settings | sizes).items()
    ]
    with tempfile.TemporaryDirectory() as scratch:
        words = ["train", work.env, *flags, "--stop-after-s", str(seconds), "--json"]
        words += ["--total-env-steps", str(10**10), "--run-dir", f"{scratch}/run"]
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *words], cwd=ROOT, capture_output=True, text=True
        )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    summary = json.loads(done.stdout.splitlines()[-1])
    if summary[FIGURE] is not None:
        return float(summary[FIGURE])
    # One update, which took all the time: what came before it is not much.
    return float(summary["env_steps"] / (summary["wall_s"] - summary["meter"]["start"]))


def told(sizes: dict[str, int]) -> str:
    """In words."""
    return " ".join(f"{name.removeprefix('num_')}={n}" for name, n in sizes.items())


def measure(
    work: Work,
    *,
    budget_s: float,
    seconds: float,
    turns: int,
    points: int | None,
    grid: list[dict[str, Any]],
) -> dict[str, Any]:
    """The search, the grid (unless there is one), and the best of both in turns; plain data."""
    began = time.perf_counter()
    found = headrace.autoscale(work.env, budget_s=budget_s, again=True, **work.settings)
    took_s = time.perf_counter() - began
    print(f"{work.name}: found {told(found.settings)} in {took_s:.1f} s", flush=True)
    for sizes in () if grid else itertools.islice(work.grid(), points):
        rate = train(work, sizes, seconds)
        grid.append({"sizes": sizes, FIGURE: rate})
        print(f"{work.name}: {told(sizes)}: {rate and round(rate)}", flush=True)
    best = max(grid, key=lambda point: point[FIGURE] or 0.0)["sizes"]
    rates: dict[str, list[float | None]] = {"found": [], "best": []}
    both = [("found", found.settings), ("best", best)]
    for _ in range(turns):
        for name, sizes in both:
            rates[name].append(train(work, sizes, 2 * seconds))
        both.reverse()  # neither is always the second one
    median = {name: statistics.median(r or 0.0 for r in of) for name, of in rates.items()}
    share = median["found"] / median["best"] if median["best"] else 0.0
    print(f"{work.name}: found / best of {len(grid)} = {share:.2f}", flush=True)
    return {
        "env": work.env,
        "search_s": took_s,
        "found": found.settings,
        "trials": found.trials,
        "grid": grid,
        "best": best,
        "turns": rates,
        "median": median,
        "of_best": share,
    }


def tables(result: dict[str, Any]) -> str:
    """For docs/scaling.md."""
    rows = [
        "| environment | search | found | of a grid, the best | found / best |",
        "|---|---|---|---|---|",
    ]
    for of in result["works"].values():
        rates = of["median"]
        best = f"{told(of['best'])}: {rates['best']:,.0f}"
        if of["found"] == of["best"]:
            best = "the same"
        rows.append(
            f"| {of['env'].rpartition(':')[2]} | {of['search_s']:.0f} s | {told(of['found'])}: "
            f"{rates['found']:,.0f} | {best} ({len(of['grid'])} tried) | "
            f"{of['of_best']:.2f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Measure, and write down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="works with this in their name")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=80.0, help="of a search")
    parser.add_argument("--seconds", type=float, help="of each point; default: those of the work")
    parser.add_argument("--points", type=int, help="only so many of each grid: for a look")
    parser.add_argument("--keep-grid", action="store_true", help="of the results that are there")
    parser.add_argument("--output", type=Path, default=RESULTS / "autoscale.json")
    flags = parser.parse_args()
    where = machine()
    if where["load_average_at_start"] > IDLE_LOAD:
        print(f"The machine is busy: load {where['load_average_at_start']:.1f}", file=sys.stderr)
    results: dict[str, Any] = {}
    if flags.output.exists() and (flags.only or flags.keep_grid):
        results = json.loads(flags.output.read_text())["works"]
    for work in works():
        if flags.only not in work.name:
            continue
        results[work.name] = measure(
            work,
            budget_s=flags.budget_s,
            seconds=flags.seconds or work.seconds,
            turns=flags.turns,
            points=flags.points,
            grid=results[work.name]["grid"] if flags.keep_grid else [],
        ) | {"machine": where}
        flags.output.write_text(json.dumps({"machine": where, "works": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
