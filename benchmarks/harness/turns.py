"""Lets contestants run in turns (A B C A B C ...), and says how fast each was.

In turns, because a shared machine is faster now and slower then, and so all of them get some of
both. The limits of the machine take their turns among the others, so that a share of a limit is
one of the same minutes. Left out: one turn (`one_turn.py`), who takes part (`contestants.py`), what
is compared (`cartpole.py` and others), tables for documents (`table.py`).
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.machine import RESULTS, machine
from benchmarks.harness.one_turn import TurnError, Work, take_turn

IDLE_LOAD = 0.5


@dataclass(frozen=True)
class Comparison:
    """One table.

    Attributes:
        title: of the table.
        contestants: in this order, in each turn.
        work: of a turn.
        also: what else is taken from a result, by what tables call it.
        ratios: by name, two contestants: how many times as fast the first is as the second.
        limit: the best possible figure: a number, or a function of a turn's result if it differs
            between turns. A contestant with `is_limit` measures it instead, where one can.
        turns: if it needs another number of them than the benchmark has.
    """

    title: str
    contestants: Sequence[Contestant]
    work: Work
    also: Mapping[str, Callable[[dict[str, Any]], float | None]] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    limit: float | Callable[[dict[str, Any]], float] | None = None
    turns: int | None = None


def compare(comparison: Comparison, turns: int) -> dict[str, Any]:
    """Let contestants run in turns.

    Returns:
        Plain data: the work, `ratios`, and `contestants`, with `turns` (the figure of each),
        `median`, `min`, `max`, `of_best_peer` (how many times as fast) and `of_limit` (share) of
        each, and `mean_returns` at the end of each turn, which show that it has learned. One that
        is `missing` or has `failed` says so, and has no median; a failure ends its part.
    """
    rows = [_row(contestant) for contestant in comparison.contestants]
    for turn in range(turns):
        for contestant, row in zip(comparison.contestants, rows, strict=True):
            if row["missing"] or row["failed"] or turn >= (contestant.turns or turns):
                continue
            try:
                result = take_turn(contestant, comparison.work, turn=turn)
                also = {name: of(result) for name, of in comparison.also.items()}
            except TurnError as error:
                row["failed"] = f"turn {turn + 1}: {error}"
                print(f"{contestant.name}: failed in {row['failed']}", flush=True)
                continue
            figure = float(result[comparison.work.figure])
            row["turns"].append(figure)
            row["mean_returns"].append(result.get("mean_return"))
            row["meters"].append(result.get("meter"))
            row["also_turns"].append(also)
            if callable(comparison.limit):
                row["limits"].append(comparison.limit(result))
            print(f"turn {turn + 1}/{turns}  {contestant.name}: {number(figure)}", flush=True)
    for row in rows:
        _summarize(row)
    _relate(rows, comparison)
    return {
        "work": dataclasses.asdict(comparison.work),
        "contestants": rows,
        "ratios": {
            name: ratio
            for name, pair in comparison.ratios.items()
            if (ratio := _ratio(rows, pair, comparison.work.lower_is_better))
        },
    }


def _row(contestant: Contestant) -> dict[str, Any]:
    row = contestant.describe()
    if row["missing"]:
        print(f"{contestant.name}: {row['missing']}", flush=True)
    lists = {name: [] for name in ("turns", "mean_returns", "meters", "also_turns", "limits")}
    return row | {"failed": None, "also": {}} | lists | dict.fromkeys(("median", "min", "max"))


def _summarize(row: dict[str, Any]) -> None:
    figures = row["turns"]
    also = row.pop("also_turns")
    if not figures or row["failed"]:
        return
    row |= {"median": statistics.median(figures), "min": min(figures), "max": max(figures)}
    named = {name: [each[name] for each in also if each[name] is not None] for name in also[0]}
    row["also"] = {name: statistics.median(known) for name, known in named.items() if known}


def _relate(rows: list[dict[str, Any]], comparison: Comparison) -> None:
    """Each row's median beside the best peer's and the limit's."""
    lower = comparison.work.lower_is_better
    peers = [row["median"] for row in rows if row["is_peer"] and row["median"]]
    best = (min if lower else max)(peers) if peers else None
    limits = {row["name"]: row["median"] for row in rows if row["is_limit"]}
    fixed = None if callable(comparison.limit) else comparison.limit
    first = next(iter(limits.values()), fixed)
    for row, contestant in zip(rows, comparison.contestants, strict=True):
        limit = limits[contestant.compared_with] if contestant.compared_with else first
        median = None if row["is_limit"] else row["median"]
        row["of_best_peer"] = _speed(median, best, lower)
        row["of_limit"] = _speed(median, limit, lower)
        if row["limits"] and median:
            pairs = zip(row["turns"], row["limits"], strict=True)
            shares = [_speed(figure, limit, lower) for figure, limit in pairs]
            row["of_limit"] = statistics.median(share for share in shares if share)


def _speed(figure: float | None, reference: float | None, lower_is_better: bool) -> float | None:
    """How many times as fast as the reference."""
    if not figure or not reference:
        return None
    return reference / figure if lower_is_better else figure / reference


