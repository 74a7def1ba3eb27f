"""The shipped settings: presets of environments, and defaults by the kind of an environment.

Both are TOML tables of settings that every algorithm takes where it has them; a table inside a
table is for one algorithm alone. Left out: how settings of all sources are merged (`resolve.py`).
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from typing import Any

from headrace.config.algorithms import ALGORITHMS
from headrace.config.preset_tables import preset_table
from headrace.config.run_config import RunConfig
from headrace.models.networks import image_layout
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space

Tables = Mapping[str, Mapping[str, Any]]
SEVERAL = "several agents"


def preset(env: str, algo: str) -> tuple[str, dict[str, Any]]:
    """Return an environment's shipped preset: its name and values; ("none", {}) without one."""
    name, table = preset_table(env)
    return name, _settings_of(table, algo)


def defaults(spec: EnvSpec, algo: str, core: str = "none") -> tuple[str, dict[str, Any]]:
    """Return the defaults for environments of this kind: the kind's name, and values.

    An algorithm outside the package has the defaults of its own class alone.
    """
    kind, values = kind_of(spec), dict[str, Any]()
    names = [kind] if kind == SEVERAL else ["one agent", kind]
    if core != "none" and kind != SEVERAL:
        names.append("recurrent cores")
    for name in names:
        values |= _settings_of(_kinds()[name], algo)
    return kind, values if algo in ALGORITHMS else {}


def kind_of(spec: EnvSpec) -> str:
    """Return the kind of an environment: a table's name in `defaults.toml`."""
    if spec.num_agents > 1:
        return SEVERAL
    images = [image_layout(part) is not None for _, part in spec.seen.leaves]
    if all(images):
        return "images"
    if any(images):
        return "observations with images"
    if all(part.kind in ("discrete", "multi_discrete") for _, part in spec.seen.leaves):
        return "discrete observations"
    return "continuous control" if _is_continuous(spec.action) else "discrete actions"


def _is_continuous(action: Space) -> bool:
    return action.kind == "box" or any(_is_continuous(part) for _, part in action.parts)


def _settings_of(table: Mapping[str, Any], algo: str) -> dict[str, Any]:
    config = [ALGORITHMS[algo].Config] if algo in ALGORITHMS else []
    names = {f.name for group in (RunConfig, Network, *config) for f in fields(group)}
    of_algo: dict[str, Any] = table.get(algo, {})
    return {name: value for name, value in table.items() if name in names} | of_algo


@functools.cache
def _kinds() -> Tables:
    file = resources.files("headrace.config").joinpath("defaults.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
