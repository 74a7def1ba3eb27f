"""Declaration, help texts and parsing of flags. Left out: the verbs (`commands.py`)."""

import abc
import ast
import inspect
import itertools
import json
import sys
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TextIO, get_type_hints

import tyro

from headrace.config.algorithms import load_algorithm
from headrace.config.resolve import MAY_CHANGE
from headrace.config.run_config import GROUPS, EnvConfig, RunConfig
from headrace.errors import ConfigError
from headrace.models.policy import Network

OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
RunDir = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")]


@dataclass(frozen=True, kw_only=True)
class Verb(abc.ABC):
    """The flags of a verb, and what it does."""

    @abc.abstractmethod
    def execute(self, argv: list[str]) -> int | None:
        """Run the verb with its flags, read from `argv`; return its exit code, None for 0."""


@dataclass(frozen=True, kw_only=True)
class JsonVerb(Verb):
    """A verb that can answer in JSON."""

    json: bool = False
    """Print one JSON object as standard output's last line; all else goes to standard error."""

    @property
    def out(self) -> TextIO:
        """The stream for people."""
        return sys.stderr if self.json else sys.stdout

    def say(self, text: str) -> None:
        """Print a text for people."""
        print(text, file=self.out, flush=True)

    def answer(self, result: dict[str, Any], text: str) -> None:
        """Print the verb's result: as JSON, or for people."""
        print(json.dumps(result) if self.json else text)


@dataclass(frozen=True, kw_only=True)
class SettingsVerb(JsonVerb):
    """A verb that takes all settings; `parse` adds these, in groups."""

    config: OptionalPath = None
    """TOML file with settings by their names; flags override it."""


def _with_settings(flags: type[Verb], argv: list[str]) -> type[Any]:
    """Return `flags` with all settings, of the algorithm that the command line names."""
    words = [part for word in argv for part in word.split("=", 1)]
    named = [b for a, b in itertools.pairwise(words) if a == "--algo"]
    algorithm = load_algorithm(named[-1] if named else "ppo")
    groups = GROUPS | {"network": Network, "algorithm": algorithm.Config}
    return make_dataclass(flags.__name__, groups.items(), bases=(flags,), frozen=True, kw_only=True)


def with_changes(flags: type[Verb]) -> type[Any]:
    """Return `flags` with the settings that resume may change."""
    hints, texts = get_type_hints(RunConfig, include_extras=True), _help_texts(RunConfig)
    as_before = tyro.conf.arg(help_behavior_hint="(default: as before)")
    changes = [
        (
            f.name,
            Annotated[hints[f.name], as_before],
            field(default=f.default, metadata={"help": texts[f.name]}),
        )
        for f in fields(RunConfig)
        if f.name in MAY_CHANGE
    ]
    return make_dataclass(flags.__name__, changes, bases=(flags,), frozen=True, kw_only=True)


def _help_texts(cls: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, in one line."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        # A class of `make_dataclass` has no source; its module is that of its metaclass.
        if not is_dataclass(base) or base.__module__ in ("types", "abc"):
            continue
        body: Any = ast.parse(inspect.getsource(base)).body[0]
        for field_, text in itertools.pairwise(body.body):
            if isinstance(field_, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field_.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def parse(verb: str, description: str, flags: type[Verb], argv: list[str]) -> Any:
    """Return a verb with its flags; ConfigError for one that is there twice."""
    if issubclass(flags, SettingsVerb):
        flags = _with_settings(flags, argv)
    if verb == "train":
        description += (
            " Presets change the defaults shown here. A run begins by printing all values and "
            "where they come from."
        )
    if verb == "resume":
        flags = with_changes(flags)
        description += " All other settings stay as they were."
    _join_help_lines(flags)
    parsed = tyro.cli(
        flags,
        prog=f"headrace {verb}",
        args=argv,
        description=description,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    _refuse_repeated(argv, parsed)
    return parsed


def explicit(argv: list[str], flags: Any) -> dict[str, Any]:
    """Return the settings that the command line names; a preset may fill the others."""
    names = _flag_names(argv)
    groups = [value for value in vars(flags).values() if is_dataclass(value)]
    settings = [(flags, f) for f in fields(flags) if f.name in MAY_CHANGE]  # resume's
    settings += [(group, f) for group in groups for f in fields(group)]
    return {
        f.name: getattr(group, f.name)
        for group, f in settings
        if f.name in names
        or f"no_{f.name}" in names
        or (isinstance(group, EnvConfig) and f.name == "env" and group.env)
    }


def _join_help_lines(flags: type[Any]) -> None:
    """Make paragraphs of the fields' texts: tyro would keep the line breaks of the source."""
    texts = _help_texts(flags)
    for f in fields(flags):
        if isinstance(f.type, type) and is_dataclass(f.type):
            _join_help_lines(f.type)
        elif "help" not in f.metadata:
            f.metadata = MappingProxyType({"help": texts[f.name]})


def _flag_names(argv: list[str]) -> list[str]:
    return [word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]


def _refuse_repeated(argv: list[str], flags: Any) -> None:
    """Raise ConfigError if a flag of several values is there twice: only the last would count."""
    names = _flag_names(argv)
    for f in fields(flags):
        value = getattr(flags, f.name)
        if is_dataclass(value):
            _refuse_repeated(argv, value)
        elif isinstance(value, tuple | dict) and names.count(f.name) > 1:
            flag = f.name.replace("_", "-")
            raise ConfigError(
                f"--{flag} is there {names.count(f.name)} times, and only the last would "
                f"count.\nPut all values after one: --{flag} A B."
            )
