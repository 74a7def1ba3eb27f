"""Makes a profile: `headrace profile`.

A run is made (or read), each part of it is measured apart, and what was measured apart is put
together again by `model.py`: what is predicted of other sizes can be trusted as far as that
agrees with the run. Left out: what it says then (`result.py`, `result.py`).
"""

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config.resolve import Settings, cpu_cores, resolve
from headrace.config.user_code import NO_CODE, Code
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import gains, simulate
from headrace.envs.factory import EnvLike, WrapperLike
from headrace.errors import ConfigError
from headrace.meter import Laps
from headrace.models.custom import ModelFactory
from headrace.models.policy import Network
from headrace.spec import Kind
from headrace.storage.timeline import read_timeline
from headrace.tools.profile import advice
from headrace.tools.profile.probe import Probe
from headrace.tools.profile.result import Profile, told
from headrace.tools.profile.timeline_plots import by_process
from headrace.training import launch
from headrace.training.api import code_of, given_by
from headrace.training.job import Job, inspect_request, task_of_run
from headrace.training.log import read_metrics
from headrace.training.rank import is_on_device

Say = Callable[[str], None]
_LONG = 10**15  # env steps: more than are taken
_LEAST_S = 10.0
_ASKED = ("given", "config ", "auto-scale")  # origins of what does not follow


def profile(
    env: EnvLike,
    *,
    algo: Any = None,
    network: Network | None = None,
    model: str | ModelFactory | None = None,
    wrapper: WrapperLike | Sequence[WrapperLike] = (),
    config: str | os.PathLike[str] | None = None,
    seconds: float = 60.0,
    quiet: bool = False,
    **settings: Any,
) -> Profile:
    """Say where the time of a training goes, what limits it, and what to change.

    Args:
        env: as `headrace.train` takes it, and so are algo, network, model, wrapper and config.
        algo: see there.
        network: see there.
        model: see there.
        wrapper: see there.
        config: see there.
        seconds: that all of it may take, but for starting processes.
        quiet: show nothing.
        **settings: every other setting of a training.

    Raises:
        HeadraceError: see `headrace.errors`.
        KeyboardInterrupt: nothing is left of it.
    """
    found = profile_env(
        given_by(settings, algo, network),
        env=env,
        code=code_of(wrapper, model),
        config_file=None if config is None else Path(config),
        seconds=seconds,
        say=(lambda _: None) if quiet else print,
    )
    if not quiet:
        print(told(found))
    return found


def profile_env(
    given: Mapping[str, Any],
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    config_file: Path | None = None,
    seconds: float = 60.0,
    say: Say = lambda text: None,
) -> Profile:
    """Make a run for a while, measure its parts apart, and say what limits it.

    Args:
        given: settings by name.
        env: an environment or what makes one; default: the setting of that name.
        code: wrappers and a network as callables.
        config_file: TOML with more settings.
        seconds: that all of it may take, but for starting processes.
        say: told what is going on.

    Raises:
        HeadraceError: see `headrace.errors`.
    """
    _check(seconds)
    want = inspect_request(given, env, code, config_file)
    with tempfile.TemporaryDirectory(prefix="headrace-profile-") as scratch:
        task = want.task(Path(scratch) / "run")
        _refuse_cluster(task)
        say(f"Training for {seconds / 2:.0f} s")
        run = task.settings.run
        long = {
            "total_env_steps": _LONG,
            "schedule_env_steps": run.schedule_env_steps,
            "stop_after_s": seconds / 2,
            "stop_at_return": None,
            "timeline": True,
        }
        ended = launch.start(
            {**want.asked, **long},
            env=want.env,
            code=want.code,
            config_file=config_file,
            run_dir=task.run_dir,
        )
        if ended.stopped_by:
            raise KeyboardInterrupt(ended.stopped_by)
        tracks, of_run = read_timeline(task.run_dir), ended.summary
    often = of_run["episodes"] / max(1, of_run["env_steps"])
    rate = of_run["env_steps_per_s"]
    resolved = partial(_resolved, want.asked, config_file, task.spec.kind)
    return _profiled(task, resolved, tracks, rate, often, seconds / 2, say)


def profile_run(
    run_dir: Path,
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    seconds: float = 60.0,
    say: Say = lambda text: None,
) -> Profile:
    """The same of a run that was made with `timeline`; its parts are measured now.

    Raises:
        ConfigError: it has no timeline.
        HeadraceError: see `headrace.errors`.
    """
    _check(seconds)
    task = task_of_run(run_dir, env, code)
    _refuse_cluster(task)
    tracks = read_timeline(run_dir)
    if not tracks:
        raise ConfigError(
            f"The run in {run_dir} kept no timeline: it was trained without --timeline (or has not "
            "ended).\nTo profile its settings by a new run: headrace profile ENV, and the flags of "
            "headrace train."
        )
    rows = read_metrics(run_dir)
    often = rows[-1]["episodes"] / rows[-1]["env_steps"] if rows else 0.0
    flat, origin = task.settings.flat(), task.settings.origin
    # The rest follows again from these, the preset and the defaults.
    asked = {name: flat[name] for name in flat if origin[name].startswith(_ASKED)}
    resolved = partial(_resolved, {**asked, "env": task.settings.run.env}, None, task.spec.kind)
    return _profiled(task, resolved, tracks, _rate(rows), often, seconds, say)


