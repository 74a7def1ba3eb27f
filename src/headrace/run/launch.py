"""From settings to a run: build the parts, hand them to the loop, and clear up after it.

Left out: the loop (`train.py`) and every part of it.
"""

import contextlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import gymnasium
import numpy as np
import torch

import headrace
from headrace.collect.api import Collector, Plan, ShouldStop
from headrace.collect.inline import InlineCollector
from headrace.collect.workers import WorkersCollector
from headrace.envs.make import EnvLike, EnvMaker, WrapperLike, env_spec
from headrace.errors import CheckpointError, ConfigError, EnvError
from headrace.meter import Meter
from headrace.models.policy import ModelFactory
from headrace.named import load_callable
from headrace.run import checkpoint, rundir
from headrace.run.best import Evaluations
from headrace.run.checkpoint import Checkpoint
from headrace.run.code import NO_CODE, Code
from headrace.run.config import Settings, cpu_cores, given_for_resume, resolve
from headrace.run.learner import Learner
from headrace.run.log import Display, MetricsLog
from headrace.run.process import StopSignals, math_threads
from headrace.run.report import OnUpdate, Reporter, farewell, introduce
from headrace.run.save import Saver
from headrace.run.train import Counters, train
from headrace.spec import EnvSpec


@dataclass(frozen=True)
class Ended:
    """What is left of a run.

    Attributes:
        run_dir: its directory.
        summary: what `--json` prints.
        stopped_by: the signal that ended it early (0: none did).
        maker: makes its environments.
        model: makes its network, if it is the user's own.
    """

    run_dir: Path
    summary: dict[str, Any]
    stopped_by: int
    maker: EnvMaker
    model: ModelFactory | None


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
    if env is not None:
        given = given | {"env": EnvMaker(env).name}
    settings = resolve(given | code.names(), config_file)
    run = settings.run
    if code.model is None and run.model:
        code = replace(code, model=load_callable(run.model, ConfigError))
    maker = _maker(settings, run.env if env is None else env, code.wrappers or run.wrapper)
    spec = env_spec(maker)
    run_dir = run_dir or rundir.default(run.env, run.algo, run.seed)
    with rundir.locked(run_dir):
        rundir.refuse_used(run_dir)
        return _run(settings, maker, code.model, spec, run_dir, None, meter, on_update, out)


def go_on(
    run_dir: Path,
    *,
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    goals: dict[str, int] | None = None,
    on_update: OnUpdate | None = None,
    out: TextIO | None = None,
    started: float | None = None,
) -> Ended:
    """Go on with a run from its newest whole checkpoint.

    Args:
        run_dir: of the run.
        env: must be given again where the run's environment is code of the user's own.
        code: wrappers and a network must be given again where the run has them.
        goals: new total_env_steps and schedule_env_steps, either or both.
        on_update: called after each update.
        out: where progress is shown; None: nowhere.
        started: when the process began.

    Raises:
        HeadraceError: see `headrace.errors`.
    """
    meter = Meter(started)
    settings, maker = settings_of_run(run_dir, env, code, goals)
    with rundir.locked(run_dir):
        saved = checkpoint.newest(run_dir)
        spec = env_spec(maker)
        theirs = EnvSpec.from_json(saved.manifest["policies"]["default"]["spec"])
        check_fits(theirs, spec, run_dir)
        return _run(settings, maker, code.model, spec, run_dir, saved, meter, on_update, out)


def settings_of_run(
    run_dir: Path, env: EnvLike | None, code: Code, goals: dict[str, int] | None = None
) -> tuple[Settings, EnvMaker]:
    """The settings and the environment of a run; code only if the caller names it again.

    Raises:
        ConfigError: some of it is code, and was not named.
    """
    config = rundir.read_config(run_dir)
    given, origin = given_for_resume(config, goals or {})
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


def check_fits(theirs: EnvSpec, spec: EnvSpec, run_dir: Path) -> None:
    """A checkpoint of another environment could load, and would then act on nonsense.

    Raises:
        CheckpointError: the spaces of the checkpoint (`theirs`) and the environment differ.
    """
    differing = [
        f"  {role}: checkpoint {a.describe()}, environment {b.describe()}"
        for role, a, b in (
            ("observation", theirs.observation, spec.observation),
            ("action", theirs.action, spec.action),
        )
        if a != b
    ]
    if differing:
        raise CheckpointError(
            f"The checkpoint in {run_dir} is of another environment ({theirs.id}, not {spec.id}):\n"
            + "\n".join(differing)
            + "\nName the environment that it was trained on, or start a new run."
        )


