"""Makes a profile: `headrace profile`.

A run is made or read, and its parts are measured apart. The cost model puts the parts together
again. Its predictions can be trusted as far as it agrees with the run.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.config.settings import Settings
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import gains, simulate
from headrace.envs.factory import EnvLike
from headrace.errors import ConfigError
from headrace.machine.limits import cpu_cores
from headrace.storage.metrics import read_metrics
from headrace.storage.timeline import read_timeline
from headrace.tools.profile import advice
from headrace.tools.profile.probe import Probe
from headrace.tools.profile.result import Profile, format_profile
from headrace.tools.profile.timeline_plots import seconds_by_process
from headrace.training.api import request_for
from headrace.training.calibration import calibrated
from headrace.training.job import Job, RunRequest, inspect_request, job_of_run
from headrace.training.launch import Launch

Print = Callable[[str], None]
_NO_GOAL = 10**15  # more env steps than a profile takes
_MIN_S = 10.0
_EXPLICIT = (
    "given",
    "import",
    "config ",
    "auto",
)  # origins of settings that do not follow from others


def profile(
    env: EnvLike,
    *,
    seconds: float = 60.0,
    quiet: bool = False,
    **arguments: Any,
) -> Profile:
    """Measure where the time of a training goes, what limits it, and what to change.

    Args:
        seconds: duration of the whole profile, not counting the start of processes.
        **arguments: those of `headrace.train`.

    Raises:
        HeadraceError: see `headrace.errors`.
        KeyboardInterrupt: the profile was interrupted; nothing is left of it.
    """
    result = profile_env(
        request_for(env, **arguments), seconds, (lambda _: None) if quiet else print
    )
    if not quiet:
        print(format_profile(result))
    return result


def profile_env(
    request: RunRequest, seconds: float = 60.0, say: Print = lambda text: None
) -> Profile:
    """Make a run for half of `seconds`, then measure its parts."""
    _check_seconds(seconds)
    with tempfile.TemporaryDirectory(prefix="headrace-profile-") as scratch:
        inspected = calibrated(inspect_request(request))
        job = inspected.job(Path(scratch) / "run")
        _refuse_cluster(job)
        say(f"Training for {seconds / 2:.0f} s")
        run = job.settings.run
        timed = inspected.change(
            # Those of the job: what is auto depends on total_env_steps.
            num_workers=run.num_workers,
            envs_per_vector=run.envs_per_vector,
            num_learners=run.num_learners,
            lag=run.lag,
            total_env_steps=_NO_GOAL,
            schedule_env_steps=job.settings.run.schedule_env_steps,
            stop_after_s=seconds / 2,
            stop_at_return=None,
            timeline=True,
        )
        ended = Launch().start(timed, job.run_dir)
        if ended.stopped_by:
            raise KeyboardInterrupt(ended.stopped_by)

        def resolve_changed(changed: Mapping[str, Any]) -> Settings:
            return inspected.change(**changed).derived()

        return _profile(job, resolve_changed, seconds / 2, say)


def profile_run(
    run_dir: Path, request: RunRequest, seconds: float = 60.0, say: Print = lambda text: None
) -> Profile:
    """Measure the parts of a run that was made with `timeline`; ConfigError without one."""
    _check_seconds(seconds)
    job = job_of_run(run_dir, request)
    _refuse_cluster(job)
    flat, source = job.settings.flat(), job.settings.source
    explicit = {name: flat[name] for name in flat if source[name].startswith(_EXPLICIT)}
    explicit["env"] = job.settings.run.env

    def resolve_changed(changed: Mapping[str, Any]) -> Settings:
        return RunRequest({**explicit, **changed}, spec=job.spec).derived()

    return _profile(job, resolve_changed, seconds, say)


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= _MIN_S):
        raise ConfigError(f"seconds={seconds:g}: expected {_MIN_S:g} or more.")


def _refuse_cluster(job: Job) -> None:
    if cluster := job.settings.run.cluster:
        raise ConfigError(
            f"cluster={cluster!r}: a profile is made on one machine.\nLeave --cluster out. "
            "headrace plan finds machines from that profile."
        )


def _profile(
    job: Job, resolve_changed: advice.ResolveChanged, seconds: float, say: Print
) -> Profile:
    tracks, rows = read_timeline(job.run_dir), read_metrics(job.run_dir)
    if not tracks:
        raise ConfigError(
            f"The run in {job.run_dir} kept no timeline: it was trained without --timeline (or has "
            "not ended).\nTo profile its settings by a new run: headrace profile ENV, and the "
            "flags of headrace train."
        )
    costs = Probe(job, seconds, say).costs()
    whole = job.is_on_device
    if costs.resets_per_step:  # the frequency of resets depends on the policy
        resets = rows[-1]["episodes"] / rows[-1]["env_steps"] if rows else 0.0
        costs = replace(costs, resets_per_step=resets)
    topology = advice.topology_of(job.settings, on_device=whole)
    predicted = simulate(costs, topology)
    # All processes have started when the last of the first laps ends.
    started = max((laps.ends[0] for laps in tracks.values() if laps.ends), default=0.0)
    return Profile(
        settings=job.settings,
        costs=costs,
        env_steps_per_s=_rate(rows),
        seconds=seconds_by_process(tracks, started),
        tracks=tracks,
        ceilings=_ceilings(costs, job),
        predicted=predicted,
        gains=gains(costs, topology, predicted),
        changes=advice.find_changes(
            costs, job.settings, predicted, resolve_changed, on_device=whole
        ),
        is_whole=whole or job.maker.native,
        rates=None if whole else _rates(costs, job),
    )


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Return env steps/s of the last process that wrote to the metrics."""
    later = rows[-1:]
    for row in reversed(rows[:-1]):
        if row["wall_s"] > later[-1]["wall_s"]:
            break  # the clock of a resumed run begins again
        later.append(row)
    if len(later) < 2:
        return None
    steps, wall_s = (float(later[0][name] - later[-1][name]) for name in ("env_steps", "wall_s"))
    return steps / wall_s


