"""Reads RL Zoo's settings: YAML, in which some values are text in Python.

That text is parsed and never evaluated: numbers, words, lists, dicts, `dict(...)` and names are
understood. A name stays a word. Left out: what settings mean (`import_zoo.py`, `sb3_settings.py`).
"""

import ast
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtraError, did_you_mean, install_command

ATARI = re.compile(r"(?:ALE/(?=.*-v)|(?=.*NoFrameskip))([A-Za-z]+?)(?:NoFrameskip)?-v\d+")
"""The id of an Atari game, in ALE's own spelling or the old one."""
_IN_PYTHON = {
    "policy_kwargs", "replay_buffer_kwargs", "env_kwargs", "monitor_kwargs", "normalize",
    "normalize_kwargs", "rollout_buffer_kwargs",
}  # fmt: skip
"""Keys whose text is Python."""
_TAGS = "tag:yaml.org,2002:python/"
_ORDERED_DICT = "object/apply:collections.OrderedDict"
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Unread:
    """What was not understood, as it stands in the file."""

    text: str


def read_entry(path: Path, env: str) -> dict[str, Any]:
    """Return the settings of an environment, as plain data and `Unread`.

    Args:
        path: a file with an entry for each environment, or the `config.yml` of one run.
        env: name of the entry; of an Atari game without one, the entry `atari` is taken.

    Raises:
        ConfigError: the file cannot be read, or has no such entry.
        MissingExtraError: PyYAML is not installed.
    """
    content = _load(path)
    if isinstance(content, Mapping) and "n_timesteps" in content:
        entry: Any = content  # of one run
    elif not isinstance(content, Mapping):
        raise ConfigError(
            f"{path} has no entries: expected RL Zoo's settings, such as its ppo.yml."
        )
    else:
        is_game = "atari" in content and ATARI.fullmatch(env)
        entry = content.get(env, content["atari"] if is_game else None)
    if not isinstance(entry, Mapping):
        names = [str(name) for name in content]
        raise ConfigError(
            f"{path} has no entry {env}.{did_you_mean(env, names)}\nIt has {', '.join(names)}."
        )
    return {str(name): _plain(str(name), value) for name, value in entry.items()}


def split_unread(value: Any) -> tuple[Any, list[str]]:
    """Return a value without what was not understood in it, and that; None if nothing is left."""
    if isinstance(value, Unread):
        return None, [value.text]
    unread: list[str] = []
    if isinstance(value, Mapping):
        kept = {}
        for name, each in value.items():
            kept[name], missing = split_unread(each)
            unread += [f"{name}={text}" for text in missing]
            if missing and kept[name] is None:
                del kept[name]
        return kept, unread
    if isinstance(value, list):
        parts = [split_unread(each) for each in value]
        unread = [text for _, missing in parts for text in missing]
        texts = (each.text if isinstance(each, Unread) else repr(each) for each in value)
        return (None, [f"[{', '.join(texts)}]"]) if unread else (value, [])
    return value, []


def _load(path: Path) -> Any:
    """Return the content of a YAML file. Tags name no code: `Unread` stands for what they ask."""
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise MissingExtraError(
            f"{path} is YAML. To read it, install PyYAML:\n{install_command('zoo')}"
        ) from None

    def whole(loader: Any, node: Any, deep: bool = False) -> Any:
        """Construct a value with all in it, so that YAML refuses one that contains itself."""
        return yaml.SafeLoader.construct_object(loader, node, deep=True)

    loader_class: Any = type("Loader", (yaml.SafeLoader,), {"construct_object": whole})

    def of_tag(loader: Any, suffix: str, node: Any) -> Any:
        deep = {
            yaml.SequenceNode: loader.construct_sequence,
            yaml.MappingNode: loader.construct_mapping,
        }.get(type(node))
        value = loader.construct_scalar(node) if deep is None else deep(node, deep=True)
        if suffix == "tuple" and isinstance(value, list):
            return value
        if suffix == _ORDERED_DICT and isinstance(value, list):
            return dict(value[0]) if value else {}
        if suffix.startswith("name:"):
            return suffix.removeprefix("name:")
        return Unread(f"{node.tag} {value}".strip())

    loader_class.add_multi_constructor(_TAGS, of_tag)
    loader_class.add_multi_constructor("", of_tag)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader_class)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def _plain(name: str, value: Any) -> Any:
    """Return a value as plain data: texts of numbers as numbers, those in Python parsed."""
    if isinstance(value, str) and name in _IN_PYTHON:
        return _parsed(value)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        with contextlib.suppress(ValueError):  # 1__0 is a text
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _parsed(text: str) -> Any:
    """Return the value of a text in Python, which is not evaluated."""
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return Unread(text)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression; of what is none of the known ones, its text."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            named = [(key and _value(key), of) for key, of in zip(keys, values, strict=True)]
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=pairs):
            named = [(pair.arg, pair.value) for pair in pairs]
        case ast.Name() | ast.Attribute(value=ast.Name() | ast.Attribute()):
            return ast.unparse(node)
        case _:
            return Unread(ast.unparse(node))
    # `**base` has no key
    return {
        "**" if key is None else key: Unread(ast.unparse(of)) if key is None else _value(of)
        for key, of in named
    }
