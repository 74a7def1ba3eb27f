"""Makes the pages of the reference from the code, so that they cannot differ from it.

The commands' flags and the settings are read from the classes that `headrace VERB --help` is made
of; the Python names are those of `headrace.__all__`, with their docstrings (Sphinx's autodoc).
Left out: names that are not in it, such as those of `headrace.lightning`.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

import headrace
from headrace.algos.base import AlgorithmConfig
from headrace.algos.schedules import Schedule, ScheduleByPoints
from headrace.cli.flags import SettingsVerb, with_changes
from headrace.cli.main import VERBS, flags_of
from headrace.cli.verbs import help_texts
from headrace.config.algorithms import ALGORITHMS
from headrace.config.run_config import GROUPS
from headrace.configclass import Between, Bounds
from headrace.models.policy import Network

WORDS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true, false", Path: "a path",
    dict: "names and values",
}  # fmt: skip
SEVERAL = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", dict: "KEY=VALUE"}


@dataclass(frozen=True)
class Entry:
    """A setting or a flag, as a reader sees it.

    Attributes:
        values: what a value may be, in words.
        metavar: what stands for a value on the command line; empty for a switch.
        place: what stands for a value that has its place in the usage; empty for a flag.
    """

    name: str
    default: str
    values: str
    metavar: str
    text: str
    place: str


def write(folder: Path) -> None:
    """Write the pages into a new folder."""
    folder.mkdir(parents=True)
    for name, page in {
        "commands": commands, "settings": settings, "algorithms": algorithms, "python": python,
    }.items():  # fmt: skip
        (folder / f"{name}.md").write_text("\n".join(page()) + "\n")


def commands() -> Iterator[str]:
    """Yield the page of the verbs and their flags."""
    yield from ("# Commands", "")
    yield "Made from the classes that `headrace VERB --help` is made of. On the command line a flag"
    yield "is a setting's name with dashes: `--num-envs 8`, `--num-envs=8` and `--num_envs 8` are"
    yield "the same. [Using Headrace](../docs/using.md) explains them by examples."
    for verb, text in VERBS.items():
        flags = flags_of(verb)
        listed = _own_first(with_changes(flags) if verb == "resume" else flags)
        takes_settings = issubclass(flags, SettingsVerb)
        places = [entry.place for entry in listed if entry.place]
        usage = ["headrace", verb, *(["ENV"] if takes_settings else places), "[flags]"]
        yield from ("", f"## {verb}", "", text, "", "```", " ".join(usage), "```", "")
        if takes_settings:
            yield "Besides these flags it takes all [settings](settings.md), and those of its"
            yield "[algorithm](algorithms.md), as flags."
            yield ""
        yield from table(("flag", "default", "meaning"), "20 10 70", map(_flag_row, listed))


def settings() -> Iterator[str]:
    """Yield the page of the settings that every run has."""
    yield from ("# Settings", "")
    yield "Made from the classes of the settings. Each is a flag of `headrace train`, a key of a"
    yield "`--config` file, and a keyword of `headrace.train`; those of the network are also fields"
    yield "of `headrace.Network`. A preset, or the defaults of an environment's kind, change the"
    yield "defaults shown here: a run prints what it has, and from where. The settings of each"
    yield "algorithm are on [a page of their own](algorithms.md)."
    for title, group in {**GROUPS, "network": Network}.items():
        yield from ("", f"## {title.capitalize()}", "", inspect.getdoc(group) or "", "")
        yield from _settings_table(entries(group))


def algorithms() -> Iterator[str]:
    """Yield the page of each algorithm's settings."""
    yield from ("# Settings of algorithms", "")
    yield "Made from the classes of the settings. `--algo NAME` chooses the algorithm. Presets and"
    yield "the defaults of an environment's kind change the defaults shown here."
    for name, algorithm in ALGORITHMS.items():
        yield from ("", f"## {name}", "", inspect.getdoc(algorithm.Config) or "", "")
        yield f"In Python: `headrace.{algorithm.Config.__name__}`."
        yield ""
        yield from _settings_table(entries(algorithm.Config))


def python() -> Iterator[str]:
    """Yield the page of the public names."""
    public = {name: getattr(headrace, name) for name in headrace.__all__}
    configs = [
        name
        for name, found in public.items()
        if inspect.isclass(found) and issubclass(found, AlgorithmConfig)
    ]
    yield from ("# Python", "", "The public names, with their docstrings.", "")
    yield from ("## Functions", "", "```{eval-rst}")
    for name, found in public.items():
        if inspect.isfunction(found):
            yield f".. autofunction:: headrace.{name}"
    yield from ("```", "", "## Classes", "", "```{eval-rst}")
    for name, found in public.items():
        if inspect.isclass(found) and name not in configs:
            yield f".. autoclass:: headrace.{name}"
            if found is Network:
                yield "   :no-undoc-members:"
            else:
                yield "   :members:"
    yield from ("```", "", "## Algorithms", "")
    yield "Each is a class of settings, for `headrace.train(algo=headrace.PPO(lr=3e-4))`:"
    yield ""
    for name in configs:
        anchor = next(k for k, a in ALGORITHMS.items() if a.Config is public[name])
        yield f"- [`headrace.{name}`](algorithms.md#{anchor})"


