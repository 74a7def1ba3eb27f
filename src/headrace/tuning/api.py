"""`headrace.tune` and `headrace.sweep`: a study is planned, begun or gone on with, and returned.

Left out: what makes the plan (`planning.py`), the loop (`study.py`), files (`plan.py`), the command
line (`cli/tuning_commands.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config.resolve import NO_FILE
from headrace.envs.factory import EnvLike
from headrace.envs.registry import newest_version
from headrace.errors import ConfigError, RunDirError
from headrace.storage import run_dir as rundir
from headrace.training.api import request_for
from headrace.training.job import RunRequest, inspect_request
from headrace.training.launch import check_alone
from headrace.tuning import results
from headrace.tuning.page import write_page
from headrace.tuning.plan import Plan, Trial, read_plan, read_trials
from headrace.tuning.planning import (
    TRIALS,
    Options,
    check_options,
    describe_plan,
    deterministic,
    num_trials,
    off_cluster,
    plan_of,
    refuse_changes,
    sweep_options,
    with_code,
)
from headrace.tuning.runners.choice import connected
from headrace.tuning.space import parse_space
from headrace.tuning.study import Say, Search, all_failed


@dataclass(frozen=True)
class Study:
    """A study and its trials, as they are in its directory."""

    dir: Path
    plan: Plan
    _trials: list[Trial]

    @property
    def best(self) -> dict[str, Any] | None:
        """Settings of the best trial besides those of all; None if no trial was measured."""
        best = results.best_of(self.plan, self._trials)
        return None if best is None else dict(best.changes)

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Each trial: number, state, env steps, value, fresh value and interval, settings."""
        return results.rows(self.plan, self._trials)

    def table(self) -> dict[str, list[Any]]:
        """Return the trials as columns, for `pandas.DataFrame` and its like."""
        names = (
            "number", "is_preset", "state", "env_steps", "value", "fresh", "fresh_interval",
            "seconds", "reason",
        )  # fmt: skip
        columns = {name: [row[name] for row in self.trials] for name in names}
        return columns | {
            name: [row["values"].get(name) for row in self.trials] for name in self.plan.space
        }

    def describe(self) -> str:
        """Format the best trials, failures, the verdict, and what is left to do as text."""
        lines = [results.describe(self.plan, self._trials)]
        if ended := all_failed(self.plan, self._trials):
            lines += ended
        elif cut := results.unfinished(self.plan, self._trials):
            command, more = self.plan.command(self.dir), ""
            if self.plan.budget_s:
                command += f" --budget-s {2 * self.plan.budget_s:g}"
                spent = max((trial.spent_s for trial in self._trials), default=0.0)
                more = f" (seconds of the whole study, which has taken {spent:,.0f})"
            lines += [*cut, f"To go on: {command}{more}"]
        return "\n".join(lines)

    def write_best(self) -> Path | None:
        """Write `best.toml`, as of now; None if no trial was measured. RunDirError: no room."""
        return results.write_best(self.dir, self.plan, self._trials)

    def write_page(self) -> Path:
        """Write the study's page (`study.html`), and return its file.

        Raises:
            MissingExtraError: the `plot` extra is missing.
            RunDirError: there is no room.
        """
        return write_page(self.dir, self.plan, self._trials)

    def to_json(self) -> dict[str, Any]:
        """Return what `headrace tune --json` prints."""
        best = results.best_of(self.plan, self._trials)
        return {
            "study": str(self.dir),
            "metric": self.plan.metric.title,
            "best": None if best is None else best.number,
            "best_settings": self.best,
            "verdict": results.verdict(self.plan, self._trials),
            "trials": self.trials,
        }


