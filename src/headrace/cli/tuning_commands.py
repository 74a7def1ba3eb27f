"""The commands of many runs, `tune` and `sweep`, and their flags."""

import abc
import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from headrace.cli.argv import flag_names
from headrace.cli.flags import SettingsVerb, explicit
from headrace.cli.verbs import OptionalPath, RunningVerb, Verb
from headrace.config.resolve import read_config_file
from headrace.errors import ConfigError, UsageError, flag
from headrace.training.job import RunRequest
from headrace.tuning import api, planning
from headrace.tuning.results import BEST

_STUDY = tyro.conf.arg(metavar="DIR", help_behavior_hint="")
_MAY_CHANGE = ("trials", "budget_s")
"""Options that may change when a study goes on."""


@dataclass(frozen=True, kw_only=True)
class _StudyVerb(RunningVerb, SettingsVerb):
    """A verb that runs a study."""

    parallel: int = 0
    """Runs at a time. 0: one for each CPU core, or as many as the cluster has room for
    (--cluster: the runs of a study are tasks on any of its machines)."""
    metric: tuple[str, ...] = ("eval_return",)
    """What runs are compared by: eval_return (likeliest actions, the same 20 episodes for all),
    mean_return (of the last 100 training episodes), steps_to RETURN or seconds_to RETURN."""
    study: OptionalPath = None
    """Directory of the study. Default: a new one below runs/."""
    resume: Annotated[Path | None, _STUDY] = None
    """Go on with the study in this directory."""
    show: Annotated[Path | None, _STUDY] = None
    """Show the study in this directory, which may still be running, and write its page
    (study.html)."""

    def execute(self, argv: list[str]) -> int:
        if self.show is not None:
            refuse_beside("show", flag_names(argv), ("json", "quiet"))
            study = api.load_study(self.show)
        elif self.resume is not None:
            study = self.go_on(self.resume, self._request(argv), argv)
        else:
            study = api.begin(self._request(argv), self.options(), self.study, self.say)
        self.say(study.describe())
        self.say(self._page(study))
        if study.write_best() is not None:
            self.say(f"To train with the best: {study.plan.train_command(study.dir / BEST)}")
        if self.json:
            print(json.dumps(study.to_json()))
        return 0 if study.best is not None else 1

    def _page(self, study: api.Study) -> str:
        """Write the page, and say where it is; a study does not fail because it has no picture."""
        try:
            return f"Page: {study.write_page()}"
        except UsageError as error:
            return f"No page: {error}"

    def _request(self, argv: list[str]) -> RunRequest:
        return RunRequest(explicit(argv, self), config_file=read_config_file(self.config))

    @abc.abstractmethod
    def options(self) -> planning.Options:
        """Return the options of a new study."""

    def go_on(self, folder: Path, request: RunRequest, argv: list[str]) -> api.Study:
        """Go on with a study; ConfigError for an option that cannot change."""
        given = {f.name for f in (*fields(_Tune), *fields(_Sweep))} & set(flag_names(argv))
        fixed = given - {"resume", "json", "quiet", "config", *_MAY_CHANGE}
        planning.refuse_changes([flag(name) for name in sorted(fixed)], folder)
        changes = {n: getattr(self, n) for n in _MAY_CHANGE if n in flag_names(argv)}
        return api.go_on(folder, request, self.say, **changes)


@dataclass(frozen=True, kw_only=True)
class _Tune(_StudyVerb):
    trials: int = planning.TRIALS
    """How many settings are tried; the first is the preset."""
    space: OptionalPath = None
    """TOML file with the settings that vary, such as lr = { log = [1e-5, 1e-2] }. Default: those of
    the algorithm, without what a flag fixes."""
    sampler: str = "tpe"
    """How settings are chosen: tpe, random, grid or cmaes."""
    prune: str = "asha"
    """Which trials go on after a ninth and a third of their env steps. asha: the best third;
    median: those that are not below the median; none: all, and they are measured at the end."""
    budget_s: float = 0.0
    """Seconds for all, those of fresh seeds included. 0: no limit."""
    seeds: int = 1
    """Runs of each trial; its score is their mean."""
    final_trials: int = 3
    """How many of the best trials are trained again with fresh seeds at the end, beside the
    preset."""
    final_seeds: int = 5
    """How many fresh seeds. 0: none."""
    pbt: bool = False
    """Train a population in place of a search: the worst quarter is replaced by copies of the best,
    with other values of the settings that may change during a run. What comes out is a schedule of
    them."""
    population: int = 0
    """Members of the population. 0: 8."""
    ready_env_steps: int = 0
    """Env steps after which they are measured, and the worst replaced. 0: a tenth of all."""

    def options(self) -> planning.Options:
        names = {f.name for f in fields(planning.Options)} - {"verb"}
        return planning.Options(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class _Sweep(_StudyVerb):
    grid: tuple[str, ...] = ()
    """Settings and their values, as in --grid lr=1e-3,3e-4 hidden_sizes=[64,64],[256,256]: all
    combinations are trained."""
    seeds: int = 3
    """Runs of each combination."""

    def options(self) -> planning.Options:
        return planning.sweep_options(parse_grid(self.grid), self.seeds, self.parallel, self.metric)


def refuse_beside(verb: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ConfigError for flags that would have no effect beside another one."""
    if more := sorted({*names} - {verb, *allowed}):
        raise ConfigError(
            f"{', '.join(map(flag, more))}: no effect beside {flag(verb)}.\nLeave these out."
        )


def parse_grid(words: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the settings and values of `name=value,value` words; ConfigError."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier() or not values:
            raise ConfigError(f"--grid {word}: expected name=value,value, as in lr=1e-3,3e-4.")
        if name in grid:
            raise ConfigError(f"--grid has {name} twice: put all its values after one.")
        try:
            grid[name] = list(ast.literal_eval(f"[{values}]"))
        except (ValueError, SyntaxError):
            grid[name] = [_plain(each) for each in values.split(",")]
    return grid


def _plain(text: str) -> Any:
    """Return a word as a number or a truth value, if it is one."""
    words = {"true": True, "false": False}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


FLAGS: dict[str, type[Verb]] = {"tune": _Tune, "sweep": _Sweep}
