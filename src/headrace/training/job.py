"""Builds a `Job`, which all ranks of a run receive, from the caller's request."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace import timeouts
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.collectors.watchdog import Watchdog
from headrace.config.algorithms import algorithm_name
from headrace.config.policies import assign_agents, format_assignment
from headrace.config.resolve import Settings, derive, read_settings, resolve, values_for_resume
from headrace.config.run_config import RunConfig
from headrace.config.user_code import NO_CODE, Code
from headrace.envs.api import Guards
from headrace.envs.factory import EnvLike, EnvMaker, env_spec
from headrace.envs.vectors import is_one_vector
from headrace.errors import CheckpointError, ConfigError
from headrace.importing import load_callable
from headrace.learner.frozen import check_frozen
from headrace.meter import Meter
from headrace.models.custom import ModelFactory
from headrace.spec import Agents, EnvSpec
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class RunRequest:
    """A caller's request for a run.

    Attributes:
        env: an environment or its maker; None: the setting `env`.
        code: the user's code; default: the code that the settings name.
        config_file: TOML file with more settings.
        measured: sizes that `headrace autoscale` measured, used where no size is set.
    """

    explicit: Mapping[str, Any] = field(default_factory=dict)
    env: EnvLike | None = None
    code: Code = NO_CODE
    config_file: Path | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    def change(self, **settings: Any) -> "RunRequest":
        """Return the request with other settings."""
        return replace(self, explicit={**self.explicit, **settings})


@dataclass(frozen=True)
class Job:
    """A run, as all its ranks receive it.

    Attributes:
        saved: checkpoint to resume from; every rank's machine must have its directory.
        room_for: on a cluster: number of a rank's workers that fit at the start.
        rolled_back: on a cluster: env steps to learn from again after the loss of a learner; None:
            the first start.
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


@dataclass(frozen=True)
class InspectedRequest:
    """A request with its environment's spec and loaded code; `settings` are not yet derived."""

    request: RunRequest
    settings: Settings
    spec: EnvSpec

    def change(self, **settings: Any) -> "InspectedRequest":
        """Return the request with other settings, for the same environment."""
        request = self.request.change(**settings)
        return InspectedRequest(request, _read(request), self.spec)

    def job(self, run_dir: Path, *, cores: int | None = None, quiet: bool = True) -> Job:
        """Derive the remaining settings and return the job of a new run.

        Args:
            cores: CPU cores for workers; default: those of this process.

        Raises:
            ConfigError: settings contradict each other or the environment.
        """
        spec, request = self.spec, self.request
        _check_kind(self.settings.run, spec)
        settings = derive(self.settings, spec.kind, cores)
        maker = maker_of(settings, request)
        if spec.kind != "gym":
            _check_whole(settings.run, maker, spec)
        shares = shares_of(settings, spec)
        return Job(settings, maker, request.code.model, spec, shares, run_dir, None, quiet)


def inspect_request(request: RunRequest) -> InspectedRequest:
    """Read the settings, then make one environment for its spec; ConfigError, EnvError."""
    env, code = request.env, request.code
    request = request.change(**code.names())
    if env is not None:
        request = request.change(env=EnvMaker(env).name)
    settings = _read(request)
    run = settings.run
    if code.model is None and run.model:
        code = replace(code, model=load_callable(run.model, ConfigError))
    code = replace(code, wrappers=code.wrappers or run.wrapper)
    request = replace(request, env=run.env if env is None else env, code=code)
    return InspectedRequest(request, settings, spec_of(maker_of(settings, request), run))


def _read(request: RunRequest) -> Settings:
    return read_settings(request.explicit, request.config_file, request.measured)


def settings_of_run(run_dir: Path, request: RunRequest) -> tuple[Settings, EnvMaker]:
    """Return the settings and the environment of a run.

    `request` has the settings to change, and names all of the run's code again.

    Raises:
        ConfigError: some code is not named again.
    """
    config = rundir.read_config(run_dir)
    values, source = values_for_resume(config, request.explicit)
    name, wrappers, model = values["env"], values["wrapper"], values["model"]
    env, code = request.env, request.code
    again: list[str] = []
    if env is None and (config["env_is_code"] or ":" in name):
        again.append(f"--env {name if ':' in name else 'module:callable'} (env=... in Python)")
    if wrappers and not code.wrappers:
        again.append(f"--wrapper {' '.join(wrappers)} (wrapper=... in Python)")
    if model and code.model is None:
        again.append(f"--model {model} (model=... in Python)")
    if ":" in values["algo"] and code.algorithm is None:
        again.append(f"--algo {values['algo']} (algo=... in Python)")
    if again:
        raise ConfigError(
            f"The run in {run_dir} has code of its own, and a file is not allowed to name code to "
            "run.\nName it again: " + ", ".join(again)
        )
    if env is not None:
        values["env"] = EnvMaker(env).name
    if code.algorithm is not None:
        values["algo"] = algorithm_name(type(code.algorithm))
    settings = replace(resolve(values), source=source)
    return settings, maker_of(settings, replace(request, env=values["env"] if env is None else env))


def job_of_run(
    run_dir: Path,
    settings: Settings,
    maker: EnvMaker,
    model: ModelFactory | None,
    *,
    saved: Checkpoint | None = None,
    quiet: bool = True,
) -> Job:
    """Return the job of a resumed run; CheckpointError if the policies of `saved` do not fit."""
    spec = spec_of(maker, settings.run)
    if saved is not None:
        theirs = checkpoint.policies(saved)
        checkpoint.check_policies(theirs, spec, run_dir)
    shares = shares_of(settings, spec)
    if saved and (before := {name: agents for name, (_, agents) in theirs.items()}) != shares:
        raise CheckpointError(
            f"The checkpoint in {run_dir} has the policies {format_assignment(before)}; "
            f"those of {spec.id} would be {format_assignment(shares)}.\n"
            "Name the environment that it was trained on."
        )
    return Job(settings, maker, model, spec, shares, run_dir, saved, quiet)


def spec_of(maker: EnvMaker, run: RunConfig) -> EnvSpec:
    """Make one environment under the watchdog, and return its spec."""
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
    """Return the agents of each policy; ConfigError if a setting does not go with several."""
    run = settings.run
    shares = assign_agents(run.policies, spec)
    _check_kind(run, spec)
    check_frozen(run.frozen, shares, run.model)
    if set(shares) == set(run.frozen):
        raise ConfigError(
            f"frozen: all policies ({', '.join(shares)}) are frozen.\nLeave one out, to be trained."
        )
    return shares


def _check_kind(run: RunConfig, spec: EnvSpec) -> None:
    """Refuse settings that need single environments, which workers can step."""
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
    """Refuse settings without effect if all environments are one vector."""
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


def maker_of(settings: Settings, request: RunRequest) -> EnvMaker:
    """Return the maker of the run's environments."""
    run = settings.run
    assert request.env is not None  # inspected
    return EnvMaker(
        request.env,
        run.env_kwargs,
        tuple(request.code.wrappers),
        native=settings.is_native(),
        drop_obs_keys=run.drop_obs_keys,
        action_mask=run.action_mask,
    )
