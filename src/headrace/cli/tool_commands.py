"""The commands that measure, scale, plan and report, and their flags."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import tyro

from headrace.cli.flags import (
    JsonFlag,
    OptionalPath,
    RunDir,
    SettingFlags,
    explicit,
    parse,
    with_settings,
)
from headrace.errors import ConfigError
from headrace.tools.autoscale.autoscale import BUDGET_S, find_sizes
from headrace.tools.forecast import MeasuredRun, forecasts
from headrace.tools.plan.goals import Goal, parse_budget, parse_need, parse_target
from headrace.tools.plan.machines import read_catalogue
from headrace.tools.plan.planner import make_plan
from headrace.tools.plan.rates import Rates
from headrace.tools.plotting import check_output as check_picture
from headrace.tools.profile import timeline_plots
from headrace.tools.profile.profiler import profile_env, profile_run
from headrace.tools.profile.result import format_profile
from headrace.tools.report.page import write_report
from headrace.training.job import RunRequest


@dataclass(frozen=True, kw_only=True)
class _ProfileFlags(SettingFlags):
    seconds: float = 60.0
    """Duration of the profile, not counting the start of processes. Very slow steps take longer."""
    plot: OptionalPath = None
    """Draw the timeline of workers and learner, and their shares of time (PNG)."""
    trace: OptionalPath = None
    """Write the timeline (JSON), for ui.perfetto.dev."""
    env: str | None = None
    """ENV may be the directory of a run that was trained with --timeline; its settings apply then.
    If its environment is code, name it again here (module:callable)."""


def profile(argv: list[str]) -> int:
    """Run `headrace profile`."""
    flags = parse("profile", with_settings(_ProfileFlags, argv), argv)
    say = partial(print, file=sys.stderr, flush=True)
    settings = explicit(argv, flags)
    if flags.plot is not None:
        check_picture(flags.plot)
    if flags.trace is not None and (flags.trace.is_dir() or not flags.trace.parent.is_dir()):
        raise ConfigError(f"--trace {flags.trace}: expected a file in a folder that exists.")
    if flags.environment.env and Path(flags.environment.env).is_dir():
        run_dir, custom = Path(settings.pop("env")), (
            settings.pop("wrapper", ()), settings.pop("model", ""), settings.pop("algo", "")
        )  # fmt: skip
        if others := [*settings, *(["config"] if flags.config else [])]:
            raise ConfigError(
                f"{', '.join(others)}: a run's directory is profiled with the settings that it was "
                "trained with.\nLeave these out, or name the environment in place of the directory."
            )
        request = RunRequest({}, flags.env, *custom)
        result = profile_run(run_dir, request, flags.seconds, say)
    else:
        if flags.env is not None:
            raise ConfigError(
                f"--env {flags.env}: it names the code of a run's directory again, and "
                f"{flags.environment.env!r} is none.\nLeave it out."
            )
        request = RunRequest(settings, config_file=flags.config)
        result = profile_env(request, flags.seconds, say)
    flags.say(format_profile(result))
    if flags.plot is not None:
        timeline_plots.draw_profile(flags.plot, result.tracks)
        flags.say(f"Picture: {flags.plot}")
    if flags.trace is not None:
        timeline_plots.write_trace(flags.trace, result.tracks)
        flags.say(f"Trace: {flags.trace}, for https://ui.perfetto.dev")
    if flags.json:
        print(json.dumps(result.to_json()))
    return 0


@dataclass(frozen=True, kw_only=True)
class _SimulateFlags(JsonFlag):
    profile: tyro.conf.Positional[Path]
    """File with the output of `headrace profile --json`."""
    num_workers: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    """Total workers; each has as many environments as in the profile."""
    num_learners: tuple[int, ...] = (1,)
    """Total learners."""
    batch_size: int = 0
    """Env steps of an update; 0: fragments are as long as in the profile, so the batch grows."""
    cores_per_machine: int = 0
    """Cores of a machine. It has as many workers, and learners besides; 0: each process has its own
    core."""
    learners_apart: bool = False
    """Learners have machines of their own."""


def simulate(argv: list[str]) -> int:
    """Run `headrace simulate`."""
    flags = parse("simulate", _SimulateFlags, argv)
    results = forecasts(
        MeasuredRun.read(flags.profile),
        flags.num_workers,
        flags.num_learners,
        batch_size=flags.batch_size,
        cores_per_machine=flags.cores_per_machine,
        learners_apart=flags.learners_apart,
    )
    if flags.json:
        print(json.dumps({"forecasts": [asdict(forecast) for forecast in results]}))
        return 0
    for i, forecast in enumerate(results):
        if not i:
            heads = f"{'workers':>8}{'learners':>10}{'batch':>14}{'env steps/s':>14}"
            print(f"{heads}  limit (gain without it)")
        sizes = f"{forecast.num_workers:>8,}{forecast.num_learners:>10,}{forecast.batch:>14,}"
        limit = f"{forecast.limit} ({forecast.gain:.2f} x)"
        print(f"{sizes}{forecast.env_steps_per_s:>14,.0f}  {limit}", flush=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class _AutoscaleFlags(SettingFlags):
    budget_s: float = BUDGET_S
    """Maximum duration of the search (seconds)."""
    memory_gib: float | None = None
    """Memory that training may take (GiB), on the GPU if all environments are there; default: 80 %
    of the available memory."""
    batch_size: int | None = None
    """Env steps of an update (num_envs x num_steps). Default: that of flags, file, preset; open if
    all environments are one vector on the learner's device."""
    again: bool = False
    """Measure even if a result for this machine and these settings is cached."""


