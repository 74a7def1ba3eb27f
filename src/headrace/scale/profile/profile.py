"""`headrace profile`: where a run's time goes, what limits it, and what to change.

A run is made (or read), each part of it is measured apart, and what was measured apart is put
together again by `simulate.py`: what is predicted of other sizes can be trusted as far as that
agrees with the run. Left out: how it is told (`told.py`).
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import headrace
from headrace.envs.make import EnvLike
from headrace.errors import ConfigError
from headrace.meter import Laps
from headrace.run import launch
from headrace.run.code import NO_CODE, Code
from headrace.run.config import Settings, cpu_cores
from headrace.run.log import read_metrics
from headrace.run.rank import on_device
from headrace.run.settle import task_of_run, wanted
from headrace.run.task import Task
from headrace.run.timeline import read_timeline
from headrace.scale.model.costs import Costs
from headrace.scale.model.limits import gains
from headrace.scale.model.simulate import lock_step_s, simulate
from headrace.scale.profile import advice
from headrace.scale.profile.probe import Probe
from headrace.scale.profile.shares import by_process

Say = Callable[[str], None]
_LONG = 10**15  # env steps: more than are taken
_LEAST_S = 10.0


@dataclass(frozen=True)
class Profile:
    """What came out.

    Attributes:
        settings: of the run.
        costs: of its parts, measured apart.
        env_steps_per_s: of the run; None: it had fewer than two updates.
        seconds: by process and span; `wait` of samplers in two parts (`shares.py`).
        tracks: what each process did when.
        ceilings: env steps/s of environments alone, inference alone, one learner alone (of all
            learners), and of the three together.
        predicted: env steps/s, from `costs`.
        gains: see `limits.gains`.
        changes: what would help most.
        rates: what `headrace plan` needs.
    """

    settings: Settings
    costs: Costs
    env_steps_per_s: float | None
    seconds: dict[str, dict[str, float]]
    tracks: dict[str, Laps]
    ceilings: dict[str, float]
    predicted: float
    gains: dict[str, float]
    changes: list[advice.Change]
    rates: dict[str, Any]

    @property
    def of_limit(self) -> float | None:
        """Share of the ceilings' limit that the run reached."""
        rate = self.env_steps_per_s
        return None if rate is None else rate / self.ceilings["together"]

    @property
    def lock_step(self) -> float:
        """Env steps/s if each step waited for the slowest of all environments, inference apart."""
        num_envs = self.settings.run.num_envs
        return num_envs / lock_step_s(self.costs, num_envs)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `headrace plan` and others go on."""
        step, reset = self.costs.step, self.costs.reset
        return {
            "headrace": headrace.__version__,
            "settings": self.settings.flat(),
            "cores": cpu_cores(),
            "env_steps_per_s": self.env_steps_per_s,
            "seconds": self.seconds,
            "times": {
                name: {
                    "mean_s": of.mean,
                    "p50_s": of.percentile(0.5),
                    "p99_s": of.percentile(0.99),
                    "max_s": of.max,
                    "tail_weight": of.tail_weight,
                }
                for name, of in (("step", step), ("reset", reset))
            },
            "lock_step_env_steps_per_s": self.lock_step,
            "ceilings": self.ceilings,
            "of_limit": self.of_limit,
            "predicted_env_steps_per_s": self.predicted,
            "gains": self.gains,
            "changes": [{"settings": c.settings, "gain": c.gain} for c in self.changes],
            "rates": self.rates,
            "costs": self.costs.to_json(),
        }


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
    want = wanted(given, env, code, config_file)
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
        tracks, of_run = read_timeline(task.run_dir), ended.summary
    often = of_run["episodes"] / max(1, of_run["env_steps"])
    rate = of_run["env_steps_per_s"]
    return _profiled(task, want.asked, tracks, rate, often, seconds / 2, say)


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
    return _profiled(task, task.settings.flat(), tracks, _rate(rows), often, seconds, say)


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


def _refuse_cluster(task: Task) -> None:
    if cluster := task.settings.run.cluster:
        raise ConfigError(
            f"cluster={cluster!r}: a profile is made on one machine.\nLeave --cluster out; "
            "headrace plan goes on from there."
        )


def _profiled(
    task: Task,
    asked: Mapping[str, Any],
    tracks: dict[str, Laps],
    rate: float | None,
    resets_per_step: float,
    seconds: float,
    say: Say,
) -> Profile:
    costs = Probe(task, seconds, say).costs()
    whole = on_device(task)
    if costs.resets_per_step:  # how often depends on the policy
        costs = replace(costs, resets_per_step=resets_per_step)
    topology = advice.topology_of(task.settings, on_device=whole)
    return Profile(
        settings=task.settings,
        costs=costs,
        env_steps_per_s=rate,
        seconds=by_process(tracks, _trained_since(tracks)),
        tracks=tracks,
        ceilings=_ceilings(costs, task),
        predicted=simulate(costs, topology).env_steps_per_s,
        gains=gains(costs, topology),
        changes=advice.changes(costs, task.settings, asked, task.spec.kind, on_device=whole),
        rates=_rates(costs, task),
    )


def _trained_since(tracks: dict[str, Laps]) -> float:
    """When all had started: what came before belongs to no iteration."""
    return max((laps.ends[0] for laps in tracks.values() if laps.ends), default=0.0)


def _ceilings(costs: Costs, task: Task) -> dict[str, float]:
    """Env steps/s of each part alone, on this machine's cores."""
    run, cores = task.settings.run, cpu_cores()
    n = run.num_envs if on_device(task) else run.envs_per_vector
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


def _rates(costs: Costs, task: Task) -> dict[str, Any]:
    """What one sampler and one learner do that never wait."""
    run = task.settings.run
    n = run.num_envs // run.num_learners if on_device(task) else run.envs_per_vector
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
    }