def _ceilings(costs: Costs, job: Job) -> dict[str, float]:
    """Return the env steps/s of each part alone, on this machine's cores."""
    run, cores = job.settings.run, cpu_cores()
    n = run.num_envs if job.is_on_device else run.envs_per_vector
    processes = max(1, run.num_workers, run.num_learners)
    computing = min(cores, processes)
    env = min(processes / costs.env_s, computing / max(1e-12, costs.env_s * costs.cpu_share))
    inference = computing * n / max(1e-12, costs.vector.at(n) * costs.inference)
    rows = run.num_envs * run.num_steps / run.num_learners
    learning = run.num_learners * rows / max(1e-12, costs.learn.at(rows))
    sampling = 1 / (1 / env + 1 / inference)
    together = min(sampling, learning) if run.lag else 1 / (1 / sampling + 1 / learning)
    return {"env": env, "inference": inference, "learning": learning, "together": together}


def _rates(costs: Costs, job: Job) -> dict[str, Any]:
    """Return the rates of a worker and a learner that never wait."""
    run = job.settings.run
    n = run.envs_per_vector
    vector_s = n * costs.env_s + costs.vector.at(n)
    computing_s = n * costs.env_s * costs.cpu_share + costs.vector.at(n)
    rows = run.num_envs * run.num_steps / run.num_learners
    return {
        "env": run.env,
        "algo": run.algo,
        "worker_env_steps_per_s": n / vector_s,
        "worker_cores": computing_s / vector_s,
        "learner_env_steps_per_s": rows / costs.learn.at(rows),
        "learner_device": costs.device,
        "lag": run.lag,
        "batch": run.num_envs * run.num_steps,
        "allreduce_s": costs.allreduce.at(2),
        "envs_per_worker": n * max(1, run.num_vectors // max(run.num_workers, run.num_learners)),
        "envs_per_vector": n,
        "max_learners": 0 if job.settings.algorithm.learners_help else 1,
    }
