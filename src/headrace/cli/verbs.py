"""What every verb of the command line is: a class of flags, and how they are read.

This file imports nothing heavy, so that a verb without settings answers at once.
"""

import abc
import ast
import contextlib
import fractions
import inspect
import io
import itertools
import json
import re
import sys
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TextIO, get_args

import tyro

from headrace.algos.schedules import Schedule
from headrace.cli.argv import flag_names
from headrace.errors import ConfigError, flag

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
class RunningVerb(JsonVerb):
    """A verb that runs a training."""

    quiet: bool = False
    """Print nothing but errors, warnings, and what --json asks for."""

    @property
    def progress(self) -> TextIO | None:
        """The stream for the run's progress; None: it is not shown."""
        return None if self.quiet else self.out

    def say(self, text: str) -> None:
        """Print a text for people, unless they want none."""
        if not self.quiet:
            super().say(text)


@dataclass(frozen=True, kw_only=True)
class TrackedVerb(RunningVerb):
    """A verb that runs one training, whose metrics a tracker may have."""

    track: Annotated[
        str, tyro.conf.arg(metavar="{trackio,mlflow,wandb}", help_behavior_hint="")
    ] = ""
    """Send the metrics to this tracker meanwhile: `headrace track --follow`, in a process beside
    the run, which it cannot delay."""


_NUMBERS = tyro.constructors.ConstructorRegistry()
_NUMBER = re.compile(
    r"([-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmMgG]?)", re.ASCII
)
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def whole_number(text: str) -> int:
    """Return a whole number, also one that is typed `1e6`, `1_000`, `20k` or `1.5M`; ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match:
        number = fractions.Fraction(match[1].replace("_", "")) * _THOUSANDS[match[2].lower()]
        if number.denominator == 1:
            return number.numerator
    raise ValueError(f"{text!r}: expected a whole number, such as 100000, 1e5, 100k or 2M")


@_NUMBERS.primitive_rule
def _whole_numbers(
    asked: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
    if asked.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: whole_number(texts[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _schedule(text: str) -> Any:
    """Return a schedule that is typed as a word, as `0:3e-4,500k:1e-4`, or as in a file."""
    if not any(mark in text for mark in ":["):
        return text  # a word, right or wrong
    try:
        if text.lstrip().startswith("["):
            return ast.literal_eval(text)
        pairs = [pair.split(":") for pair in text.split(",")]
        return [(float(whole_number(env_steps)), float(value)) for env_steps, value in pairs]
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"{text!r}: expected constant, linear, or points such as 0:3e-4,500k:1e-4"
        ) from error


@_NUMBERS.primitive_rule
def _schedules(
    asked: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if asked.type != get_args(Schedule)[0]:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="constant|linear|ENV_STEPS:VALUE,...",
        instance_from_str=lambda texts: _schedule(texts[0]),
        is_instance=lambda value: isinstance(value, str | tuple),
        str_from_instance=lambda value: [value if isinstance(value, str) else str(value)],
    )


def parse_flags(verb: str, description: str, flags: type[Any], argv: list[str]) -> Any:
    """Return a verb with its flags; ConfigError for one that is there twice, or a wrong value."""
    parse = partial(
        tyro.cli,
        prog=f"headrace {verb}",
        args=argv,
        description=description,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        registry=_NUMBERS,
    )
    # Help texts are in the source. Reading them delays each start, so they are read only to be
    # shown: with --help, and beside an error.
    try:
        _set_help(flags, read=False)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            parsed = parse(flags)
    except SystemExit as ended:
        if (refusal := _refusal(ended)) is not None:
            raise refusal from None
        _set_help(flags, read=True)
        parsed = parse(flags)
    _refuse_repeated(argv, parsed)
    return parsed


def _refusal(ended: SystemExit) -> ConfigError | None:
    """Return the error that a class of settings has raised, if tyro ended because of it."""
    error: BaseException | None = ended
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def help_texts(cls: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, in one line.

    A class that was made without source has no texts of its own, and says `has_source = False`.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base) or not vars(base).get("has_source", True):
            continue
        body: Any = ast.parse(inspect.getsource(base)).body[0]
        for field_, text in itertools.pairwise(body.body):
            if isinstance(field_, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field_.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def _set_help(flags: type[Any], *, read: bool) -> None:
    """Give tyro the fields' texts as paragraphs; without `read`, none.

    By itself tyro would read them, and keep the line breaks of the source.
    """
    texts = help_texts(flags) if read else {}
    for f in fields(flags):
        if isinstance(f.type, type) and is_dataclass(f.type):
            _set_help(f.type, read=read)
        elif not f.metadata.get("help"):
            f.metadata = MappingProxyType({"help": texts.get(f.name, "")})


def _refuse_repeated(argv: list[str], flags: Any) -> None:
    """Raise ConfigError if a flag of several values is there twice: only the last would count."""
    names = flag_names(argv)
    for f in fields(flags):
        value = getattr(flags, f.name)
        if is_dataclass(value):
            _refuse_repeated(argv, value)
        elif isinstance(value, tuple | dict) and names.count(f.name) > 1:
            raise ConfigError(
                f"{flag(f.name)} is there {names.count(f.name)} times, and only the last would "
                f"count.\nPut all values after one: {flag(f.name)} A B."
            )
