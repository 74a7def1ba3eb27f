"""The shipped settings: presets of environments, and defaults by the kind of an environment.

Both are TOML tables of settings. An algorithm ignores a setting that it does not have. A table
inside a table holds for some algorithms only: `off_policy` for those that learn from replay,
`on_policy` for all others, and one with an algorithm's name for that one and those whose config
extends its config (APPO takes PPO's). Left out: how settings of all sources are merged
(`resolve.py`).
"""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import resources
from typing import Any

from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.config.preset_tables import preset_table
from headrace.config.run_config import RunConfig
from headrace.models.networks import image_layout
from headrace.models.policy import Network
from headrace.replay.hindsight import has_goals
from headrace.spec import EnvSpec, Space

Tables = Mapping[str, Mapping[str, Any]]
SEVERAL, IN_TURNS = "several agents", "games in turns"
GROUPS = ("on_policy", "off_policy")
"""The tables for several algorithms, by what these learn from."""


def preset(env: str, algo: str) -> tuple[str, dict[str, Any]]:
    """Return an environment's shipped preset: its name and values; ("none", {}) without one."""
    name, table = preset_table(env)
    return name, _settings_of([table], algo)


def defaults(spec: EnvSpec, algo: str, core: str = "none") -> tuple[str, dict[str, Any]]:
    """Return the name of the environment's kind, and the defaults for it and for `core`.

    An algorithm outside the package has the defaults of its own class alone.
    """
    kind = kind_of(spec)
    if algo not in ALGORITHMS:
        return kind, {}
    if kind in (SEVERAL, IN_TURNS):
        return kind, _settings_of([_tables()[kind]], algo)
    names = ["one agent", kind]
    if has_goals(spec):
        names.append("goals")
    if core != "none":
        of_kind = f"recurrent cores, {kind}"
        names += ["recurrent cores", *([of_kind] if of_kind in _tables() else [])]
    return kind, _settings_of([_tables()[name] for name in names], algo)


def kind_of(spec: EnvSpec) -> str:
    """Return the kind of an environment: a table's name in `defaults.toml`."""
    if spec.num_agents > 1:
        return IN_TURNS if spec.interface == "turns" else SEVERAL
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


def _settings_of(tables: Sequence[Mapping[str, Any]], algo: str) -> dict[str, Any]:
    """Merge tables, the later over the earlier, and the special ones over those for all."""
    config = [ALGORITHMS[algo].Config] if algo in ALGORITHMS else []
    names = {f.name for group in (RunConfig, Network, *config) for f in fields(group)}
    group = GROUPS[load_algorithm(algo).data == "replay"]
    values = dict[str, Any]()
    for table in (*tables, *(table.get(group, {}) for table in tables)):
        values |= {key: value for key, value in table.items() if key in names}
    for name, other in ALGORITHMS.items():
        if any(issubclass(each, other.Config) for each in config):
            for table in tables:
                values |= table.get(name, {})
    return values


@functools.cache
def _tables() -> Tables:
    file = resources.files("headrace.config").joinpath("defaults.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
