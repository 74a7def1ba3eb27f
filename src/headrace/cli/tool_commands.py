"""The flags of the verbs that measure, scale and plan.

Left out: those of training (`commands.py`).
"""

import json
import shlex
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import tyro

from headrace.cli.flags import OptionalPath, RunDir, SettingFlags, explicit, parse, with_settings
from headrace.config.user_code import code
from headrace.errors import ConfigError
from headrace.tools.autoscale.autoscale import BUDGET_S, find_sizes
from headrace.tools.forecast import Profiled, forecasts
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
    """That all of it may take, but for starting processes, and for steps that take seconds each."""
    plot: OptionalPath = None
    """Draw the timeline of workers and learner, and their shares of time (PNG)."""
    trace: OptionalPath = None
    """Write the timeline (JSON), for ui.perfetto.dev."""
    json: bool = False
    """Print one JSON object as standard output's last line, for headrace plan; the rest to standard
    error."""
    env: str | None = None
    """In place of ENV, a run's directory (trained with --timeline) may be given: its settings apply
    then. Where its environment is code, it is named again by this (module:callable)."""


def profile(argv: list[str], description: str) -> int:
    """`headrace profile`."""
    flags = parse("profile", description, with_settings(_ProfileFlags, argv), argv)
    out = sys.stderr if flags.json else sys.stdout
    say = partial(print, file=sys.stderr, flush=True)
    given = explicit(argv, flags)
    if flags.plot is not None:
        check_picture(flags.plot)
    if flags.trace is not None and (flags.trace.is_dir() or not flags.trace.parent.is_dir()):
        raise ConfigError(f"--trace {flags.trace}: expected a file in a folder that exists.")
    if flags.environment.env and Path(flags.environment.env).is_dir():
        run_dir, own = Path(given.pop("env")), (
            given.pop("wrapper", ()), given.pop("model", ""), given.pop("algo", "")
        )  # fmt: skip
        if others := [*given, *(["config"] if flags.config else [])]:
            raise ConfigError(
                f"{', '.join(others)}: a run's directory is profiled with the settings that it was "
                "trained with.\nLeave these out, or name the environment in place of the directory."
            )
        request = RunRequest(env=flags.env, code=code(*own))
        result = profile_run(run_dir, request, flags.seconds, say)
    else:
        if flags.env is not None:
            raise ConfigError(
                f"--env {flags.env}: it names the code of a run's directory again, and "
                f"{flags.environment.env!r} is none.\nLeave it out."
            )
        request = RunRequest(given, config_file=flags.config)
        result = profile_env(request, flags.seconds, say)
    print(format_profile(result), file=out)
    if flags.plot is not None:
        timeline_plots.draw_profile(flags.plot, result.tracks)
        print(f"Picture: {flags.plot}", file=out)
    if flags.trace is not None:
        timeline_plots.write_trace(flags.trace, result.tracks)
        print(f"Trace: {flags.trace}, for https://ui.perfetto.dev", file=out)
    if flags.json:
        print(json.dumps(result.to_json()))
    return 0


@dataclass(frozen=True)
class _SimulateFlags:
    profile: tyro.conf.Positional[Path]
    """What `headrace profile --json` printed (a file)."""
    num_workers: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    """Workers in all; each has as many environments as in the profile."""
    num_learners: tuple[int, ...] = (1,)
    """Learners in all."""
    batch_size: int = 0
    """Env steps of an update; 0: fragments are as long as in the profile, and so it grows."""
    cores_per_machine: int = 0
    """Machines have as many workers as cores, and learners beside them; 0: each process has a core
    of its own."""
    learners_apart: bool = False
    """Learners have machines of their own."""
    json: bool = False
    """Print one JSON object."""


