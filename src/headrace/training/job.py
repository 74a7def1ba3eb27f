"""What all ranks of a run are told.

Left out: how it came about (`launch.py`), and what a rank does with it (`rank.py`).
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace import timeouts
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.collectors.watchdog import Watchdog
from headrace.config.policies import assign_agents
from headrace.config.resolve import Settings, given_for_resume, resolve
from headrace.config.run_config import RunConfig
from headrace.config.user_code import NO_CODE, Code
from headrace.envs.api import Guards
from headrace.envs.factory import EnvLike, EnvMaker, WrapperLike, env_spec
from headrace.envs.vectors import is_one_vector
from headrace.errors import ConfigError
from headrace.importing import load_callable
from headrace.learner.multi_policy import check_frozen
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.spec import Agents, EnvSpec
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """Orders to a rank.

    Attributes:
        settings: resolved.
        maker: makes environments.
        model: makes the network, if it is the user's own.
        spec: of the environment.
        run_dir: where rank 0 writes.
        shares: the agents of each policy.
        saved: what to go on from; its directory must be there on every rank's machine.
        quiet: say nothing but errors.
        room_for: on a cluster: how many workers of a rank there is room for as it begins.
        rolled_back: on a cluster: env steps that were learned from, and are taken again since a
            learner was lost; None: it is the first time that the run begins here.
    """

    settings: Settings
    maker: EnvMaker
    model: ModelFactory | None
    spec: EnvSpec
    shares: dict[str, Agents]
    run_dir: Path
    saved: Checkpoint | None
    quiet: bool
    room_for: int = 0
    rolled_back: int | None = None


# From what the caller wants to what all ranks are told: settings, environment, policies.


@dataclass(frozen=True)
class RunRequest:
    """What the caller wants, as far as that is known without the machines it is to run on.

    Attributes:
        asked: settings by name.
        config_file: TOML with more settings.
        env: an environment or what makes one.
        code: wrappers and a network as callables.
        settings: resolved for a plain environment.
        spec: of the environment.
        found: settings that were measured, for what is not asked for or in the file.
    """

    asked: Mapping[str, Any]
    config_file: Path | None
    env: EnvLike
    code: Code
    settings: Settings
    spec: EnvSpec
    found: Mapping[str, Any] = field(default_factory=dict)

    def task(self, run_dir: Path, *, cores: int | None = None, quiet: bool = True) -> Job:
        """What ranks are told of a new run.

        Args:
            run_dir: where it is to write.
            cores: that workers can have; default: those of this process.
            quiet: say nothing but errors.
        """
        spec, wrappers = self.spec, self.code.wrappers
        resolved = partial(resolve, self.asked, self.config_file, found=self.found)
        if spec.kind != "gym":
            _check_kind(resolved().run, spec)
        settings = resolved(kind=spec.kind, cores=cores)
        maker = maker_of(settings, self.env, wrappers)
        if spec.kind != "gym":
            _check_whole(settings.run, maker, spec)
        shares = shares_of(settings, spec)
        return Job(settings, maker, self.code.model, spec, shares, run_dir, None, quiet)


def inspect_request(
    given: Mapping[str, Any],
    env: EnvLike | None = None,
    code: Code = NO_CODE,
    config_file: Path | None = None,
    found: Mapping[str, Any] | None = None,
) -> RunRequest:
    """Look at what the caller wants; one environment is made for that.

    Args:
        given: settings by name.
        env: an environment or what makes one; default: the setting of that name.
        code: wrappers and a network as callables; default: what the settings name.
        config_file: TOML with more settings.
        found: settings that were measured, for what is not given or in the file.

    Raises:
        ConfigError, EnvError: it cannot be.
    """
    if env is not None:
        given = {**given, "env": EnvMaker(env).name}
    asked = {**given, **code.names()}
    settings = resolve(asked, config_file, found=found)
    run = settings.run
    if code.model is None and run.model:
        code = replace(code, model=load_callable(run.model, ConfigError))
    env = run.env if env is None else env
    code = replace(code, wrappers=code.wrappers or run.wrapper)
    spec = spec_of(maker_of(settings, env, code.wrappers), run)
    return RunRequest(asked, config_file, env, code, settings, spec, found or {})


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
    return settings, maker_of(settings, given["env"] if env is None else env, code.wrappers)


def task_of_run(run_dir: Path, env: EnvLike | None, code: Code) -> Job:
    """What ranks were told of a run, as it began; `env` and `code` as in `settings_of_run`."""
    settings, maker = settings_of_run(run_dir, env, code)
    spec = spec_of(maker, settings.run)
    return Job(
        settings, maker, code.model, spec, shares_of(settings, spec), run_dir, None, quiet=True
    )


def spec_of(maker: EnvMaker, run: RunConfig) -> EnvSpec:
    """Of the environment: one is made, and watched as those of the run are."""
    limit_s = TIMES_AS_LONG_TO_START * timeouts.step_timeout(run.env_timeout_s, 0.0)
    watchdog = Watchdog(
        Meter(),
        Guards(env_timeout_s=limit_s, enabled=run.guards),
        lambda: 0,
        lambda: "while the first one was made, which may take 10 times as long as a step",
    )
    with contextlib.closing(watchdog), watchdog:
        return env_spec(maker)


def shares_of(settings: Settings, spec: EnvSpec) -> dict[str, Agents]:
    """The agents of each policy; ConfigError if something does not go with several."""
    run = settings.run
    shares = assign_agents(run.policies, spec)
    _check_kind(run, spec)
    check_frozen(run.frozen, shares, run.model)
    if set(shares) == set(run.frozen):
        raise ConfigError(f"frozen: nobody learns ({', '.join(shares)} are all frozen).")
    return shares


def _check_kind(run: RunConfig, spec: EnvSpec) -> None:
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


def _check_whole(run: RunConfig, maker: EnvMaker, spec: EnvSpec) -> None:
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


def maker_of(settings: Settings, env: EnvLike, wrappers: Sequence[WrapperLike]) -> EnvMaker:
    """Makes the run's environments."""
    run = settings.run
    return EnvMaker(
        env,
        run.env_kwargs,
        tuple(wrappers),
        native=run.vectorization == "native",
        drop_obs_keys=run.drop_obs_keys,
        action_mask=run.action_mask,
    )
