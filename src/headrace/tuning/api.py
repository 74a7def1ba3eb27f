"""`headrace.tune` and `headrace.sweep`: a study is planned, begun or gone on with, and returned.

Left out: the loop (`study.py`), files (`plan.py`), the command line (`cli/tuning_commands.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import headrace
from headrace.algos.schedules import SCHEDULES
from headrace.config.algorithms import ALGORITHMS
from headrace.config.checks import OF_CLUSTER
from headrace.config.derive import cpu_cores
from headrace.config.resolve import NO_FILE
from headrace.config.settings import EITHER, Settings
from headrace.envs.factory import EnvLike, EnvMaker
from headrace.envs.registry import newest_version
from headrace.errors import ConfigError, RunDirError, flag
from headrace.storage import run_dir as rundir
from headrace.training.api import request_for
from headrace.training.job import RunRequest, inspect_request
from headrace.training.launch import check_alone
from headrace.tuning import results
from headrace.tuning.metric import parse_metric
from headrace.tuning.page import write_page
from headrace.tuning.plan import PLAN, Plan, Trial, read_plan, read_trials
from headrace.tuning.population import make_generations, population_space
from headrace.tuning.pruning import PRUNERS, make_rungs
from headrace.tuning.runners.choice import connected
from headrace.tuning.samplers import GridSampler, make_sampler
from headrace.tuning.space import Space, default_space, parse_space, read_space, to_json
from headrace.tuning.study import Say, Search, settings_of

FRESH_SEEDS = 1000
"""The first of the seeds that the best trials are measured with again."""
TRIALS = 50
POPULATION = 8
EVAL_EPISODES = 20
_SIZES = ("num_learners", "num_workers", "learner_threads")
_OF_SEARCH = ("trials", "sampler", "prune")
_OF_POPULATION = ("population", "ready_env_steps")
MAY_CHANGE = "--cluster may change, and with tune also --trials and --budget-s"
_OWN = ("stop_at_return", "stop_after_s")
_NO_PARAMETER = (*_SIZES, *_OWN, "seed", "total_env_steps", "env", "eval_env", "wrapper", "model")
"""Settings that cannot vary: the study decides them, or they are of all its runs."""


@dataclass(frozen=True)
class Options:
    """What `tune` is told besides the settings of training; see `headrace.tune`."""

    trials: int = TRIALS
    space: Path | Mapping[str, Any] | None = None
    sampler: str = "tpe"
    prune: str = "asha"
    metric: Sequence[str] = ("eval_return",)
    parallel: int = 0
    budget_s: float = 0.0
    seeds: int = 1
    final_trials: int = 3
    final_seeds: int = 5
    pbt: bool = False
    population: int = 0
    ready_env_steps: int = 0
    verb: str = "tune"

    def changed(self) -> list[str]:
        """Return the names of options that are not the defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Study:
    """A study and its trials, as they are in its directory."""

    dir: Path
    plan: Plan
    _trials: list[Trial]

    @property
    def best(self) -> dict[str, Any] | None:
        """Settings of the best trial besides those of all; None if no trial has a figure."""
        best = results.best_of(self.plan, self._trials)
        return None if best is None else dict(best.changes)

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Each trial: number, state, env steps, value, fresh value and interval, settings."""
        return results.rows(self.plan, self._trials)

    def table(self) -> dict[str, list[Any]]:
        """Return the trials as columns, for `pandas.DataFrame` and its like."""
        names = ("number", "state", "env_steps", "value", "fresh", "seconds", "reason")
        columns = {name: [row[name] for row in self.trials] for name in names}
        return columns | {
            name: [row["values"].get(name) for row in self.trials] for name in self.plan.space
        }

    def describe(self) -> str:
        """Format the best trials, failures, and the verdict as text."""
        return results.describe(self.plan, self._trials)

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
        space: which settings vary: a TOML file, or a dict such as `{"lr": {"log": [1e-5, 1e-2]}}`.
            Default: the algorithm's.
        sampler: `tpe`, `random`, `grid` or `cmaes`.
        prune: `asha`, `median` or `none`: see `headrace.tuning.pruning`.
        metric: `eval_return`, `mean_return`, `steps_to RETURN` or `seconds_to RETURN`.
        parallel: runs at a time; 0: one for each CPU core, or as many as the cluster has room for.
        budget_s: seconds for all, those of fresh seeds included; 0 (the default): no limit.
        seeds: runs of each trial.
        final_trials, final_seeds: at the end so many of the best trials, and the preset, are
            trained with so many seeds that the search has not seen.
        pbt: train a population in place of a search: see `headrace.tuning.population`.
        population: its members; 0: 8.
        ready_env_steps: after each of so many env steps they are measured, and the worst replaced;
            0: a tenth of all.
        study: directory; default: a new one below `runs/`. If it holds a study, that goes on: then
            give `trials`, `budget_s`, `cluster` and code alone.
        **arguments: those of `headrace.train`, the same for all trials. `cluster` is where the
            runs are: each is on one machine of it, whole. Default: on this machine.

    Raises:
        ConfigError: an option or setting is invalid.
        HeadraceError: the first trials all failed.
        RunDirError: the directory is in use, or cannot be written.
        KeyboardInterrupt: the study was interrupted; it can go on.
    """
    options = Options(
        TRIALS, Path(space) if isinstance(space, str) else space, sampler, prune,
        tuple(metric.split()), parallel, 0.0, seeds, final_trials, final_seeds,
        pbt, population, ready_env_steps,
    )  # fmt: skip
    folder, say = None if study is None else Path(study), _say(quiet)
    request = replace(request_for("", **arguments), env=env)
    if folder is not None and (folder / PLAN).exists():
        if fixed := options.changed():
            raise ConfigError(
                f"{', '.join(fixed)}: the study in {folder} goes on as it began.\n"
                "Leave these out; trials and budget_s may change."
            )
        return go_on(folder, request, say, trials=trials, budget_s=budget_s)
    options = replace(
        options, trials=TRIALS if trials is None else trials, budget_s=budget_s or 0.0
    )
    return begin(request, options, folder, say)


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


