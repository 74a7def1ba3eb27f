"""Launches a run: locks its directory, and starts or joins its ranks."""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from headrace.config.policies import scale_policies
from headrace.config.run_config import RunConfig
from headrace.config.settings import Settings
from headrace.distributed import torchrun
from headrace.distributed.local_ranks import launch_ranks
from headrace.distributed.process import StopSignals
from headrace.distributed.ranks import (
    SINGLE_RANK,
    JoinedRanks,
    Ranks,
    device_of,
    gather_json,
)
from headrace.errors import (
    ConfigError,
    EnvChangeError,
    EnvError,
    HeadraceError,
    RankError,
    RunDirError,
    WorkerError,
)
from headrace.importing import refuse_while_importing
from headrace.meter import Meter
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint
from headrace.training.calibration import calibrated
from headrace.training.job import Job, RunRequest, inspect_request, job_of_run, settings_of_run
from headrace.training.log import Display, TerminalDisplay
from headrace.training.rank import RunResult, follow, run_rank, stderr_say
from headrace.training.rejoin import max_replaced
from headrace.training.reporter import (
    OnUpdate,
    describe_end,
    describe_vanished,
    resume_command,
)


class Launch:
    """This process's part in a run: all of it, rank 0 of several, or one of torchrun's ranks.

    Args:
        out: stream for the progress; None: no output.
        started: start of the process on the clock of `time.perf_counter`; default: now.
        pause_at: see `Job`.
        on_start: called with the run's directory, on rank 0, when config.json is in it.
    """

    def __init__(
        self,
        on_update: OnUpdate | None = None,
        out: TextIO | None = None,
        started: float | None = None,
        *,
        pause_at: int = 0,
        on_start: Callable[[Path], None] | None = None,
    ) -> None:
        refuse_while_importing("Training")
        self._meter = Meter(started)
        self._attempt = torchrun.joined(os.environ)
        self._rank = 0 if self._attempt is None else self._attempt.info.rank
        self._has_on_update = on_update is not None
        self._on_update = None if self._rank else on_update  # each of torchrun's ranks has one
        self._out, self._pause_at = out, pause_at
        self._on_start = None if self._rank else on_start

    def start(self, request: RunRequest, run_dir: Path | None = None) -> RunResult:
        """Start a run and follow it to its end; `run_dir` is by default a new one below `runs/`."""
        attempt, is_default = self._attempt, run_dir is None
        if attempt is not None and attempt.may_restart and is_default:
            raise ConfigError(
                "torchrun is to begin this job again after a failure (--max-restarts), and then it "
                "has no run directory to go on from.\nGive one: --run-dir PATH."
            )
        if attempt is not None and (file := request.config_file).is_pipe:
            raise ConfigError(
                f"The config file {file.name} is a pipe, and each process of torchrun reads it: "
                "only one of them gets the settings.\nWrite them to a file."
            )
        inspected = inspect_request(self._with_learners(request))
        run = inspected.settings.run
        with self._connected(run) as cores:
            run_dir = run_dir or rundir.default(run.env, run.algo, run.seed)
            if attempt is None:  # torchrun's ranks choose each for itself, and alike
                inspected = calibrated(inspected)
            job = inspected.job(run_dir, cores=cores, quiet=self._out is None)
            is_restart = attempt is not None and attempt.is_restart
            if is_restart and rundir.has_checkpoint(run_dir):
                _refuse_another(run_dir, job.settings)
                return self.resume(run_dir, replace(inspected, explicit={}))
            with self._held(run_dir):
                if not (self._rank or is_restart):
                    refuse_used(run_dir)
                return self._run(job, is_default_dir=is_default)

    def resume(self, run_dir: Path, request: RunRequest) -> RunResult:
        """Go on with a run from its newest whole checkpoint; `request` changes settings."""
        request, quiet = self._with_learners(request), self._out is None
        settings, _ = settings_of_run(run_dir, request)
        with self._connected(settings.run), self._held(run_dir):
            if not self._rank and (vanished := describe_vanished(run_dir)):
                warnings.warn(vanished, stacklevel=2)
            saved = checkpoint.newest(run_dir, with_rows=True)
            _refuse_passed_goal(saved, request)
            return self._run(job_of_run(run_dir, request, saved=saved, quiet=quiet))

    def _run(self, job: Job, *, is_default_dir: bool = False) -> RunResult:
        job = replace(job, has_on_update=self._has_on_update, pause_at=self._pause_at)
        stop, run = StopSignals(), job.settings.run
        out = None if self._rank else self._out
        display = Display() if out is None else TerminalDisplay(out, run.total_env_steps)
        if (on_start := self._on_start) is not None:
            display.on_start = lambda: on_start(job.run_dir)
        try:
            if run.cluster:
                from headrace.training.ray import driver  # Ray is an extra

                result = driver.run_on_cluster(job, stop, self._meter, display, self._on_update)
            else:
                with self._ranks(job, stop) as ranks:
                    if is_default_dir and self._attempt is not None:
                        # Each of torchrun's ranks has named one, and rank 0 has made its own.
                        job = replace(job, run_dir=Path(gather_json(ranks, str(job.run_dir))[0]))
                    say = stderr_say(ranks.rank, quiet=job.quiet) if self._rank else display.say
                    result = run_rank(job, ranks, stop, self._meter, display, say, self._on_update)
            display.say(describe_end(result.summary, result.stopped_by, job))
            return result
        except (EnvError, WorkerError, RankError) as error:
            if self._attempt is None:  # torchrun's command is another one
                for note in _advice(job, error):
                    error.add_note(note)
            raise
        except KeyboardInterrupt as stop:  # a second signal: the run was not saved
            if rundir.has_checkpoint(job.run_dir):
                stop.add_note("Env steps since the newest checkpoint are lost.")
                if self._attempt is None:  # torchrun's command is another one
                    stop.add_note(resume_command(job))
            elif job.run_dir.exists():
                stop.add_note(f"Nothing was saved: {job.run_dir} has no checkpoint.")
            raise

    def _connected(self, run: RunConfig) -> contextlib.AbstractContextManager[int | None]:
        """Connect to the run's cluster; yield the cores for its workers, None without a cluster."""
        if not run.cluster:
            return contextlib.nullcontext()
        if self._attempt is not None:
            raise ConfigError(
                f"cluster={run.cluster!r}, but this process was started by torchrun.\n"
                "Use --num-learners in place of torchrun: Ray starts the learners."
            )
        from headrace.training.ray import connect  # Ray is an extra

        return connect.connected(run)

    @contextlib.contextmanager
    def _ranks(self, job: Job, stop: StopSignals) -> Iterator[Ranks]:
        run, attempt = job.settings.run, self._attempt
        if attempt is not None:
            device = device_of(run.device, attempt.info.local_rank)
            ranks = JoinedRanks(
                attempt.info, attempt.store, run.backend, device, run.rank_timeout_s
            )
            with contextlib.closing(ranks):
                try:
                    yield ranks
                except HeadraceError as error:
                    raise error.of_rank(ranks.rank, ranks.size) from error
        elif run.num_learners > 1:
            settings = (run.num_learners, run.backend, run.device, run.rank_timeout_s)
            replaced = max_replaced(job.settings, device_of(run.device, 0).type)
            with launch_ranks(*settings, stop.stop, replaced, follow, job) as (ranks, others):
                stop.pass_on_to = others
                yield ranks
        else:
            yield SINGLE_RANK

    def _with_learners(self, request: RunRequest) -> RunRequest:
        """Set num_learners to what torchrun started; ConfigError if the request has another."""
        if self._attempt is None:
            return request
        size = self._attempt.info.size
        if (learners := request.explicit.get("num_learners", size)) != size:
            raise ConfigError(
                f"num_learners={learners}, but torchrun started {size}.\nLeave --num-learners out."
            )
        return request.change(num_learners=size)

    def _held(self, run_dir: Path) -> contextlib.AbstractContextManager[None]:
        """Lock the directory for this process; torchrun's ranks above 0 only read it."""
        return contextlib.nullcontext() if self._rank else rundir.locked(run_dir)


