"""docs/migrate: tables name flags and defaults as they are, and the examples on the pages run."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from benchmarks.peers import install
from examples.thermostat import Thermostat
from headrace.config.algorithms import ALGORITHMS
from headrace.config.derive import derive
from headrace.config.resolve import read_settings
from headrace.config.run_config import AUTO_THREADS, AUTO_WORKERS, RunConfig
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.kernels.library import TagGridWorld
from headrace.models.policy import Network
from tests import python

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/migrate"
AUTO = {"num_workers": AUTO_WORKERS, "learner_threads": AUTO_THREADS, "num_learners": -1}
"""Settings that follow from the machine: both columns have the word."""
COLUMNS = ["default", "Headrace", "class", "run", "what differs"]


def tables(page):
    """Return table -> rows, each (their name, their default, our flag, class, run)."""
    found, rows = {}, None
    for line in (PAGES / f"{page}.md").read_text().splitlines():
        if line.startswith("#"):
            heading, rows = line.lstrip("# "), None
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[1:] == COLUMNS:
            rows = found.setdefault(heading, [])
        elif rows is not None and line.startswith("| "):
            assert len(cells) == len(COLUMNS) + 1, line
            rows.append([cell.strip("`") for cell in cells[:5]])
    return {name: [row for row in rows if set(row[0]) != {"-"} or row[0] == "-"]
            for name, rows in found.items()}  # fmt: skip


def rows(*pages):
    return [
        pytest.param(page, table, row, id=f"{page}-{table}-{row[0]}-{row[2]}")
        for page in pages
        for table, entries in tables(page).items()
        for row in entries
    ]


def value_of(cell):
    """Return the value that a cell shows: a Python literal, or a word."""
    try:
        return ast.literal_eval(cell)
    except (ValueError, SyntaxError):
        return cell


def is_same(value, cell):
    shown = value_of(cell)
    value, shown = (tuple(v) if isinstance(v, list) else v for v in (value, shown))
    return value == shown and isinstance(value, bool) == isinstance(shown, bool)


@functools.cache
def our_defaults(algo, make_env):
    """Return name -> value: of the classes, and in a run of an environment without a preset."""
    spec = env_spec(EnvMaker(make_env, {}))
    settings = read_settings({"env": "mine", "algo": algo}, spec=spec)
    of_classes = {
        f.name: f.default
        for cls in (RunConfig, Network, ALGORITHMS[algo].Config)
        for f in dataclasses.fields(cls)
    }
    in_run = derive(settings, spec.interface, cores=1).flat() | {"lag": settings.run.lag}
    words = dict.fromkeys(AUTO, "auto")
    assert {name: of_classes[name] for name in AUTO} == AUTO
    return of_classes | words, in_run | words


def pendulum():
    return gym.make("Pendulum-v1")


def env_of(page, algo):
    return TagGridWorld if page == "warpdrive" else pendulum if algo == "sac" else Thermostat
