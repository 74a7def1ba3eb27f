"""What `headrace list` shows: families, their ids, presets, and known returns.

This file imports nothing heavy.
"""

from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from headrace.catalog.extras import missing
from headrace.catalog.families import Family, families, family_of
from headrace.catalog.returns import Own, Published, format_return, format_steps, own, published
from headrace.config.preset_tables import algorithms_of_preset, preset_table
from headrace.errors import UsageError, did_you_mean, install_command


def find(name: str) -> tuple[Family, str]:
    """Return the family that is meant, and "" or, for an id, the id.

    Raises:
        UsageError: neither a family nor an id of one; with near misses.
    """
    known = families()
    if name in known:
        return known[name], ""
    ids = [env_id for family in known.values() for env_id in family.ids]
    family = family_of(name)
    if family is not None and (name in ids or fnmatchcase(name, family.more)):
        return family, name
    raise UsageError(
        f"There is no family {name!r} of environments, and no such id in one."
        f"{did_you_mean(name, [*known, *ids])}\n"
        f"Expected one of {', '.join(known)},\n"
        "or an id that `headrace list FAMILY` shows."
    )


def facts(family: Family | None = None, env_id: str = "") -> dict[str, Any]:
    """Return what is known as plain data: of all families, one, or one id."""
    return {
        "families": [
            {
                "name": each.name,
                "description": each.description,
                "extra": each.extra,
                "missing": _missing(each),
                "more": each.more,
                "envs": [_facts_of(e) for e in ([env_id] if env_id else each.ids)],
            }
            for each in ([family] if family else families().values())
        ]
    }


def _facts_of(env_id: str) -> dict[str, Any]:
    return {
        "env": env_id,
        "preset": preset_table(env_id)[0] != "none",
        "algorithms": algorithms_of_preset(env_id),
        "published": {algo: asdict(row) for algo, row in published(env_id).items()},
        "own": {algo: asdict(row) for algo, row in own(env_id).items()},
    }


def _missing(family: Family) -> list[str]:
    return sorted(missing("headrace", family.extra)) if family.extra else []


def describe_list() -> str:
    """Return a table of all families."""
    lines = [f"{'family':<16} {'ids':<11} {'extra':<16} {'installed':<10} what they are"]
    for family in families().values():
        ids = f"{len(family.ids)}{' and more' if family.more else ''}"
        is_there = "no" if _missing(family) else "yes"
        lines.append(
            f"{family.name:<16} {ids:<11} {family.extra or '-':<16} {is_there:<10} "
            f"{family.description}"
        )
    lacking = next((f.extra for f in families().values() if _missing(f)), "")
    lines += [f"\nTo install an extra: {install_command(lacking)}"] if lacking else []
    return "\n".join([*lines, "", "The ids of a family: headrace list FAMILY"])


_HEAD = f"{'environment':<29} {'settings':<9} {'algo':<7} {'published':<16} ours"


def describe_family(family: Family) -> str:
    """Return a table of a family's ids: presets, published returns, and our own."""
    lines = [f"{family.name}: {family.description}", *_installation(family), "", _HEAD]
    lines += [line for env_id in family.ids for line in _lines_of(env_id)]
    if family.more:
        lines.append(f"Others, too: {family.more}")
    return "\n".join([*lines, "", *_legend(family.ids)])


def describe_env(family: Family, env_id: str) -> str:
    """Return what is known of one id, and how to train on it."""
    lines = [*_installation(family), _HEAD, *_lines_of(env_id), "", *_legend((env_id,))]
    others = [algo for algo in algorithms_of_preset(env_id) if algo != "ppo"]
    lines += [f"To train: headrace train {env_id}"]
    lines += [f"          headrace train {env_id} --algo {algo}" for algo in others]
    return "\n".join(lines)


def _installation(family: Family) -> Iterator[str]:
    if lacking := _missing(family):
        yield f"Not installed: {', '.join(lacking)}. To install it: {install_command(family.extra)}"


def _lines_of(env_id: str) -> Iterator[str]:
    """Yield a line for each algorithm of which something is known; at least one, for PPO."""
    theirs, ours, sections = published(env_id), own(env_id), algorithms_of_preset(env_id)
    name, settings = env_id, "defaults" if preset_table(env_id)[0] == "none" else "preset"
    for algo in dict.fromkeys(["ppo", *sections, *theirs, *ours]):
        cells = _format_published(theirs.get(algo)), _format_own(ours.get(algo))
        yield f"{name:<29} {settings:<9} {algo:<7} {cells[0]:<16} {cells[1]}"
        name = ""


def _format_published(found: Published | None) -> str:
    if found is None:
        return "-"
    return f"{format_return(found.mean_return)} ({format_steps(found.env_steps)})"


def _format_own(found: Own | None) -> str:
    if found is None:
        return "-"
    error = found.standard_error
    spread = "" if error is None else f" ± {format_return(error)}"
    seeds = f", {found.seeds} seed{'s' if found.seeds > 1 else ''}"
    return f"{format_return(found.mean_return)}{spread} ({format_steps(found.env_steps)}{seeds})"


def _legend(env_ids: tuple[str, ...]) -> Iterator[str]:
    yield "Returns are those of the final policy; in brackets the env steps of training."
    for source in sorted({row.source for e in env_ids for row in published(e).values()}):
        yield f"Published: {source}."
    yield "Curves: docs/presets.md."