def refuse_used(run_dir: Path) -> None:
    """Raise RunDirError if a locked directory holds a run already, and say if that one vanished."""
    try:
        rundir.refuse_used(run_dir)
    except RunDirError as error:
        if vanished := describe_vanished(run_dir):
            error.add_note(vanished)
        raise


def _refuse_passed_goal(saved: Checkpoint, request: RunRequest) -> None:
    """Raise ConfigError if a run is to end at fewer env steps than it has made."""
    goal = request.explicit.get("total_env_steps")
    with checkpoint.as_written(saved.path):
        made = saved.manifest.get("counters", {}).get("env_steps", 0)
        if goal is not None and goal < made:
            raise ConfigError(
                f"total_env_steps={goal}, but the run has made {made:,} env steps.\n"
                "Give a number above that, or leave --total-env-steps out."
            )


def check_alone(command: str) -> None:
    """Raise ConfigError in a rank started by torchrun: the command starts processes itself."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"This process is one of torchrun's, and headrace {command} starts all processes "
            f"itself.\nRun it without torchrun: headrace {command} ENV."
        )


def _advice(job: Job, error: HeadraceError) -> Iterator[str]:
    run = job.settings.run
    could_drop = (
        isinstance(error, EnvError)
        and not isinstance(error, EnvChangeError)
        and run.on_env_error == "fail"
        and run.vectorization != "native"
    )
    flag = " --on-env-error restart" if could_drop else ""
    if could_drop and not str(error).startswith("Traceback") and isinstance(job.maker.env, str):
        yield f"What else does not fit: headrace check-env {run.env}"
    if could_drop:
        yield f"If it fails rarely:{flag} drops such an episode, and the run goes on."
    if rundir.has_checkpoint(job.run_dir):
        yield resume_command(job) + flag


_FOLLOWS_LEARNERS = {
    "num_learners", "num_envs", "num_envs_per_learner", "envs_per_vector", "lr", "lr_scale",
    "minibatch_size",
}  # fmt: skip


def _without_scaled(settings: dict[str, Any]) -> dict[str, Any]:
    """Set what follows the learners to 0 in the settings of single policies."""
    factors = dict.fromkeys(_FOLLOWS_LEARNERS, 0)
    return settings | {"policies": scale_policies(settings["policies"], factors)}


def _refuse_another(run_dir: Path, settings: Settings) -> None:
    """Raise RunDirError unless torchrun begins the directory's run again."""
    theirs = _without_scaled(rundir.read_config(run_dir)["settings"])
    ours = _without_scaled(json.loads(json.dumps(settings.flat())))
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
