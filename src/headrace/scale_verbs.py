"""The flags of the verbs that measure, scale and plan. Left out: those of training (`verbs.py`)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from headrace.scale.goals import Goal, parse_budget, parse_need, parse_target
from headrace.scale.html_report import write_report
from headrace.scale.machines import read_catalogue
from headrace.scale.plan import make_plan
from headrace.scale.rates import Rates
from headrace.verbs import parse

_Path = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]


@dataclass(frozen=True)
class _PlanFlags:
    profile: _Path = None
    """What `headrace profile --json` printed (a file); --need does without."""
    machines: _Path = None
    """TOML file with the machines that can be rented, and their prices; default: an example."""
    target: str = ""
    """The least cost for this, as in "20M env_steps in 1h"."""
    budget: str = ""
    """The most env steps/s for this, as in "5 USD/h"."""
    need: str = ""
    """The least cost for GPUs, and CPU cores for samplers besides, as in "8 gpus 64 cpus"."""
    one_learner_kind: bool = False
    """All learners are on machines of one kind."""
    json: bool = False
    """Print one JSON object."""


def plan(argv: list[str], description: str) -> int:
    """`headrace plan`."""
    flags = parse("plan", description, _PlanFlags, argv)
    goals: list[Goal] = []
    goals += [parse_target(flags.target)] if flags.target else []
    goals += [parse_budget(flags.budget)] if flags.budget else []
    goals += [parse_need(flags.need)] if flags.need else []
    rates = Rates.read(flags.profile) if flags.profile else None
    answer = make_plan(goals, read_catalogue(flags.machines), rates, flags.one_learner_kind)
    print(json.dumps(answer.to_json()) if flags.json else answer.describe())
    return 0


@dataclass(frozen=True)
class _ReportFlags:
    run_dir: tyro.conf.Positional[Path]
    """Directory of the run, which may be going on."""
    output: _Path = None
    """The page (HTML); default: report.html in that directory."""
    usd_per_hour: float | None = None
    """What the run's machines cost (USD/h), for its cost so far."""


def report(argv: list[str], description: str) -> int:
    """`headrace report`."""
    flags = parse("report", description, _ReportFlags, argv)
    print(f"Report: {write_report(flags.run_dir, flags.output, flags.usd_per_hour)}")
    return 0