def tune(
    env: EnvLike | None = None,
    *,
    trials: int | None = None,
    space: str | Path | Mapping[str, Any] | None = None,
    sampler: str = "tpe",
    prune: str = "asha",
    metric: str = "eval_return",
    parallel: int = 0,
    budget_s: float | None = None,
    seeds: int = 1,
    final_trials: int = 3,
    final_seeds: int = 5,
    pbt: bool = False,
    population: int = 0,
    ready_env_steps: int = 0,
    study: str | Path | None = None,
    quiet: bool = False,
    **arguments: Any,
) -> Study:
    """Search for settings that learn better than the preset.

    Args:
        env: as in `headrace.train`.
        trials: how many settings are tried, the preset included; 50 by default.
        space: settings that vary: a TOML file, or a dict as `{"lr": {"log": [1e-5, 1e-2]}}`; None:
            the algorithm's.
        sampler: `tpe`, `random`, `grid` or `cmaes`.
        prune: `asha`, `median` or `none`: see `headrace.tuning.pruning`.
        metric: `eval_return`, `mean_return`, `steps_to RETURN` or `seconds_to RETURN`.
        parallel: runs at a time; 0: one for each CPU core, or as many as the cluster has room for.
        budget_s: seconds for all, those of fresh seeds included; 0 or None: no limit.
        seeds: runs of each trial.
        final_trials, final_seeds: at the end so many of the best trials, and the preset, are
            trained with so many seeds that the search has not seen.
        pbt, population: train so many members (0: 8) in place of a search, as
            `headrace.tuning.population` says.
        ready_env_steps: env steps after which the worst are replaced; 0: a tenth of all.
        study: directory; default: a new one below `runs/`. If it holds a study, that study goes
            on: then only `trials`, `budget_s`, `cluster` and the study's code may be given.
        **arguments: those of `headrace.train`, of all trials; `cluster` is where the runs are.

    Raises:
        ConfigError, MissingExtraError: an option is invalid, or needs an extra (`tpe`: `tune`).
        HeadraceError: the first trials all failed.
        RunDirError: the directory is in use, or cannot be written.
        KeyboardInterrupt: the study was interrupted; it can go on.
    """
    options = Options(
        space=Path(space) if isinstance(space, str) else space, sampler=sampler, prune=prune,
        metric=tuple(metric.split()), parallel=parallel, seeds=seeds, final_trials=final_trials,
        final_seeds=final_seeds, pbt=pbt, population=population, ready_env_steps=ready_env_steps,
    )  # fmt: skip
    folder, say = None if study is None else Path(study), _say(quiet)
    request = replace(request_for("", **arguments), env=env)
    if folder is not None and (folder / rundir.STUDY).exists():
        refuse_changes(options.changed(), folder)
        return go_on(folder, request, say, trials=trials, budget_s=budget_s)
    trials = TRIALS if trials is None else trials
    return begin(request, replace(options, trials=trials, budget_s=budget_s or 0.0), folder, say)


def sweep(
    env: EnvLike,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 3,
    parallel: int = 0,
    metric: str = "eval_return",
    study: str | Path | None = None,
    quiet: bool = False,
    **arguments: Any,
) -> Study:
    """Train all combinations of some settings, each with several seeds.

    Args:
        grid: settings and their values, such as `{"lr": [1e-3, 3e-4]}`.

    The other arguments, and errors, are those of `tune`, which also goes on with one that was cut:
    `headrace.tune(study=DIR)`.
    """
    options = sweep_options(grid, seeds, parallel, tuple(metric.split()))
    folder = None if study is None else Path(study)
    return begin(request_for(env, **arguments), options, folder, _say(quiet))


def begin(request: RunRequest, options: Options, folder: Path | None, say: Say) -> Study:
    """Begin a study of a request, and follow it to its end; arguments as of `tune`."""
    check_alone(options.verb)
    check_options(options)
    request, cluster = off_cluster(request)
    given = {**request.config_file.settings, **request.explicit}
    if cluster and given.get("num_learners", -1) == -1:
        request = request.change(num_learners=1)  # not by the GPUs of this machine
    inspected = with_code(inspect_request(deterministic(request)))
    plan = plan_of(inspected, options, cluster or "")
    folder = folder or rundir.unused(f"{plan.verb}_{plan.env}_{plan.algo}")
    with rundir.locked(folder), connected(plan):
        if (folder / rundir.STUDY).exists():
            raise RunDirError(
                f"{folder} holds a study already.\nTo go on with it: "
                f"{read_plan(folder).command(folder)}\n"
                "For a new one choose another directory with --study."
            )
        plan.write(folder)
        return _follow(plan, inspected, folder, [], say)