def simulate(argv: list[str], description: str) -> int:
    """`headrace simulate`."""
    flags = parse("simulate", description, _SimulateFlags, argv)
    found = forecasts(
        Profiled.read(flags.profile),
        flags.num_workers,
        flags.num_learners,
        batch_size=flags.batch_size,
        cores_per_machine=flags.cores_per_machine,
        learners_apart=flags.learners_apart,
    )
    if flags.json:
        print(json.dumps({"forecasts": [of.to_json() for of in found]}))
        return 0
    for i, of in enumerate(found):
        if not i:
            heads = f"{'workers':>8}{'learners':>10}{'batch':>14}{'env steps/s':>14}"
            print(f"{heads}  limit (gain without it)")
        sizes = f"{of.num_workers:>8,}{of.num_learners:>10,}{of.batch:>14,}"
        print(f"{sizes}{of.env_steps_per_s:>14,.0f}  {of.limit} ({of.gain:.2f} x)", flush=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class _AutoscaleFlags(SettingFlags):
    budget_s: float = BUDGET_S
    """Seconds that all of it may take."""
    memory_gib: float | None = None
    """Memory that training may take (GiB): of the GPU where all environments are on one; default:
    80 % of what is available."""
    batch_size: int | None = None
    """Env steps of an update (num_envs x num_steps); default: those of flags, file or preset; where
    all environments are one vector beside the learner, whatever is fast."""
    again: bool = False
    """Measure even if there is a result for this machine and these settings."""
    json: bool = False
    """Print one JSON object as standard output's last line; progress goes to standard error."""


_OWN = {
    f"{prefix}{f.name}": 0 if f.type is bool else 1
    for f in fields(_AutoscaleFlags)
    for prefix in (("", "no_") if f.type is bool else ("",))
    if f.name != "config"
}
"""Flags that are not for `train`, and how many values each has."""


def autoscale(argv: list[str], description: str) -> int:
    """`headrace autoscale`."""
    flags = parse("autoscale", description, with_settings(_AutoscaleFlags, argv), argv)
    out = sys.stderr if flags.json else sys.stdout
    say = partial(print, file=out, flush=True)
    result = find_sizes(
        RunRequest(explicit(argv, flags), config_file=flags.config),
        budget_s=flags.budget_s,
        memory_gib=flags.memory_gib,
        batch_size=flags.batch_size,
        again=flags.again,
        say=say,
    )
    more = [
        word
        for name, value in result.settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    say(result.describe())
    say(f"To use it: headrace train {shlex.join([*_of_train(argv), *more])}")
    if flags.json:
        print(json.dumps(result.to_json()))
    return 0


def _of_train(argv: list[str]) -> list[str]:
    """The words that `headrace train` understands as well."""
    kept, skip = [], 0
    for word in argv:
        name, equals, _ = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if skip:
            skip -= 1
        elif word.startswith("--") and name in _OWN:
            skip = 0 if equals else _OWN[name]
        else:
            kept.append(word)
    return kept


@dataclass(frozen=True)
class _PlanFlags:
    profile: OptionalPath = None
    """What `headrace profile --json` printed (a file); --need does without."""
    machines: OptionalPath = None
    """TOML file with the machines that can be rented, and their prices; default: an example."""
    target: str = ""
    """The least cost for this, as in "20M env_steps in 1h"."""
    budget: str = ""
    """The most env steps/s for this, as in "5 USD/h"."""
    need: str = ""
    """The least cost for GPUs and further CPU cores for workers, as in "8 gpus 64 cpus"."""
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
    run_dir: RunDir
    """Directory of the run, which may be going on."""
    output: OptionalPath = None
    """The page (HTML); default: report.html in that directory."""
    usd_per_hour: float | None = None
    """What the run's machines cost (USD/h), for its cost so far."""


def report(argv: list[str], description: str) -> int:
    """`headrace report`."""
    flags = parse("report", description, _ReportFlags, argv)
    print(f"Report: {write_report(flags.run_dir, flags.output, flags.usd_per_hour)}")
    return 0