def _ratio(
    rows: list[dict[str, Any]], pair: tuple[str, str], lower_is_better: bool
) -> dict[str, Any] | None:
    """Of the medians; and of each turn, to see how sure it is. None: one has no figure."""
    first, second = (next(row for row in rows if row["name"] == name) for name in pair)
    of_medians = _speed(first["median"], second["median"], lower_is_better)
    if of_medians is None:
        return None
    of_turns = [
        _speed(a, b, lower_is_better)
        for a, b in zip(first["turns"], second["turns"], strict=False)  # one may have taken fewer
    ]
    return {"of": list(pair), "of_medians": of_medians, "of_turns": of_turns}


def number(figure: float) -> str:
    """As tables have it: no more digits than tell something."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"


def why_not(row: dict[str, Any]) -> str:
    """What tables say of a row without a figure."""
    return row["missing"] or "FAILED in " + (row["failed"] or "").partition("\n")[0]


def table(title: str, results: dict[str, Any]) -> str:
    """The same for people, at the terminal."""
    rows = results["contestants"]
    width = max(len(row["name"]) for row in rows)
    peers = [row["name"] for row in rows if row["is_peer"]]
    of = f"of {peers[0]}" if len(peers) == 1 else "of best peer"
    lines = [
        f"{title} ({results['work']['unit']})",
        f"{'':<{width}}  {'median':>8}  {'min':>8}  {'max':>8}  {of:>12}  of limit",
    ]
    for row in rows:
        if row["median"] is None:
            lines.append(f"{row['name']:<{width}}  {why_not(row)}")
            continue
        ratio = f"{row['of_best_peer']:.2f}" if row["of_best_peer"] else "-"
        share = f"{row['of_limit']:.0%}" if row["of_limit"] else "-"
        figures = "  ".join(f"{number(row[key]):>8}" for key in ("median", "min", "max"))
        also = "".join(f"  {name}: {number(value)}" for name, value in row["also"].items())
        lines.append(f"{row['name']:<{width}}  {figures}  {ratio:>{len(of)}}  {share:>8}{also}")
    for name, ratio in results["ratios"].items():
        turns = ", ".join(f"{each:.3f}" for each in ratio["of_turns"])
        lines.append(f"{name}: {ratio['of_medians']:.3f} (in each turn: {turns})")
    return "\n".join(lines)


def run(name: str, description: str, comparisons: Sequence[Comparison], turns: int) -> int:
    """A benchmark's `main`: measure, write `results/NAME.json`, print tables last.

    Returns:
        The exit code: 1 if a contestant failed.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser, name, turns)
    return measure(name, comparisons, turns, parser.parse_args(), parser)


def add_flags(parser: argparse.ArgumentParser, name: str, turns: int) -> None:
    """Those of `measure`."""
    parser.add_argument("--turns", type=int, help=f"default: {turns}, or what a comparison needs")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="those with this in the name, or in the title of their table; repeatable",
    )
    parser.add_argument(
        "--output", type=Path, metavar="PATH", help=f"default: benchmarks/results/{name}.json"
    )


def measure(
    name: str,
    comparisons: Sequence[Comparison],
    turns: int,
    flags: argparse.Namespace,
    parser: argparse.ArgumentParser,
) -> int:
    """What `run` does once the flags are read; `parser` ends the program if they are wrong."""
    known = [f"{c.title}: {contestant.name}" for c in comparisons for contestant in c.contestants]
    if flags.turns is not None and flags.turns < 1:
        parser.error(f"--turns {flags.turns}: expected 1 or more")
    for text in flags.only or ():
        if not any(text in name for name in known):
            parser.error(f"--only {text!r} fits none of: {'; '.join(known)}")
    if flags.only and not flags.output:
        parser.error("--only needs an --output of its own, so that whole results stay")
    output = flags.output or RESULTS / f"{name}.json"
    results: dict[str, Any] = {"benchmark": name, "machine": machine(), "tables": {}}
    if (load := results["machine"]["load_average_at_start"]) > IDLE_LOAD:
        print(f"Load average {load:.1f}: something else runs here, and will be in the figures.")
    output.parent.mkdir(parents=True, exist_ok=True)
    for comparison in filter(lambda c: c.contestants, (_only(c, flags.only) for c in comparisons)):
        of_turns = compare(comparison, flags.turns or comparison.turns or turns)
        results["tables"][comparison.title] = of_turns
        # After each, so that what is measured stays if the next one is stopped.
        output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nWritten: {output}")
    for title, of_table in results["tables"].items():
        print(f"\n{table(title, of_table)}")
    rows = [row for of_table in results["tables"].values() for row in of_table["contestants"]]
    return int(any(row["failed"] for row in rows))


def _only(comparison: Comparison, texts: Sequence[str] | None) -> Comparison:
    """With the contestants that have one of these in the name or their table's title, and the
    ratios among those."""
    if not texts:
        return comparison
    named = [(c, f"{comparison.title}: {c.name}") for c in comparison.contestants]
    chosen = [c for c, name in named if any(text in name for text in texts)]
    names = {c.name for c in chosen}
    return dataclasses.replace(
        comparison,
        contestants=[
            c if c.compared_with in names else dataclasses.replace(c, compared_with="")
            for c in chosen
        ],
        ratios={name: pair for name, pair in comparison.ratios.items() if names >= set(pair)},
    )
