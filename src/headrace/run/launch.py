"""From what the caller wants to a run: settings, environment, directory, and the job's ranks.

A run is seen through by one process; or by rank 0, which starts the others (`--num-learners`); or
by one of the ranks that torchrun started (`torchrun.py`). Left out: what a rank does (`rank.py`).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from headrace import patience
from headrace.collect.supervisor import TIMES_AS_LONG_TO_START
from headrace.collect.watchdog import Watchdog
from headrace.envs.api import Guards
from headrace.envs.device import is_one_vector
from headrace.envs.make import EnvLike, EnvMaker, WrapperLike, env_spec
from headrace.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    HeadraceError,
    RankError,
    RunDirError,
    SamplerError,
)
from headrace.meter import Meter
from headrace.named import load_callable
from headrace.ranks import ALONE, Job, Ranks, device_of
from headrace.run import checkpoint, rundir, torchrun
from headrace.run.code import NO_CODE, Code
from headrace.run.config import Settings, given_for_resume, resolve
from headrace.run.learners import led
from headrace.run.log import Display
from headrace.run.process import StopSignals
from headrace.run.rank import Ended, follow, run_rank, said_by
from headrace.run.report import OnUpdate, farewell, how_to_go_on
from headrace.run.runsettings import RunSettings
from headrace.run.shares import shared_out, told
from headrace.run.task import Task
from headrace.run.team import check_frozen
from headrace.run.torchrun import Attempt
from headrace.spec import Agents, EnvSpec


def start(
    given: dict[str, Any],
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    config_file: Path | None = None,
    run_dir: Path | None = None,
    on_update: OnUpdate | None = None,
    out: TextIO | None = None,
    started: float | None = None,
) -> Ended:
    """Start a run and see it through.

    Args:
        given: settings by name that the caller wants.
        env: an environment or what makes one; default: the setting of that name.
        code: wrappers and a network as callables; default: what the settings name.
        config_file: TOML with more settings.
        run_dir: where to; default: a new one below `runs/`.
        on_update: called after each update.
        out: where progress is shown; None: nowhere.
        started: when the process began, as `time.perf_counter` has it; default: now.

    Raises:
        HeadraceError: see `headrace.errors`.
    """
    meter = Meter(started)
    attempt = torchrun.joined(os.environ)
    if env is not None:
        given = given | {"env": EnvMaker(env).name}
    asked = given | code.names() | _learners(attempt, given)
    settings = resolve(asked, config_file)
    run = settings.run
    if code.model is None and run.model:
        code = replace(code, model=load_callable(run.model, ConfigError))
    env = run.env if env is None else env
    code = replace(code, wrappers=code.wrappers or run.wrapper)
    if attempt is not None and attempt.may_restart and run_dir is None:
        raise ConfigError(
            "torchrun is to begin this job again after a failure (--max-restarts), and then it has "
            "no run directory to go on from.\nGive one: --run-dir PATH."
        )
    spec = _spec(_maker(settings, env, code.wrappers), run)
    with _connected(run, attempt) as cores:
        settings, maker = _settled(asked, config_file, env, code, spec, cores)
        goes_on = attempt is not None and attempt.goes_on
        if goes_on and run_dir is not None and any(run_dir.glob("checkpoints/step_*")):
            _refuse_another(run_dir, settings)
            return _go_on(run_dir, env, code, {}, attempt, meter, on_update, out)
        run_dir = run_dir or rundir.default(run.env, run.algo, run.seed)
        with _held(run_dir, attempt):
            if attempt is None or not (attempt.place.rank or attempt.goes_on):
                rundir.refuse_used(run_dir)
            shares = _shares(settings, spec)
            task = Task(settings, maker, code.model, spec, shares, run_dir, None, quiet=out is None)
            return _see_through(task, attempt, meter, on_update, out)


def _settled(
    asked: Mapping[str, Any],
    config_file: Path | None,
    env: EnvLike,
    code: Code,
    spec: EnvSpec,
    cores: int | None,
) -> tuple[Settings, EnvMaker]:
    """Settings and environments, once it is known what these are, and where they are to run."""
    if spec.kind != "gym":
        _check_kind(resolve(asked, config_file).run, spec)
    settings = resolve(asked, config_file, kind=spec.kind, cores=cores)
    maker = _maker(settings, env, code.wrappers)
    if spec.kind != "gym":
        _check_whole(settings.run, maker, spec)
    return settings, maker


@contextlib.contextmanager
def _connected(run: RunSettings, attempt: Attempt | None) -> Iterator[int | None]:
    """Meanwhile the run's cluster can be used: cores for its workers; None: it is on none."""
    if not run.cluster:
        yield None
        return
    if attempt is not None:
        raise ConfigError(
            f"cluster={run.cluster!r}, but this process was started by torchrun.\n"
            "Use --num-learners in place of torchrun: Ray starts the learners."
        )
    from headrace.run import ray_start  # Ray is an extra

    with ray_start.connected(run) as cores:
        yield cores