def autoscale(argv: list[str]) -> int:
    """Run `headrace autoscale`."""
    flags = parse("autoscale", with_settings(_AutoscaleFlags, argv), argv)
    result = find_sizes(
        RunRequest(explicit(argv, flags), config_file=flags.config),
        budget_s=flags.budget_s,
        memory_gib=flags.memory_gib,
        batch_size=flags.batch_size,
        again=flags.again,
        say=flags.say,
    )
    more = [
        word
        for name, value in result.settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags.say(result.describe())
    flags.say(f"To use it: headrace train {shlex.join([*_train_words(argv), *more])}")
    if flags.json:
        print(json.dumps(result.to_json()))
    return 0


def _train_words(argv: list[str]) -> list[str]:
    """Return the words that `headrace train` understands."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for f in fields(_AutoscaleFlags):
        if f.name != "config":
            names = {f"--{f.name}", f"--{f.name.replace('_', '-')}"}
            action = argparse.BooleanOptionalAction if f.type is bool else "store"
            parser.add_argument(*names, action=action)
    return parser.parse_known_args(argv)[1]


@dataclass(frozen=True, kw_only=True)
class _PlanFlags(JsonFlag):
    profile: OptionalPath = None
    """File with the output of `headrace profile --json`; not needed for --need."""
    machines: OptionalPath = None
    """TOML file with machines for rent and their prices; default: an example."""
    target: str = ""
    """The least cost for this, as in "20M env_steps in 1h"."""
    budget: str = ""
    """The most env steps/s for this, as in "5 USD/h"."""
    need: str = ""
    """The least cost for GPUs and further CPU cores for workers, as in "8 gpus 64 cpus"."""
    one_learner_kind: bool = False
    """Put all learners on machines of one kind."""


def plan(argv: list[str]) -> int:
    """Run `headrace plan`."""
    flags = parse("plan", _PlanFlags, argv)
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
    run_dir: RunDir
    """Directory of the run, which may still be running."""
    output: OptionalPath = None
    """File of the page (HTML); default: report.html in that directory."""
    usd_per_hour: float | None = None
    """Price of the run's machines (USD/h), to show the cost so far."""


def report(argv: list[str]) -> int:
    """Run `headrace report`."""
    flags = parse("report", _ReportFlags, argv)
    print(f"Report: {write_report(flags.run_dir, flags.output, flags.usd_per_hour)}")
    return 0