def entries(cls: type[Any]) -> list[Entry]:
    """Return the fields of a dataclass as a reader sees them, those of its base classes first."""
    hints, texts = get_type_hints(cls, include_extras=True), help_texts(cls)
    return [
        _entry(f, hints[f.name], f.metadata.get("help") or texts.get(f.name, ""))
        for f in fields(cls)
    ]


def _own_first(flags: type[Any]) -> list[Entry]:
    """Return a verb's flags: what is no flag first, and last those of many verbs."""
    order = [name for base in flags.__mro__ for name in inspect.get_annotations(base)]
    return sorted(entries(flags), key=lambda e: (not e.place, order.index(e.name)))


def _entry(f: Field[Any], hint: Any, text: str) -> Entry:
    metadata = getattr(hint, "__metadata__", ())
    plain = hint.__origin__ if get_origin(hint) is Annotated else hint
    said = [m.metavar for m in metadata if getattr(m, "metavar", None)]
    default = f.default if f.default_factory is MISSING else f.default_factory()
    auto = next((m.auto for m in metadata if isinstance(m, Between)), None)
    given = "auto" if auto is not None and default == auto else _shown(default)
    if any(getattr(m, "help_behavior_hint", "") == "(default: as before)" for m in metadata):
        given = "as before"
    metavar = str(said[0]) if said else _metavar(plain)
    place = ""
    if tyro.conf.Positional in metadata:
        place = metavar if default is MISSING else f"[{metavar}]"
    return Entry(f.name, given, _values(plain, metadata), metavar, text, place)


def _shown(default: Any) -> str:
    """Return a default as one types it; empty if there is none."""
    if default is MISSING or default is None or default in ("", (), {}):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:_}" if isinstance(default, int) else str(default)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types that a field takes, `None` left out."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not NoneType)


def _values(hint: Any, metadata: tuple[Any, ...]) -> str:
    """Return in words what a value may be."""
    bounds = [str(m) for m in metadata if isinstance(m, Bounds)]
    is_schedule = hint in (get_args(Schedule)[0], get_args(ScheduleByPoints)[0])
    words = [] if is_schedule else [_words(kind) for kind in _kinds(hint)]
    return ", ".join(dict.fromkeys([*words, *bounds]))


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(kind))
    if get_origin(kind) is tuple:
        return SEVERAL[get_args(kind)[0]]
    return WORDS[get_origin(kind) or kind]


def _metavar(hint: Any) -> str:
    kind = _kinds(hint)[0]
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"[{METAVARS[get_args(kind)[0]]} ...]"
    return METAVARS[get_origin(kind) or kind]


def _flag_row(entry: Entry) -> list[str]:
    flag = "--" + entry.name.replace("_", "-")
    if entry.place:
        words = f"`{entry.metavar}`"
    elif entry.metavar:
        words = f"`{flag}` `{entry.metavar}`"
    else:
        words = f"`{flag}`" if entry.default == "false" else f"`--no-{flag[2:]}`"
    return [words, _code(entry.default if entry.metavar else ""), markdown(entry.text)]


def _settings_table(listed: Iterable[Entry]) -> Iterator[str]:
    rows = ([_code(e.name), _code(e.default), e.values, markdown(e.text)] for e in listed)
    return table(("setting", "default", "values", "meaning"), "18 12 20 50", rows)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def markdown(text: str) -> str:
    """Return a help text as Markdown: flags as code, and all else as it is written."""
    parts = re.split(r"(`[^`]*`)", text)
    for k in range(0, len(parts), 2):
        escaped = re.sub(r"([*<>\[\]|\\_])", r"\\\1", parts[k])
        parts[k] = re.sub(r"(?<![\w-])--[a-z][a-z-]+", r"`\g<0>`", escaped)
    return "".join(parts)


def table(head: tuple[str, ...], widths: str, rows: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of a table in MyST, whose class is `entries`."""
    yield "```{list-table}"
    yield from (":header-rows: 1", ":class: entries", f":widths: {widths}", "")
    for row in (list(head), *rows):
        yield from (f"{'  -' if k else '* -'} {cell}".rstrip() for k, cell in enumerate(row))
    yield "```"