def _resolved(
    asked: Mapping[str, Any], config_file: Path | None, kind: Kind, changed: Mapping[str, Any]
) -> Settings:
    """The settings of a profile, with some changed."""
    return resolve({**asked, **changed}, config_file, kind=kind)


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Env steps/s from the first update to the last of the process that wrote the last one."""
    last, later = None, []
    for row in reversed(rows):
        if last is not None and row["wall_s"] > last["wall_s"]:
            break  # a resumed run's clock begins anew
        later.append(last := row)
    if len(later) < 2:
        return None
    newest, oldest = later[0], later[-1]
    return float(
        (newest["env_steps"] - oldest["env_steps"]) / (newest["wall_s"] - oldest["wall_s"])
    )


def _check(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= _LEAST_S):
        raise ConfigError(f"seconds={seconds:g}: expected {_LEAST_S:g} or more.")


def _refuse_cluster(task: Job) -> None:
    if cluster := task.settings.run.cluster:
        raise ConfigError(
            f"cluster={cluster!r}: a profile is made on one machine.\nLeave --cluster out; "
            "headrace plan goes on from there."
        )


def _profiled(
    task: Job,
    resolved: advice.Resolved,
    tracks: dict[str, Laps],
    rate: float | None,
    resets_per_step: float,
    seconds: float,
    say: Say,
) -> Profile:
    costs = Probe(task, seconds, say).costs()
    whole = is_on_device(task)
    if costs.resets_per_step:  # how often depends on the policy
        costs = replace(costs, resets_per_step=resets_per_step)
    topology = advice.topology_of(task.settings, on_device=whole)
    predicted = simulate(costs, topology).env_steps_per_s
    return Profile(
        settings=task.settings,
        costs=costs,
        env_steps_per_s=rate,
        seconds=by_process(tracks, _trained_since(tracks)),
        tracks=tracks,
        ceilings=_ceilings(costs, task),
        predicted=predicted,
        gains=gains(costs, topology, predicted),
        changes=advice.changes(costs, task.settings, predicted, resolved, on_device=whole),
        is_whole=whole or task.maker.native,
        rates=_rates(costs, task),
    )


def _trained_since(tracks: dict[str, Laps]) -> float:
    """When all had started: what came before belongs to no iteration."""
    return max((laps.ends[0] for laps in tracks.values() if laps.ends), default=0.0)


def _ceilings(costs: Costs, task: Job) -> dict[str, float]:
    """Env steps/s of each part alone, on this machine's cores."""
    run, cores = task.settings.run, cpu_cores()
    n = run.num_envs if is_on_device(task) else run.envs_per_vector
    computing = min(cores, max(1, run.num_workers, run.num_learners))
    processes = max(1, run.num_workers, run.num_learners)
    env = min(processes / costs.env_s, computing / max(1e-12, costs.env_s * costs.cpu_share))
    inference = computing * n / max(1e-12, costs.vector.at(n) * costs.inference)
    rows = run.num_envs * run.num_steps / run.num_learners
    learning = run.num_learners * rows / max(1e-12, costs.learn.at(rows))
    sampling = 1 / (1 / env + 1 / inference)
    together = min(sampling, learning) if run.lag else 1 / (1 / sampling + 1 / learning)
    return {
        "env": env,
        "inference": inference,
        "learning": learning,
        "together": together,
    }


def _rates(costs: Costs, task: Job) -> dict[str, Any] | None:
    """What one sampler and one learner do that never wait; None: the learner is the sampler."""
    run = task.settings.run
    if is_on_device(task):
        return None
    n = run.envs_per_vector
    vector_s = n * costs.env_s + costs.vector.at(n)
    computing = n * costs.env_s * costs.cpu_share + costs.vector.at(n)
    rows = run.num_envs * run.num_steps / run.num_learners
    return {
        "env": run.env,
        "algo": run.algo,
        "sampler_env_steps_per_s": n / vector_s,
        "sampler_cores": computing / vector_s,
        "learner_env_steps_per_s": rows / costs.learn.at(rows),
        "learner_device": costs.device,
        "lag": run.lag,
        "batch": run.num_envs * run.num_steps,
        "allreduce_s": costs.allreduce.at(2),
        "envs_per_worker": n * max(1, run.num_vectors // max(run.num_workers, run.num_learners)),
        "envs_per_vector": n,
    }