def sweep_options(
    grid: Mapping[str, Sequence[Any]], seeds: int, parallel: int, metric: Sequence[str]
) -> Options:
    """Return the options of a sweep; ConfigError for an empty grid."""
    if not grid or not all(isinstance(v, list | tuple | range) and len(v) for v in grid.values()):
        raise ConfigError(
            f"grid={dict(grid)}: expected settings, each with a list of values, such as --grid "
            "lr=1e-3,3e-4 ({'lr': [1e-3, 3e-4]} in Python)."
        )
    count = 1
    for values in grid.values():
        count *= len(values)
    space = {name: {"choice": list(values)} for name, values in grid.items()}
    return Options(
        count, space, "grid", "none", metric, parallel, 0.0, seeds, 0, 0, verb="sweep"
    )  # fmt: skip


def begin(request: RunRequest, options: Options, folder: Path | None, say: Say) -> Study:
    """Begin a study of a request, and follow it to its end; arguments as of `tune`."""
    check_alone()
    _check_options(options)
    request, cluster = _off_cluster(request)
    given = {**request.config_file.settings, **request.explicit}
    if cluster and given.get("num_learners", -1) == -1:
        request = request.change(num_learners=1)  # not by the GPUs of this machine
    inspected = _with_code(inspect_request(_deterministic(request)))
    plan = plan_of(inspected, options, cluster or "")
    folder = folder or rundir.unused(f"{plan.verb}_{plan.env}_{plan.algo}")
    with rundir.locked(folder), connected(plan):
        if (folder / PLAN).exists():
            raise RunDirError(
                f"{folder} holds a study already.\nTo go on with it: headrace {plan.verb} "
                f"--resume {folder}\nFor a new one choose another directory with --study."
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
    check_alone()
    plan = read_plan(folder)
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
    _check_options(options)
    request, cluster = _off_cluster(request)
    changes |= {} if cluster is None else {"cluster": cluster}
    if "trials" in changes:
        changes["trials"] = _num_trials(options, parse_space(plan.space, "the study"))
    plan = replace(plan, **changes)
    again = _request_again(plan, request, folder)
    with rundir.locked(folder), connected(plan):
        if changes:
            plan.write(folder)
        return _follow(plan, again, folder, read_trials(folder), say)


def load_study(folder: Path) -> Study:
    """Read a study; RunDirError if there is none."""
    return Study(folder, read_plan(folder), read_trials(folder))


def write_page_of(folder: Path) -> Path:
    """Write a study's page, and return its file.

    Raises:
        MissingExtraError: the `plot` extra is missing.
        RunDirError: there is no study.
    """
    return write_page(folder, read_plan(folder), read_trials(folder))


def _follow(plan: Plan, request: RunRequest, folder: Path, trials: list[Trial], say: Say) -> Study:
    say(_describe_plan(plan, folder))
    search = Search(plan, request, folder, trials, say)
    try:
        search.run()
    except KeyboardInterrupt:
        say(f"Stopped. To go on: {plan.command(folder)}")
        raise
    results.write_best(folder, plan, search.trials)
    return Study(folder, plan, search.trials)


def _off_cluster(request: RunRequest) -> tuple[RunRequest, str | None]:
    """Return the request of runs that are each on one machine, and the study's cluster if given."""
    file = request.config_file
    given = {**file.settings, **request.explicit}
    if names := [name for name in OF_CLUSTER if name in given]:
        raise ConfigError(
            f"{', '.join(names)}: each run of a study is on one machine, learners and workers.\n"
            f"Leave {flag(names[0])} out."
        )
    explicit, in_file = (
        {name: value for name, value in each.items() if name != "cluster"}
        for each in (request.explicit, file.settings)
    )
    alone = replace(request, explicit=explicit, config_file=replace(file, settings=in_file))
    return alone, given.get("cluster")


def _deterministic(request: RunRequest) -> RunRequest:
    """Choose what is auto from cores alone: no measurement beside other runs decides."""
    return request.change(deterministic=True)


def _with_code(inspected: RunRequest) -> RunRequest:
    """Keep the code with the request, so that a process can resume a run of it."""
    run = inspected.settings.run
    algorithm = inspected.algorithm or (run.algo if ":" in run.algo else None)
    return replace(inspected, algorithm=algorithm)


def plan_of(inspected: RunRequest, options: Options, cluster: str) -> Plan:
    """Return the plan of a study; ConfigError if an option or setting is invalid."""
    is_here = options.parallel and not cluster
    cores = max(1, cpu_cores() // options.parallel) if is_here else 1
    job = inspected.job(Path(), cores=cores)
    settings, run = job.settings, job.settings.run
    fixed = {**inspected.config_file.settings, **inspected.explicit}
    metric = parse_metric(options.metric)
    if options.pbt and metric.goal is not None:
        raise ConfigError(
            f"metric={metric.title}: a population is compared by a return, since one that has "
            "reached a goal has ended.\nUse --metric eval_return or mean_return with --pbt."
        )
    if own := [n for n in _OWN if fixed.get(n) is not None and (fixed[n] or n == _OWN[0])]:
        raise ConfigError(
            f"{', '.join(own)}: a study decides this itself.\nLeave {flag(own[0])} out"
            + ("; --metric steps_to RETURN ends runs at a return." if "return" in own[0] else ".")
        )
    space = _space_of(options, settings, fixed)
    sizes = {name: getattr(run, name) for name in _SIZES}
    if not settings.source["learner_threads"].startswith(("given", "config ")):
        sizes["learner_threads"] = min(run.learner_threads or cores, cores)
    # Environments of a vector follow from numbers that may be searched.
    batch = run.num_envs * run.num_steps
    starts = getattr(settings.algo, "learning_starts", 0)
    envs = {"env": inspected.env, "eval_env": inspected.eval_env}
    code = [name for name, env in envs.items() if env is not None and EnvMaker(env).is_code]
    code += [name for name in ("wrapper", "model") if fixed.get(name)]
    code += ["algo"] if ":" in run.algo else []
    population = (options.population or POPULATION) if options.pbt else 0
    plan = Plan(
        verb="sweep" if options.verb == "sweep" else "tune",
        env=run.env,
        algo=run.algo,
        fixed={name: value for name, value in fixed.items() if name not in ("env", "seed")},
        sizes=sizes,
        code=code,
        space=to_json(space),
        sampler="random" if options.pbt else options.sampler,
        pruner="pbt" if options.pbt else options.prune,
        metric=metric,
        trials=population or _num_trials(options, space),
        population=population,
        parallel=options.parallel,
        cluster=cluster,
        seed=run.seed,
        seeds=[run.seed + i for i in range(options.seeds)],
        rungs=make_generations(run.total_env_steps, options.ready_env_steps, batch, starts)
        if options.pbt
        else make_rungs(options.prune, run.total_env_steps, batch, starts),
        eval_episodes=EVAL_EPISODES,
        final_trials=options.final_trials,
        final_seeds=[
            FRESH_SEEDS + run.seed + i
            for i in range(options.final_seeds if options.final_trials else 0)
        ],
        budget_s=options.budget_s,
        version=headrace.__version__,
    )
    _check_ends(inspected, space, plan)
    # What cannot be written down cannot be gone on with.
    return replace(plan, fixed=json.loads(json.dumps(plan.fixed)))


def _num_trials(options: Options, space: Space) -> int:
    """Return the number of trials; a grid has no more than its points, and the preset."""
    if options.verb == "tune" and options.sampler == "grid":
        return min(options.trials, 1 + len(GridSampler(space, 0)))
    return options.trials


def _space_of(options: Options, settings: Settings, fixed: Mapping[str, Any]) -> Space:
    """Return the space; a setting that is fixed is left out of the algorithm's own."""
    if options.space is None:
        algo = settings.run.algo
        if algo not in ALGORITHMS:
            raise ConfigError(
                f"algo={algo}: an algorithm of your own has no search space.\n"
                "Give one: --space FILE.toml"
            )
        space = default_space(algo)
        held = {*fixed, *(EITHER.get(name, name) for name in fixed)}
        points = [s for s in SCHEDULES.values() if not isinstance(fixed.get(s, ""), str)]
        held |= {name for name, schedule in SCHEDULES.items() if schedule in points}
        if settings.run.model or settings.run.init_from:
            held |= {"hidden_sizes", "activation"}
        space = {name: each for name, each in space.items() if name not in held}
        if not space:
            raise ConfigError("All settings of the search space are fixed: nothing is left to try.")
        return population_space(space, settings.algo, is_default=True) if options.pbt else space
    space = (
        read_space(options.space)
        if isinstance(options.space, Path)
        else parse_space(options.space, "space")
    )
    if sizes := [name for name in space if name in _NO_PARAMETER]:
        raise ConfigError(f"{', '.join(sizes)}: a study decides this itself. Take it out.")
    if both := [name for name in space if name in fixed]:
        raise ConfigError(
            f"{', '.join(both)}: fixed by a flag or file, and in the space as well.\n"
            f"Leave {flag(both[0])} out, or take it out of the space."
        )
    return population_space(space, settings.algo, is_default=False) if options.pbt else space


def _check_ends(inspected: RunRequest, space: Space, plan: Plan) -> None:
    """Raise ConfigError for a setting that does not exist, or whose two ends are refused."""
    for name, parameter in space.items():
        refused = []
        for share in (0.0, 1.0):
            try:
                settings_of(inspected, {name: parameter.at(share)} | plan.sizes)
            except ConfigError as error:
                refused.append(error)
        if len(refused) == 2:
            raise ConfigError(f"The space's {name}: {refused[0]}")
    make_sampler(plan.sampler, space, plan.seed)  # its package may be missing


def _check_options(options: Options) -> None:
    least = {"trials": 1, "parallel": 0, "seeds": 1, "final_trials": 0, "final_seeds": 0}
    least |= {"population": 2 if options.population else 0, "ready_env_steps": 0}
    changed = options.changed()
    not_beside = _OF_SEARCH if options.pbt else _OF_POPULATION
    if others := [name for name in changed if name in not_beside]:
        raise ConfigError(
            f"{', '.join(others)}: no option of a population.\nLeave {flag(others[0])} out."
            if options.pbt
            else f"{', '.join(others)}: an option of population-based training. Add --pbt."
        )
    for name, bound in least.items():
        if (value := getattr(options, name)) < bound:
            raise ConfigError(f"{name}={value}: expected at least {bound}.")
    if not options.budget_s >= 0:
        raise ConfigError(f"budget_s={options.budget_s}: expected seconds, or 0 for no limit.")
    if options.prune not in PRUNERS:
        raise ConfigError(f"prune={options.prune!r}: expected one of {', '.join(PRUNERS)}.")


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
    other = {name for name, value in named.items() if value and name not in plan.code}
    more = (set(given) - set(named)) | {name for name in other if named[name] != known.get(name)}
    if more:
        raise ConfigError(
            f"{', '.join(sorted(more))}: a study goes on with the settings that it has.\n"
            f"Leave these out; {MAY_CHANGE}."
        )
    settings = plan.fixed | {"seed": plan.seed, "env": plan.env, "algo": plan.algo}
    settings |= {name: given[name] for name in plan.code if name in given}
    env, eval_env = (
        each if name in plan.code else None
        for name, each in (("env", request.env), ("eval_env", request.eval_env))
    )
    again = replace(request, explicit=settings, config_file=NO_FILE, env=env, eval_env=eval_env)
    return _with_code(inspect_request(again))


def _describe_plan(plan: Plan, folder: Path) -> str:
    rungs = ", ".join(f"{rung:,}" for rung in plan.rungs)
    seeds = f" with {len(plan.seeds)} seeds each" if len(plan.seeds) > 1 else ""
    budget = f", {plan.budget_s:g} s at most" if plan.budget_s else ""
    who = f"{plan.trials} trials{seeds} by {plan.sampler}"
    if plan.population:
        who = f"a population of {plan.population}{seeds}"
    count = plan.parallel or ("as many as there is room for" if plan.cluster else cpu_cores())
    place = f" on the cluster {plan.cluster!r}" if plan.cluster else ""
    pruner = plan.pruner
    if pruner in ("asha", "median") and len(plan.rungs) == 1:
        pruner += ": too few env steps to prune"
    lines = [
        f"{plan.verb}: {plan.algo} on {plan.env}, {who}, {count} at a time{place}{budget}. "
        f"Measured by {plan.metric.title} at {rungs} env steps ({pruner}).",
        f"  varies: {', '.join(plan.space)}",
        f"  in all runs: {' '.join(f'{flag(n)} {v}' for n, v in plan.sizes.items())}",
        *(
            [
                f"  then, on fresh seeds: the preset and the best {plan.final_trials}, "
                f"{len(plan.final_seeds)} runs each"
            ]
            if plan.final_seeds
            else []
        ),
        f"  directory: {folder}",
    ]
    return "\n".join(lines)


def _say(quiet: bool) -> Say:
    return (lambda _: None) if quiet else (lambda text: print(text, flush=True))
