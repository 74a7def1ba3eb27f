"""Flags that are settings, and how they become fields of a verb (`verbs.py`)."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from headrace.algos.off_policy import ReplayConfig
from headrace.algos.ppo import PPO
from headrace.cli.argv import flag_names, value_of
from headrace.cli.verbs import JsonVerb, OptionalPath, Verb, help_texts, parse_flags
from headrace.config.algorithms import algorithms_with, load_algorithm
from headrace.config.old_names import refuse_peer_flags
from headrace.config.resolve import MAY_CHANGE, read_config_file
from headrace.config.run_config import GROUPS, EnvConfig, RunConfig
from headrace.configclass import PEER_NAMES
from headrace.errors import ConfigError, flag
from headrace.models.policy import Network


@dataclass(frozen=True, kw_only=True)
class SettingsVerb(JsonVerb):
    """A verb that takes all settings; `parse` adds these, in groups."""

    config: OptionalPath = None
    """TOML file with settings by their names, or a pipe with one; flags override it."""


_ENV_FIRST = ("train", "autoscale", "sweep", "tune")


def _algo_of_file(argv: list[str]) -> str:
    """Return the algorithm that the config file names. A pipe is left alone: it is read once."""
    path = Path(value_of(argv, "config") or "")
    if not path.is_file():
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is read again, and then warns
        return str(read_config_file(path).settings.get("algo", ""))


def _with_settings(flags: type[Verb], argv: list[str]) -> type[Any]:
    """Return `flags` with all settings, of the algorithm that was asked for."""
    algorithm = load_algorithm(value_of(argv, "algo") or _algo_of_file(argv) or "ppo")
    groups = GROUPS | {"network": Network, "algorithm": algorithm.Config}
    return _extended(flags, groups.items())


def _extended(flags: type[Verb], more: Iterable[tuple[Any, ...]]) -> type[Any]:
    """Return a subclass of `flags` with more fields."""
    namespace = {"has_source": False}
    return make_dataclass(
        flags.__name__, more, bases=(flags,), namespace=namespace, frozen=True, kw_only=True
    )


def with_changes(flags: type[Verb]) -> type[Any]:
    """Return `flags` with the settings that resume may change."""
    hints, texts = dict[str, Any](), dict[str, str]()
    groups = (RunConfig, ReplayConfig, PPO)
    for group in groups:
        hints |= get_type_hints(group, include_extras=True)
        texts |= help_texts(group)
    as_before = tyro.conf.arg(help_behavior_hint="(default: as before)")
    changes = [
        (
            f.name,
            Annotated[hints[f.name], as_before],
            field(default=f.default, metadata={"help": texts[f.name]}),
        )
        for f in {f.name: f for group in groups for f in fields(group)}.values()
        if f.name in MAY_CHANGE
    ]
    return _extended(flags, changes)


def parse(verb: str, description: str, flags: type[Verb], argv: list[str]) -> Any:
    """Return a verb with its flags; ConfigError for another library's, or one that is twice."""
    if issubclass(flags, SettingsVerb):
        flags = _with_settings(flags, argv)
    if verb == "train":
        description += (
            " Presets, and defaults for the environment's kind, change the defaults shown here. A "
            "run begins by printing each value that these or a flag change, with its source."
        )
    if verb == "resume":
        flags = with_changes(flags)
        description += " All other settings stay as they were."
    known = _field_names(flags)
    if verb == "resume" or issubclass(flags, SettingsVerb):
        _refuse_settings_elsewhere(verb, flag_names(argv), known)
    if verb in _ENV_FIRST and "env" in flag_names(argv):
        env = value_of(argv, "env") or "ENV"
        raise ConfigError(
            f"There is no --env: the environment comes first, without a flag.\n"
            f"Did you mean headrace {verb} {env}?"
        )
    refuse_peer_flags(flag_names(argv), known)
    return parse_flags(verb, description, flags, argv)


def _refuse_settings_elsewhere(verb: str, names: Iterable[str], known: set[str]) -> None:
    """Raise ConfigError for a setting that is fixed, or that another algorithm has."""
    shared = {f.name for group in (RunConfig, Network) for f in fields(group)}
    for name in (name.removeprefix("no_") for name in names):
        if name in known or f"no_{name}" in known:
            continue
        owners = algorithms_with(name)
        if verb == "resume" and (owners or name in shared):
            raise ConfigError(
                f"{flag(name)} is fixed when a run begins. Leave it out: `headrace resume --help` "
                "shows what may change."
            )
        if owners and name not in PEER_NAMES:
            raise ConfigError(
                f"{flag(name)} is a setting of {', '.join(owners)}: expected one of them beside "
                f"it, such as --algo {owners[0]}."
            )


def _field_names(flags: type[Any]) -> set[str]:
    """Return the names of all flags of a verb."""
    names = set[str]()
    for f in fields(flags):
        if isinstance(f.type, type) and is_dataclass(f.type):
            names |= _field_names(f.type)
        else:
            names.add(f.name)
    return names


def explicit(argv: list[str], flags: Any) -> dict[str, Any]:
    """Return the settings that the command line names; a preset may fill the others."""
    names = flag_names(argv)
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