def go_on(
    run_dir: Path,
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    changed: Mapping[str, Any] | None = None,
    on_update: OnUpdate | None = None,
    out: TextIO | None = None,
    started: float | None = None,
) -> Ended:
    """Go on with a run from its newest whole checkpoint.

    Args:
        run_dir: of the run.
        env: must be given again where the run's environment is code of the user's own.
        code: wrappers and a network must be given again where the run has them.
        changed: settings that are to be others, see `config.MAY_CHANGE`.
        on_update: called after each update.
        out: where progress is shown; None: nowhere.
        started: when the process began.

    Raises:
        HeadraceError: see `headrace.errors`.
    """
    meter = Meter(started)
    attempt = torchrun.joined(os.environ)
    return _go_on(run_dir, env, code, changed or {}, attempt, meter, on_update, out)


def _go_on(
    run_dir: Path,
    env: EnvLike | None,
    code: Code,
    changed: Mapping[str, Any],
    attempt: Attempt | None,
    meter: Meter,
    on_update: OnUpdate | None,
    out: TextIO | None,
) -> Ended:
    settings, maker = settings_of_run(
        run_dir, env, code, {**changed, **_learners(attempt, changed)}
    )
    with _connected(settings.run, attempt), _held(run_dir, attempt):
        saved = checkpoint.newest(run_dir)
        spec = _spec(maker, settings.run)
        theirs = checkpoint.policies(saved)
        checkpoint.check_policies(theirs, spec, run_dir)
        shares = _shares(settings, spec)
        if (before := {name: agents for name, (_, agents) in theirs.items()}) != shares:
            raise CheckpointError(
                f"The checkpoint in {run_dir} has the policies {told(before)}; those of {spec.id} "
                f"would be {told(shares)}.\nName the environment that it was trained on."
            )
        task = Task(settings, maker, code.model, spec, shares, run_dir, saved, quiet=out is None)
        return _see_through(task, attempt, meter, on_update, out)


def _see_through(
    task: Task,
    attempt: Attempt | None,
    meter: Meter,
    on_update: OnUpdate | None,
    out: TextIO | None,
) -> Ended:
    stop = StopSignals()
    is_first = attempt is None or attempt.place.rank == 0
    display = Display(out if is_first else None, task.settings.run.total_env_steps)
    try:
        if task.settings.run.cluster:
            from headrace.run import cluster  # Ray is an extra

            ended = cluster.see_through(task, stop, meter, display, on_update)
        else:
            with _job(task, attempt, stop) as ranks:
                say = display.say if is_first else said_by(ranks.rank, quiet=task.quiet)
                ended = run_rank(task, ranks, stop, meter, display, say, on_update)
        display.say(farewell(ended.summary, ended.stopped_by, task))
        return ended
    except (EnvError, SamplerError, RankError) as error:
        for note in () if attempt else _advice(task, error):  # torchrun's is another command
            error.add_note(note)
        raise


def _advice(task: Task, error: HeadraceError) -> Iterator[str]:
    run = task.settings.run
    could_drop = (
        isinstance(error, EnvError)
        and run.on_env_error == "fail"
        and run.vectorization != "native"
        and task.spec.kind != "parallel"
    )
    flag = " --on-env-error restart" if could_drop else ""
    if could_drop:
        yield f"With{flag} such an episode is dropped, and the run goes on."
    if any(task.run_dir.glob("checkpoints/step_*")):
        yield how_to_go_on(task) + flag


@contextlib.contextmanager
def _job(task: Task, attempt: Attempt | None, stop: StopSignals) -> Iterator[Ranks]:
    """The job that this process is part of, or leads."""
    run = task.settings.run
    if attempt is not None:
        device = device_of(run.device, attempt.place.local_rank)
        job = Job(attempt.place, attempt.store, run.backend, device, run.rank_timeout_s)
        with contextlib.closing(job):
            try:
                yield job
            except HeadraceError as error:
                raise error.of_rank(job.rank, job.size) from error
    elif run.num_learners > 1:
        how = (run.num_learners, run.backend, run.device, run.rank_timeout_s)
        with led(*how, stop.give_up, follow, task) as (job, others):
            stop.pass_on_to = others
            yield job
    else:
        yield ALONE


def _learners(attempt: Attempt | None, given: Mapping[str, Any]) -> dict[str, int]:
    """The setting that torchrun makes; ConfigError if another was given."""
    if attempt is None:
        return {}
    size = attempt.place.size
    if (asked := given.get("num_learners", size)) != size:
        raise ConfigError(
            f"num_learners={asked}, but torchrun started {size}.\nLeave --num-learners out."
        )
    return {"num_learners": size}


def _held(run_dir: Path, attempt: Attempt | None) -> contextlib.AbstractContextManager[None]:
    """The directory belongs to rank 0: others only read there."""
    only_reads = attempt is not None and attempt.place.rank > 0
    return contextlib.nullcontext() if only_reads else rundir.locked(run_dir)


