"""From what is asked for to the plan of a study: options, the space, sizes, and what is refused.

Left out: running it (`api.py`, `study.py`), and its file (`plan.py`).
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
from headrace.config.settings import EITHER, Settings
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError, flag, flags_of
from headrace.machine.limits import cpu_cores
from headrace.training.job import RunRequest
from headrace.tuning.metric import Metric, parse_metric
from headrace.tuning.plan import Plan
from headrace.tuning.population import make_generations, population_space
from headrace.tuning.pruning import PRUNERS, make_rungs
from headrace.tuning.samplers import GridSampler, make_sampler
from headrace.tuning.space import Space, default_space, parse_space, read_space, to_json
from headrace.tuning.study import settings_of

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


def refuse_changes(names: Sequence[str], folder: Path) -> None:
    """Raise ConfigError if options or settings are named that are fixed when a study begins."""
    if names:
        raise ConfigError(
            f"{', '.join(names)}: the study in {folder} goes on as it began.\n"
            f"Leave these out; {MAY_CHANGE}."
        )


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
        trials=count, space=space, sampler="grid", prune="none", metric=metric,
        parallel=parallel, seeds=seeds, final_trials=0, final_seeds=0, verb="sweep",
    )  # fmt: skip


def off_cluster(request: RunRequest) -> tuple[RunRequest, str | None]:
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


def deterministic(request: RunRequest) -> RunRequest:
    """Choose what is auto from cores alone: no measurement beside other runs decides.

    Raises:
        ConfigError: the request asks for something else.
    """
    if {**request.config_file.settings, **request.explicit}.get("deterministic", True) is not True:
        raise ConfigError(
            "deterministic=False: a study chooses sizes from cores alone, the same for all runs.\n"
            "Leave it out."
        )
    return request.change(deterministic=True)


def with_code(inspected: RunRequest) -> RunRequest:
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
    metric = _metric_of(options)
    if own := [n for n in _OWN if fixed.get(n) is not None and (fixed[n] or n == _OWN[0])]:
        raise ConfigError(
            f"{', '.join(own)}: a study decides this itself.\nLeave {flag(own[0])} out"
            + ("; --metric steps_to RETURN ends runs at a return." if "return" in own[0] else ".")
        )
    space = _space_of(options, settings, fixed)
    # Not envs_per_vector: it follows from numbers that may be searched.
    sizes = {name: getattr(run, name) for name in _SIZES}
    if not settings.source["learner_threads"].startswith(("given", "config ")):
        sizes["learner_threads"] = min(run.learner_threads or cores, cores)
    batch = run.num_envs * run.num_steps
    starts = getattr(settings.algo, "learning_starts", 0)
    population = (options.population or POPULATION) if options.pbt else 0
    plan = Plan(
        verb="sweep" if options.verb == "sweep" else "tune",
        env=run.env,
        algo=run.algo,
        fixed={name: value for name, value in fixed.items() if name not in ("env", "seed")},
        sizes=sizes,
        code=_code_of(inspected, fixed),
        space=to_json(space),
        sampler="random" if options.pbt else options.sampler,
        pruner="none" if options.pbt else options.prune,
        metric=metric,
        trials=population or num_trials(options, space),
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


def _metric_of(options: Options) -> Metric:
    metric = parse_metric(options.metric)
    if options.pbt and metric.goal is not None:
        raise ConfigError(
            f"metric={metric.title}: a population is compared by a return, since a member that has "
            "reached a goal has ended.\nUse --metric eval_return or mean_return with --pbt."
        )
    return metric


def _code_of(inspected: RunRequest, fixed: Mapping[str, Any]) -> list[str]:
    """Return which of the settings are code, and must be named again to go on."""
    envs = {"env": inspected.env, "eval_env": inspected.eval_env}
    code = [name for name, env in envs.items() if env is not None and EnvMaker(env).is_code]
    code += [name for name in ("wrapper", "model") if fixed.get(name)]
    return code + (["algo"] if ":" in inspected.settings.run.algo else [])


def num_trials(options: Options, space: Space) -> int:
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
    """Raise ConfigError for a setting that does not exist, or whose values are refused.

    A value outside the setting's own bounds is always refused. One that does not fit other settings
    may fit those of another trial; so both ends must be refused for that.
    """
    whose = "grid" if plan.verb == "sweep" else "space"
    for name, parameter in space.items():
        refused = []
        options = parameter.of if parameter.kind == "choice" else map(parameter.at, (0.0, 1.0))
        for value in options:
            try:
                _ = inspected.change(**{name: value}).settings
            except ConfigError as error:
                raise ConfigError(f"The {whose}'s {name}: {error}") from None
        for share in (0.0, 1.0):
            try:
                settings_of(inspected, {name: parameter.at(share)} | plan.sizes)
            except ConfigError as error:
                refused.append(error)
        if len(refused) == 2:
            raise ConfigError(f"The {whose}'s {name}: {refused[0]}")
    make_sampler(plan.sampler, space, plan.seed)  # its package may be missing


def check_options(options: Options) -> None:
    """Raise ConfigError for an option that is out of bounds, or does not go with another."""
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


def describe_plan(plan: Plan, folder: Path) -> str:
    """Format what a study is to do, as text."""
    rungs = ", ".join(f"{rung:,}" for rung in plan.rungs)
    seeds = f" with {len(plan.seeds)} seeds each" if len(plan.seeds) > 1 else ""
    budget = f", {plan.budget_s:g} s at most" if plan.budget_s else ""
    who = plan.method if plan.population else f"{plan.trials} trials by {plan.sampler}"
    count = plan.parallel or ("as many as there is room for" if plan.cluster else cpu_cores())
    place = f" on the cluster {plan.cluster!r}" if plan.cluster else ""
    how = f" ({plan.pruner})"
    if plan.population:
        how = ""
    elif plan.pruner != "none" and len(plan.rungs) == 1:
        how = f" ({plan.pruner}: too few env steps to prune)"
    lines = [
        f"{plan.verb}: {plan.algo} on {plan.env}, {who}{seeds}, {count} at a time{place}{budget}. "
        f"Measured by {plan.metric.title} at {rungs} env steps{how}.",
        f"  varies: {', '.join(plan.space)}",
        f"  in all runs: {flags_of(plan.sizes)}",
        *(
            [
                f"  then, on fresh seeds: the preset and the best {plan.final_trials}, "
                f"{len(plan.final_seeds)} runs each: up to "
                f"{(1 + plan.final_trials) * len(plan.final_seeds)} more"
            ]
            if plan.final_seeds
            else []
        ),
        f"  directory: {folder}",
    ]
    return "\n".join(lines)
