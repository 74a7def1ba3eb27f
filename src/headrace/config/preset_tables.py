"""The shipped presets as they stand in `presets/`. This file imports nothing heavy."""

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import headrace


@cache
def preset_tables() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return id or pattern of ids (`MiniGrid-*`) -> name of its file, and its table.

    A table's name may be several of these, with spaces between them.
    """
    folder = resources.files("headrace.config").joinpath("presets")
    return {
        pattern: (file.name.removesuffix(".toml"), table)
        for file in sorted(folder.iterdir(), key=str)
        if file.name.endswith(".toml")
        for patterns, table in tomllib.loads(file.read_text(encoding="utf-8")).items()
        for pattern in patterns.split()
    }


def preset_table(env: str) -> tuple[str, dict[str, Any]]:
    """Return the preset of an environment: its file's name and its table; ("none", {}) without.

    Tables whose patterns match are merged in their order, so that special ones come later.
    """
    name, merged = "none", dict[str, Any]()
    for pattern, (file, table) in preset_tables().items():
        if fnmatchcase(env, pattern):
            name = file
            for key, value in table.items():
                merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
    return name, merged


def algorithms_of_preset(env: str) -> list[str]:
    """Return the algorithms that have a table of their own in an environment's preset."""
    # An algorithm's config is a public name, in capitals.
    return [key for key in preset_table(env)[1] if key.upper() in headrace.__all__]