_FOLLOWS_LEARNERS = {
    "num_learners", "num_envs", "num_envs_per_learner", "envs_per_vector", "lr", "lr_scale",
}  # fmt: skip


def _refuse_another(run_dir: Path, settings: Settings) -> None:
    """RunDirError if the directory's run is not the one that torchrun begins again."""
    theirs = rundir.read_config(run_dir)["settings"]
    ours = json.loads(json.dumps(settings.flat()))
    differ = [
        f"  {name}: {theirs.get(name)!r} there, {ours[name]!r} here"
        for name in ours
        if name not in _FOLLOWS_LEARNERS and theirs.get(name) != ours[name]
    ]
    if differ:
        raise RunDirError(
            f"The run directory {run_dir} holds another run:\n" + "\n".join(differ) + "\n"
            "For a new run choose another directory with --run-dir."
        )


def settings_of_run(
    run_dir: Path, env: EnvLike | None, code: Code, changed: Mapping[str, Any] | None = None
) -> tuple[Settings, EnvMaker]:
    """The settings and the environment of a run; code only if the caller names it again.

    Raises:
        ConfigError: some of it is code, and was not named.
    """
    config = rundir.read_config(run_dir)
    given, origin = given_for_resume(config, changed or {})
    name, wrappers, model = given["env"], given["wrapper"], given["model"]
    again: list[str] = []
    if env is None and (config["env_is_code"] or ":" in name):
        again.append(f"--env {name if ':' in name else 'module:callable'} (env=... in Python)")
    if wrappers and not code.wrappers:
        again.append(f"--wrapper {' '.join(wrappers)} (wrapper=... in Python)")
    if model and code.model is None:
        again.append(f"--model {model} (model=... in Python)")
    if again:
        raise ConfigError(
            f"The run in {run_dir} has code of its own, and a file is not allowed to name code to "
            "run.\nName it again: " + ", ".join(again)
        )
    if env is not None:
        given["env"] = EnvMaker(env).name
    settings = replace(resolve(given), origin=origin)
    return settings, _maker(settings, given["env"] if env is None else env, code.wrappers)


def _spec(maker: EnvMaker, run: RunSettings) -> EnvSpec:
    """Of the environment: one is made, and watched as those of the run are."""
    limit_s = TIMES_AS_LONG_TO_START * patience.limit(run.env_timeout_s, 0.0)
    watchdog = Watchdog(
        Meter(),
        Guards(env_timeout_s=limit_s, enabled=run.guards),
        lambda: 0,
        lambda: "while the first one was made, which may take 10 times as long as a step",
    )
    with contextlib.closing(watchdog), watchdog:
        return env_spec(maker)


def _shares(settings: Settings, spec: EnvSpec) -> dict[str, Agents]:
    """The agents of each policy; ConfigError if something does not go with several."""
    run = settings.run
    shares = shared_out(run.policies, spec)
    _check_kind(run, spec)
    check_frozen(run.frozen, shares, run.model)
    if set(shares) == set(run.frozen):
        raise ConfigError(f"frozen: nobody learns ({', '.join(shares)} are all frozen).")
    return shares


def _check_kind(run: RunSettings, spec: EnvSpec) -> None:
    """Refuse what is only done to single environments, and by workers."""
    several = f"has {spec.num_agents} agents" if spec.num_agents > 1 else ""
    what = {"tensor": "steps tensors", "parallel": "is a game in PettingZoo's form"}
    if not (why := what.get(spec.kind, several)):
        return
    if run.num_workers:
        raise ConfigError(
            f"num_workers={run.num_workers}, but {spec.id} {why}: it is stepped in the learner's "
            "process.\nUse --num-workers 0."
        )
    if run.on_env_error == "restart":
        raise ConfigError(
            f"on_env_error='restart', but {spec.id} {why}: one that fails is not made anew.\n"
            "Leave --on-env-error out."
        )


def _check_whole(run: RunSettings, maker: EnvMaker, spec: EnvSpec) -> None:
    """Refuse what says nothing where all environments are one vector of this process."""
    refused = None
    if spec.kind == "tensor" and run.vectorization != "native":
        refused = "vectorization", "these step tensors, many at a time"
    elif run.num_workers or not is_one_vector(maker, spec):
        return
    elif run.envs_per_vector != (share := run.num_envs // run.num_learners):
        refused = "envs_per_vector", f"they are one vector: all {share}"
    elif run.lag:
        refused = "lag", "they are stepped with the weights that the learner has then"
    if refused is not None:
        name, why = refused
        raise ConfigError(
            f"{name}={getattr(run, name)!r}, but of {spec.id} all are stepped together, in the "
            f"learner's process: {why}.\nLeave --{name.replace('_', '-')} out."
        )


def _maker(settings: Settings, env: EnvLike, wrappers: Sequence[WrapperLike]) -> EnvMaker:
    run = settings.run
    return EnvMaker(
        env,
        run.env_kwargs,
        tuple(wrappers),
        native=run.vectorization == "native",
        drop_obs_keys=run.drop_obs_keys,
        action_mask=run.action_mask,
    )
