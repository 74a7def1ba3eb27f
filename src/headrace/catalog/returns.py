"""Returns by environment and algorithm: those that others published, and our own."""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

_FOLDER = resources.files("headrace.catalog")


@dataclass(frozen=True)
class Published:
    """A return that others published.

    Attributes:
        of: the id that was trained there, if it is another version.
    """

    mean_return: float
    env_steps: int
    source: str
    of: str = ""


@dataclass(frozen=True)
class Own:
    """What a preset of ours reaches: the mean of its seeds' evaluations.

    `benchmarks/presets` writes `own_returns.json`; nothing in it is written by hand.

    Attributes:
        standard_error: of the mean over seeds; None with one seed.
        env_steps: of each seed's training.
    """

    mean_return: float
    standard_error: float | None
    env_steps: int
    seeds: int


def published(env_id: str) -> dict[str, Published]:
    """Return the published returns of an id, by algorithm."""
    data = _published_toml()
    found = data["returns"].get(env_id, {})
    return {algo: Published(source=data["source"], **row) for algo, row in found.items()}


def own(env_id: str) -> dict[str, Own]:
    """Return our returns of an id, by algorithm."""
    return {algo: Own(**row) for algo, row in _own_json().get(env_id, {}).items()}


@cache
def _published_toml() -> dict[str, Any]:
    text = _FOLDER.joinpath("published.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _own_json() -> dict[str, Any]:
    text = _FOLDER.joinpath("own_returns.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def format_return(mean: float) -> str:
    """Return a mean return as text: below 10 with two decimals, below 1,000 with one."""
    decimals = 2 if abs(mean) < 10 else 1 if abs(mean) < 1000 else 0
    text = f"{round(mean, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no -0
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_steps(env_steps: int) -> str:
    """Return env steps as text, such as `20 k` or `1 M`."""
    if env_steps < 1000:
        return str(env_steps)
    if env_steps < 950_000:
        return f"{env_steps / 1e3:.0f} k"
    return f"{env_steps / 1e6:.1f}".removesuffix(".0") + " M"
