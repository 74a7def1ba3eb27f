"""The commands that measure, scale, plan and report, and their flags."""

import json
import shlex
import sys
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import tyro

from headrace.cli.argv import without_flags
from headrace.cli.flags import SettingsVerb, explicit
from headrace.cli.verbs import JsonVerb, OptionalPath, RunDir, Verb
from headrace.config.resolve import read_config_file
from headrace.errors import ConfigError, flag
from headrace.tools.autoscale.autoscale import BUDGET_S, find_sizes
from headrace.tools.forecast import MeasuredRun, forecasts
from headrace.tools.plan.goals import Goal, parse_budget, parse_need, parse_target
from headrace.tools.plan.machines import read_catalogue
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.spot import make_plan
from headrace.tools.plotting import check_output as check_picture
from headrace.tools.profile import timeline_plots
from headrace.tools.profile.profiler import profile_env, profile_run
from headrace.tools.profile.result import format_profile
from headrace.tools.report.page import write_report
from headrace.training.job import RunRequest


@dataclass(frozen=True, kw_only=True)
class _Profile(SettingsVerb):
    seconds: float = 60.0
    """Duration of the profile, not counting the start of processes. Very slow steps take longer."""
    plot: OptionalPath = None
    """Draw the timeline of workers and learner, and their shares of time (PNG)."""
    trace: OptionalPath = None
    """Write the timeline (JSON), for ui.perfetto.dev."""
    env: str | None = None
    """ENV may be the directory of a run that was trained with --timeline; its settings apply then.
    If its environment is code, name it again here (module:callable)."""

    def execute(self, argv: list[str]) -> None:
        say = partial(print, file=sys.stderr, flush=True)
        settings = explicit(argv, self)
        if self.plot is not None:
            check_picture(self.plot)
        if self.trace is not None and (self.trace.is_dir() or not self.trace.parent.is_dir()):
            raise ConfigError(f"--trace {self.trace}: expected a file in a folder that exists.")
        env = settings.get("env", "")
        if env and Path(env).is_dir():
            del settings["env"]
            code = settings.pop("wrapper", ()), settings.pop("model", ""), settings.pop("algo", "")
            eval_env = settings.pop("eval_env", None)
            if others := [*settings, *(["config"] if self.config else [])]:
                raise ConfigError(
                    f"{', '.join(others)}: a run's directory is profiled with the settings that it "
                    "was trained with.\nLeave these out, or name the environment in place of the "
                    "directory."
                )
            request = RunRequest({}, self.env, *code, eval_env=eval_env)
            result = profile_run(Path(env), request, self.seconds, say)
        else:
            if self.env is not None:
                raise ConfigError(
                    f"--env {self.env}: it names the code of a run's directory again, and {env!r} "
                    "is none.\nLeave it out."
                )
            request = RunRequest(settings, config_file=read_config_file(self.config))
            result = profile_env(request, self.seconds, say)
        self.say(format_profile(result))
        if self.plot is not None:
            timeline_plots.draw_profile(self.plot, result.tracks)
            self.say(f"Picture: {self.plot}")
        if self.trace is not None:
            timeline_plots.write_trace(self.trace, result.tracks)
            self.say(f"Trace: {self.trace}, for https://ui.perfetto.dev")
        if self.json:
            print(json.dumps(result.to_json()))