def go_on(
    folder: Path,
    request: RunRequest,
    say: Say,
    *,
    trials: int | None = None,
    budget_s: float | None = None,
) -> Study:
    """Go on with a study; `request` names its code again.

    Raises:
        ConfigError: some of the study's code is not named again.
        RunDirError: there is no study, or it is in use.
    """
    plan = read_plan(folder)
    check_alone(plan.verb)
    given: dict[str, Any] = {"trials": trials, "budget_s": budget_s}
    changes = {name: value for name, value in given.items() if value is not None}
    if changes and plan.verb == "sweep":
        raise ConfigError(f"{', '.join(changes)}: the sweep in {folder} goes on as it began.")
    if "trials" in changes and plan.population:
        raise ConfigError(
            f"trials={trials}: the population in {folder} goes on with its {plan.population} "
            "members.\nLeave --trials out."
        )
    options = Options(sampler=plan.sampler, **changes)
    check_options(options)
    request, cluster = off_cluster(request)
    changes |= {} if cluster is None else {"cluster": cluster}
    if "trials" in changes:
        changes["trials"] = num_trials(options, parse_space(plan.space, "the study"))
    trials_before = read_trials(folder)
    _check_more(plan, trials_before, changes)
    if ended := all_failed(plan, trials_before):
        raise ConfigError("\n".join(ended))
    plan = replace(plan, **changes)
    again = _request_again(plan, request, folder)
    with rundir.locked(folder), connected(plan):
        if changes:
            plan.write(folder)
        return _follow(plan, again, folder, read_trials(folder), say)


def _check_more(plan: Plan, trials: list[Trial], changes: Mapping[str, Any]) -> None:
    """Raise ConfigError if a study is to have less than it has had already."""
    spent = max((trial.spent_s for trial in trials), default=0.0)
    if 0 < changes.get("budget_s", 0) <= spent:
        raise ConfigError(
            f"budget_s={changes['budget_s']:g}, but the study has taken {spent:,.0f} s already: "
            "expected more, since the budget is of the whole study."
        )
    if changes.get("trials", len(trials)) < len(trials):
        raise ConfigError(
            f"trials={changes['trials']}, but the study has {len(trials)} already: expected as "
            "many or more."
        )


def load_study(folder: Path) -> Study:
    """Read a study; RunDirError if there is none."""
    return Study(folder, read_plan(folder), read_trials(folder))


def _follow(plan: Plan, request: RunRequest, folder: Path, trials: list[Trial], say: Say) -> Study:
    say(describe_plan(plan, folder))
    search = Search(plan, request, folder, trials, say)
    try:
        search.run()
    except KeyboardInterrupt:
        say(f"Stopped. To go on: {plan.command(folder)}")
        raise
    study = Study(folder, plan, search.trials)
    study.write_best()
    return study


def _request_again(plan: Plan, request: RunRequest, folder: Path) -> RunRequest:
    """Return the request of a study that goes on: its settings, with the code of `request`."""
    given = {**request.config_file.settings, **request.explicit}
    named = {
        "env": request.env or given.get("env"),
        "eval_env": request.eval_env or given.get("eval_env"),
        "wrapper": request.wrappers or given.get("wrapper"),
        "model": request.model or given.get("model"),
        "algo": request.algorithm or given.get("algo"),
    }
    if missing := [name for name in plan.code if not named[name]]:
        raise ConfigError(
            f"The study in {folder} has code of its own, and a file is not allowed to name code to "
            f"run.\nName it again ({', '.join(missing)}), as when the study began: "
            f"{plan.command(folder)}"
        )
    known = plan.fixed | {"env": plan.env, "algo": plan.algo}
    named["env"] = newest_version(named["env"]) if isinstance(named["env"], str) else named["env"]
    # An environment's code is known by the name that was typed; a callable has none that lasts.
    envs = ("env", "eval_env")
    typed = {n for n in envs if isinstance(named[n], str) and ":" in known.get(n, "")}
    other = {n for n, value in named.items() if value and (n not in plan.code or n in typed)}
    more = (set(given) - set(named)) | {name for name in other if named[name] != known.get(name)}
    refuse_changes(sorted(more), folder)
    settings = plan.fixed | {"seed": plan.seed, "env": plan.env, "algo": plan.algo}
    settings |= {name: given[name] for name in plan.code if name in given}
    env, eval_env = (
        each if name in plan.code else None
        for name, each in (("env", request.env), ("eval_env", request.eval_env))
    )
    again = replace(request, explicit=settings, config_file=NO_FILE, env=env, eval_env=eval_env)
    return with_code(inspect_request(again))


def _say(quiet: bool) -> Say:
    return (lambda _: None) if quiet else (lambda text: print(text, flush=True))