def _run(
    settings: Settings,
    maker: EnvMaker,
    model: ModelFactory | None,
    spec: EnvSpec,
    run_dir: Path,
    saved: Checkpoint | None,
    meter: Meter,
    on_update: OnUpdate | None,
    out: TextIO | None,
) -> Ended:
    """Build the parts, restore them if there is a checkpoint, run the loop, and clear up."""
    run = settings.run
    stop = StopSignals()
    display = Display(out, run.total_env_steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop.installed())
        stack.enter_context(math_threads(run.learner_threads))
        learner = Learner(settings, spec, model, _device(run.device), meter)
        if run.init_from and saved is None:
            _init_from(Path(run.init_from), spec, learner)
        counters = Counters()
        introduce(display, settings, spec, run_dir)
        collector = _collector(settings, maker, model, spec, meter, stop)
        stack.push(_closing(collector))
        meter.lap("start")
        # From here on it is a run: what could not be built has been refused.
        rundir.write_config(run_dir, _describe(settings, maker))
        if saved is not None:
            counters = _restore(saved, settings, learner, collector, display)
            meter.lap("checkpoint")
        log = MetricsLog(run_dir, learner.version, counters.env_steps)
        stack.enter_context(contextlib.closing(log))
        reporter = Reporter(settings, counters, learner, meter, log, display, on_update)
        resumed = saved is not None
        saver = Saver(settings, run_dir, spec, counters, learner, collector, resumed=resumed)
        evaluations = Evaluations(run, maker, spec, counters, learner, saver, stop)
        stack.callback(display.stop)
        display.start()
        train(
            run, collector, learner, counters, meter,
            stop=stop, evaluate=evaluations, on_update=reporter, save=saver,
            save_is_due=saver.is_due,
        )  # fmt: skip
        samplers = collector.meters()
    summary = reporter.summary(run_dir, samplers)
    display.say(farewell(summary, stop.received, maker))
    return Ended(run_dir, summary, stop.received, maker, model)


def _closing(collector: Collector) -> Callable[..., None]:
    """Close at the end of a `with`; an error in closing must not hide the one that ended it."""

    def close(kind: type[BaseException] | None, *_: object) -> None:
        try:
            collector.close()
        except EnvError:
            if kind is None:
                raise

    return close


def _init_from(run_dir: Path, spec: EnvSpec, learner: Learner) -> None:
    """Begin with the weights of another run."""
    saved = checkpoint.newest(run_dir)
    theirs = EnvSpec.from_json(saved.manifest["policies"]["default"]["spec"])
    check_fits(theirs, spec, run_dir)
    checkpoint.load_into(learner.policy, saved)


def _collector(
    settings: Settings,
    maker: EnvMaker,
    model: ModelFactory | None,
    spec: EnvSpec,
    meter: Meter,
    stop: ShouldStop,
) -> Collector:
    run = settings.run
    plan = Plan(
        maker=maker,
        spec=spec,
        network=settings.network,
        model=model,
        policy_out=settings.algo_module.POLICY_OUT,
        num_steps=run.num_steps,
        num_envs=run.num_envs,
        envs_per_vector=run.envs_per_vector,
        seed=run.seed,
        reseed_episodes=run.reseed_episodes,
        replay_limit_s=run.replay_limit_s,
        threads_per_sampler=max(1, cpu_cores() // max(1, run.num_workers)),
    )
    if run.num_workers == 0:
        return InlineCollector(plan, meter, stop)
    return WorkersCollector(plan, run.num_workers, stop)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda', but torch finds no CUDA device (see `headrace doctor`).\n"
            "Use --device cpu (or auto)."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _restore(
    saved: Checkpoint,
    settings: Settings,
    learner: Learner,
    collector: Collector,
    display: Display,
) -> Counters:
    run = settings.run
    counters = Counters.from_json(saved.manifest["counters"])
    learner.load_state(
        {name: saved.tensors(name) for name in ("policy_default", "learner_default")},
        saved.manifest["learner"],
    )
    restored = collector.restore(saved.arrays("samplers"))
    display.say(
        f"Resumed from {saved.path.name}: {counters.env_steps:,} env steps, {learner.version:,} "
        f"updates. Episodes under way: {restored.set_state} restored, "
        f"{restored.replayed} replayed, {restored.new_episode} begun anew."
    )
    if counters.done(run):
        display.say(
            f"Nothing to do: the goal of {run.total_env_steps:,} env steps or the wanted return "
            "was reached. A new goal: --total-env-steps N"
        )
    elif falling := settings.ended_schedules():
        display.say(
            f"{' and '.join(falling)}: linear, and 0 from {run.schedule_env_steps:,} env steps on. "
            f"To learn on: --schedule-env-steps {run.total_env_steps}"
        )
    if restored.new_episode:
        display.say("From here on this run differs from one that was not interrupted.")
    return counters


def _describe(settings: Settings, maker: EnvMaker) -> dict[str, Any]:
    """config.json."""
    return {
        "headrace": headrace.__version__,
        "settings": settings.flat(),
        "origin": settings.origin,
        "env_is_code": maker.is_code,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        },
    }