@dataclass(frozen=True, kw_only=True)
class _Simulate(JsonVerb):
    profile: tyro.conf.Positional[Path]
    """File with the output of `headrace profile --json`."""
    num_workers: tuple[int, ...] = (1, 10, 100, 1_000, 10_000)
    """Total workers; each has as many environments as in the profile."""
    num_learners: tuple[int, ...] = (1,)
    """Total learners."""
    env_steps_per_update: int = 0
    """Env steps of an update; 0: fragments are as long as in the profile, so the batch grows."""
    cores_per_machine: int = 0
    """Cores of a machine. It has as many workers, and learners besides; 0: each process has its own
    core."""
    learners_apart: bool = False
    """Learners have machines of their own."""

    def execute(self, argv: list[str]) -> None:
        results = forecasts(
            MeasuredRun.read(self.profile),
            self.num_workers,
            self.num_learners,
            env_steps_per_update=self.env_steps_per_update,
            cores_per_machine=self.cores_per_machine,
            learners_apart=self.learners_apart,
        )
        if self.json:
            print(json.dumps({"forecasts": [asdict(forecast) for forecast in results]}))
            return
        for i, forecast in enumerate(results):
            if not i:
                heads = f"{'workers':>8}{'learners':>10}{'batch':>14}{'env steps/s':>14}"
                print(f"{heads}  limit (gain without it)")
            sizes = f"{forecast.num_workers:>8,}{forecast.num_learners:>10,}{forecast.batch:>14,}"
            limit = f"{forecast.limit} ({forecast.gain:.2f} x)"
            print(f"{sizes}{forecast.env_steps_per_s:>14,.0f}  {limit}", flush=True)


@dataclass(frozen=True, kw_only=True)
class _Autoscale(SettingsVerb):
    budget_s: float = BUDGET_S
    """Maximum duration of the search (seconds)."""
    memory_gib: float | None = None
    """Memory that training may take (GiB), on the GPU if all environments are there; default: 80 %
    of the available memory."""
    env_steps_per_update: int | None = None
    """Env steps of an update (num_envs x num_steps). Default: that of flags, file, preset; open if
    all environments are one vector on the learner's device."""
    again: bool = False
    """Measure even if a result for this machine and these settings is cached."""

    def execute(self, argv: list[str]) -> None:
        result = find_sizes(
            RunRequest(explicit(argv, self), config_file=read_config_file(self.config)),
            budget_s=self.budget_s,
            memory_gib=self.memory_gib,
            env_steps_per_update=self.env_steps_per_update,
            again=self.again,
            say=self.say,
        )
        more = [
            word for name, value in result.settings.items() for word in (flag(name), str(value))
        ]
        self.say(result.describe())
        self.say(f"To use it: headrace train {shlex.join([*_train_words(argv), *more])}")
        if self.json:
            print(json.dumps(result.to_json()))


def _train_words(argv: list[str]) -> list[str]:
    """Return the words that `headrace train` understands."""
    own = {f.name: f.type is not bool for f in fields(_Autoscale) if f.name != "config"}
    return without_flags(argv, own)


@dataclass(frozen=True, kw_only=True)
class _Plan(JsonVerb):
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
    spot: bool = False
    """Rent spot machines where they are cheaper, though some are taken away; `[machines.NAME.spot]`
    has their prices."""

    def execute(self, argv: list[str]) -> None:
        goals: list[Goal] = []
        goals += [parse_target(self.target)] if self.target else []
        goals += [parse_budget(self.budget)] if self.budget else []
        goals += [parse_need(self.need)] if self.need else []
        rates = Rates.read(self.profile) if self.profile else None
        catalogue = read_catalogue(self.machines)
        answer = make_plan(goals, catalogue, rates, self.one_learner_kind, self.spot)
        self.answer(answer.to_json(), answer.describe())


@dataclass(frozen=True, kw_only=True)
class _Report(Verb):
    run_dir: RunDir
    """Directory of the run, which may still be running."""
    output: OptionalPath = None
    """File of the page (HTML); default: report.html in that directory."""
    usd_per_hour: float | None = None
    """Price of the run's machines (USD/h), to show the cost so far."""

    def execute(self, argv: list[str]) -> None:
        print(f"Report: {write_report(self.run_dir, self.output, self.usd_per_hour)}")


FLAGS: dict[str, type[Verb]] = {
    "profile": _Profile, "simulate": _Simulate, "autoscale": _Autoscale,
    "plan": _Plan, "report": _Report,
}  # fmt: skip
