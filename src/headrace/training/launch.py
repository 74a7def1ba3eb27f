"""A run, seen through: its directory, and the job's ranks.

A run is seen through by one process; or by rank 0, which starts the others (`--num-learners`); or
by one of the ranks that torchrun started (`torchrun.py`). Left out: what is to be run
(`job.py`), and what a rank does (`rank.py`).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from headrace.config.policies import format_assignment
from headrace.config.resolve import Settings
from headrace.config.run_config import RunConfig
from headrace.config.user_code import NO_CODE, Code
from headrace.distributed import torchrun
from headrace.distributed.local_ranks import launch_ranks
from headrace.distributed.ranks import SINGLE_RANK, JoinedRanks, Ranks, device_of
from headrace.distributed.torchrun import Attempt
from headrace.envs.factory import EnvLike
from headrace.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    HeadraceError,
    RankError,
    RunDirError,
    WorkerError,
)
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.training.job import Job, inspect_request, settings_of_run, shares_of, spec_of
from headrace.training.log import open_display
from headrace.training.process import StopSignals
from headrace.training.rank import RunResult, follow, run_rank, stderr_say
from headrace.training.reporter import OnUpdate, describe_end, resume_command


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
    found: Mapping[str, Any] | None = None,
) -> RunResult:
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
        found: settings that were measured (`headrace autoscale`), for what was left open.

    Raises:
        HeadraceError: see `headrace.errors`.
    """
    meter = Meter(started)
    attempt = torchrun.joined(os.environ)
    if attempt is not None and attempt.may_restart and run_dir is None:
        raise ConfigError(
            "torchrun is to begin this job again after a failure (--max-restarts), and then it has "
            "no run directory to go on from.\nGive one: --run-dir PATH."
        )
    want = inspect_request({**given, **_learners(attempt, given)}, env, code, config_file, found)
    run = want.settings.run
    with _connected(run, attempt) as cores:
        place = run_dir or rundir.default(run.env, run.algo, run.seed)
        task = want.task(place, cores=cores, quiet=out is None)
        goes_on = attempt is not None and attempt.is_restart
        if goes_on and any(task.run_dir.glob("checkpoints/step_*")):
            _refuse_another(task.run_dir, task.settings)
            return _go_on(task.run_dir, want.env, want.code, {}, attempt, meter, on_update, out)
        with _held(task.run_dir, attempt):
            if attempt is None or not (attempt.info.rank or attempt.is_restart):
                rundir.refuse_used(task.run_dir)
            return run_job(task, attempt, meter, on_update, out)


def check_alone() -> None:
    """ConfigError in a rank of torchrun's: what is measured for all is measured by one process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "This process is one of torchrun's, and sizes are measured by one process for all.\n"
            "Measure without torchrun: headrace autoscale ENV."
        )


@contextlib.contextmanager
def _connected(run: RunConfig, attempt: Attempt | None) -> Iterator[int | None]:
    """Meanwhile the run's cluster can be used: cores for its workers; None: it is on none."""
    if not run.cluster:
        yield None
        return
    if attempt is not None:
        raise ConfigError(
            f"cluster={run.cluster!r}, but this process was started by torchrun.\n"
            "Use --num-learners in place of torchrun: Ray starts the learners."
        )
    from headrace.training.ray import connect  # Ray is an extra

    with connect.connected(run) as cores:
        yield cores


def resume_run(
    run_dir: Path,
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    changed: Mapping[str, Any] | None = None,
    on_update: OnUpdate | None = None,
    out: TextIO | None = None,
    started: float | None = None,
) -> RunResult:
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
) -> RunResult:
    settings, maker = settings_of_run(
        run_dir, env, code, {**changed, **_learners(attempt, changed)}
    )
    with _connected(settings.run, attempt), _held(run_dir, attempt):
        saved = checkpoint.newest(run_dir)
        spec = spec_of(maker, settings.run)
        theirs = checkpoint.policies(saved)
        checkpoint.check_policies(theirs, spec, run_dir)
        shares = shares_of(settings, spec)
        if (before := {name: agents for name, (_, agents) in theirs.items()}) != shares:
            raise CheckpointError(
                f"The checkpoint in {run_dir} has the policies {format_assignment(before)}; "
                f"those of {spec.id} would be {format_assignment(shares)}.\n"
                "Name the environment that it was trained on."
            )
        task = Job(settings, maker, code.model, spec, shares, run_dir, saved, quiet=out is None)
        return run_job(task, attempt, meter, on_update, out)


def run_job(
    task: Job,
    attempt: Attempt | None,
    meter: Meter,
    on_update: OnUpdate | None,
    out: TextIO | None,
) -> RunResult:
    """Run one job, as the leader of its ranks or as one of torchrun's."""
    stop = StopSignals()
    is_first = attempt is None or attempt.info.rank == 0
    display = open_display(out if is_first else None, task.settings.run.total_env_steps)
    try:
        if task.settings.run.cluster:
            from headrace.training.ray import driver  # Ray is an extra

            result = driver.run_on_cluster(task, stop, meter, display, on_update)
        else:
            with _job(task, attempt, stop) as ranks:
                say = display.say if is_first else stderr_say(ranks.rank, quiet=task.quiet)
                result = run_rank(task, ranks, stop, meter, display, say, on_update)
        display.say(describe_end(result.summary, result.stopped_by, task))
        return result
    except (EnvError, WorkerError, RankError) as error:
        for note in () if attempt else _advice(task, error):  # torchrun's is another command
            error.add_note(note)
        raise


def _advice(task: Job, error: HeadraceError) -> Iterator[str]:
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
        yield resume_command(task) + flag


@contextlib.contextmanager
def _job(task: Job, attempt: Attempt | None, stop: StopSignals) -> Iterator[Ranks]:
    """The job that this process is part of, or leads."""
    run = task.settings.run
    if attempt is not None:
        device = device_of(run.device, attempt.info.local_rank)
        job = JoinedRanks(attempt.info, attempt.store, run.backend, device, run.rank_timeout_s)
        with contextlib.closing(job):
            try:
                yield job
            except HeadraceError as error:
                raise error.of_rank(job.rank, job.size) from error
    elif run.num_learners > 1:
        how = (run.num_learners, run.backend, run.device, run.rank_timeout_s)
        with launch_ranks(*how, stop.stop, follow, task) as (job, others):
            stop.pass_on_to = others
            yield job
    else:
        yield SINGLE_RANK


def _learners(attempt: Attempt | None, given: Mapping[str, Any]) -> dict[str, int]:
    """The setting that torchrun makes; ConfigError if another was given."""
    if attempt is None:
        return {}
    size = attempt.info.size
    if (asked := given.get("num_learners", size)) != size:
        raise ConfigError(
            f"num_learners={asked}, but torchrun started {size}.\nLeave --num-learners out."
        )
    return {"num_learners": size}


def _held(run_dir: Path, attempt: Attempt | None) -> contextlib.AbstractContextManager[None]:
    """The directory belongs to rank 0: others only read there."""
    only_reads = attempt is not None and attempt.info.rank > 0
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
