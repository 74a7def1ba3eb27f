"""Builds a `Job`, which all ranks of a run receive, from the caller's request."""

import contextlib
import functools
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace import timeouts
from headrace.collectors.supervisor import TIMES_AS_LONG_TO_START
from headrace.collectors.watchdog import Watchdog
from headrace.config.algorithms import AlgorithmLike, algorithm_name, load_algorithm
from headrace.config.checks import check_critic
from headrace.config.derive import derive
from headrace.config.policies import assign_agents, format_assignment, sides_of
from headrace.config.resolve import (
    NO_FILE,
    ConfigFile,
    read_settings,
    resolve,
    values_for_resume,
)
from headrace.config.run_config import AUTO_WORKERS, RunConfig
from headrace.config.settings import Settings, is_usually_native
from headrace.cost_model.costs import Costs
from headrace.envs.api import Guards
from headrace.envs.factory import EnvLike, EnvMaker, WrapperLike, env_spec
from headrace.envs.registry import newest_version
from headrace.envs.vectors import is_one_vector
from headrace.errors import CheckpointError, ConfigError, flag
from headrace.learner.frozen import check_frozen
from headrace.meter import Meter
from headrace.models.custom import ModelFactory, load_model
from headrace.spec import Agents, EnvSpec, Interface
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """A run, as all its ranks receive it.

    Attributes:
        eval_maker, eval_spec: of the environment of evaluations.
        saved: checkpoint to resume from; every rank's machine must have its directory.
        machines: on a cluster: id of a machine for each worker that fits at the start.
        rolled_back: on a cluster: env steps to learn from again after the loss of a learner; None:
            the first start.
        pause_at: env steps after which this process saves and ends, although the run goes on; 0: it
            goes on to the run's end.
        has_on_update: whether a caller gets each update, and may change environments.
    """

    settings: Settings
    maker: EnvMaker
    eval_maker: EnvMaker
    model: ModelFactory | None
    spec: EnvSpec
    eval_spec: EnvSpec
    shares: dict[str, Agents]
    run_dir: Path
    saved: Checkpoint | None
    quiet: bool
    machines: tuple[str, ...] = ()
    rolled_back: int | None = None
    pause_at: int = 0
    has_on_update: bool = False

    @property
    def is_on_device(self) -> bool:
        """Whether all environments are one vector on the learner's device."""
        return not self.settings.run.num_workers and is_one_vector(self.maker, self.spec)

    @property
    def sides(self) -> dict[str, tuple[str, Agents]]:
        """Who makes rows of its own in a game: name -> (policy, its agents)."""
        return sides_of(self.shares, league=self.settings.run.league > 0)

    @property
    def run_of_loop(self) -> RunConfig:
        """The run's settings as the loop has them: it ends at `pause_at`.

        All else has those of the whole run, whose schedules and sizes follow from its env steps.
        """
        run = self.settings.run
        until = min(run.total_env_steps, self.pause_at or run.total_env_steps)
        return replace(run, total_env_steps=until)

    def marked(self) -> contextlib.AbstractContextManager[None]:
        """Mark the run directory while this process, which has locked it, runs the job."""
        run = self.settings.run
        here = not (run.num_workers or run.cluster)
        return rundir.marked(self.run_dir, may_have_workers=here and not why_no_workers(self.spec))


@dataclass(frozen=True)
class RunRequest:
    """A caller's request for a run.

    Attributes:
        env: an environment or its maker; None: the setting `env`.
        eval_env: the same for evaluations; None: the setting `eval_env`.
        wrappers, model, algorithm: the user's own code, or its name; default: the settings' own.
        config_file: more settings.
        measured: sizes that `headrace autoscale` measured, used where no size is set.
        spec: of the environment, after `inspect_request`.
        costs: what numbers that are auto are chosen by, after `calibrated`.
    """

    explicit: Mapping[str, Any] = field(default_factory=dict)
    env: EnvLike | None = None
    wrappers: tuple[WrapperLike, ...] = ()
    model: str | ModelFactory | None = None
    algorithm: AlgorithmLike | None = None
    config_file: ConfigFile = NO_FILE
    measured: Mapping[str, Any] = field(default_factory=dict)
    spec: EnvSpec | None = None
    costs: Costs | None = None
    eval_env: EnvLike | None = None

    def change(self, **settings: Any) -> "RunRequest":
        """Return the request with other settings, for the same environment."""
        return replace(self, explicit={**self.explicit, **settings})

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings of all sources, before others are derived from them."""
        return read_settings(self.explicit, self.config_file, self.measured)

    def derived(self, cores: int | None = None) -> Settings:
        """Return all settings, with the defaults of the environment's kind, or ConfigError."""
        assert self.spec is not None
        return derive(self.underived(), self.spec.interface, cores, self.costs)

    @property
    def has_unnamed_code(self) -> bool:
        """Whether some code has no name, so that it could differ the next time."""
        named_wrappers = all(isinstance(wrapper, str) for wrapper in self.wrappers)
        return callable(self.env) or self.model is not None or not named_wrappers

    def underived(self) -> Settings:
        """Return the settings of all sources, the defaults of the environment's kind included."""
        return read_settings(self.explicit, self.config_file, self.measured, self.spec)

    def job(self, run_dir: Path, *, cores: int | None = None, quiet: bool = True) -> Job:
        """Derive the remaining settings and return the job of a new run, or raise ConfigError.

        Args:
            cores: CPU cores for workers; default: those of this process.
        """
        assert self.spec is not None
        _check_interface(self.settings.run, self.spec)
        settings = self.derived(cores)
        maker = _maker_of(settings, self)
        if self.spec.interface != "gym":
            _check_whole(settings.run, maker, self.spec)
        return _job_of(settings, maker, self, self.spec, run_dir, quiet=quiet)


def inspect_request(request: RunRequest) -> RunRequest:
    """Load the code, and make one environment for its spec; ConfigError, EnvError."""
    request = _with_version(request)
    named: dict[str, Any] = {}  # in config.json, they tell that the code must be named again
    if request.wrappers:
        named["wrapper"] = tuple(
            w if isinstance(w, str) else getattr(w, "__name__", "wrapper") for w in request.wrappers
        )
    if (model := load_model(request.model)) is not None:
        name = getattr(model, "__qualname__", "model")
        named["model"] = f"{getattr(model, '__module__', '')}:{name}"
    if request.algorithm:
        named["algo"] = algorithm_name(type(load_algorithm(request.algorithm)))
    if request.env is not None:
        named["env"] = EnvMaker(request.env).name
    if request.eval_env is not None:
        named["eval_env"] = EnvMaker(request.eval_env).name
    request = request.change(**named)
    settings, run = request.settings, request.settings.run
    request = replace(
        request,
        env=run.env if request.env is None else request.env,
        eval_env=request.eval_env if request.eval_env is not None else run.eval_env or None,
        wrappers=request.wrappers or run.wrapper,
        model=model or load_model(run.model),
    )
    return replace(request, spec=_spec_of(_maker_of(settings, request), run))


def _with_version(request: RunRequest) -> RunRequest:
    """Name the newest version of an id that has none, since presets and files go by whole ids."""
    if isinstance(request.env, str):
        return replace(request, env=newest_version(request.env))
    if request.env is None:
        return request.change(env=newest_version(request.settings.run.env))
    return request


def settings_of_run(
    run_dir: Path, request: RunRequest, *, needs: Container[str] = ("env", "eval_env")
) -> tuple[Settings, EnvMaker]:
    """Return a run's settings, with those of `request` changed, and its environment.

    Args:
        needs: which environments must be named again, if they are code.

    Raises:
        ConfigError: some of the run's code is not named again.
    """
    config = rundir.read_config(run_dir)
    values, source = values_for_resume(config, request.explicit)
    name, wrappers, model, algo = (values[k] for k in ("env", "wrapper", "model", "algo"))
    eval_name = values.get("eval_env", "")  # old files lack it

    def is_missing(setting: str, name: str) -> bool:
        is_code = config[f"{setting}_is_code"] or ":" in name
        return is_code and setting in needs and getattr(request, setting) is None

    code = (
        ("env", _code_name(name), is_missing("env", name)),
        ("eval_env", _code_name(eval_name), is_missing("eval_env", eval_name)),
        ("wrapper", " ".join(wrappers), wrappers and not request.wrappers),
        ("model", model, model and not request.model),
        ("algo", algo, ":" in algo and not request.algorithm),
    )
    again = [
        f"{flag(name)} {text} ({name}=... in Python)" for name, text, missing in code if missing
    ]
    if again:
        raise ConfigError(
            f"The run in {run_dir} has code of its own, and a file is not allowed to name code to "
            "run.\nName it again: " + ", ".join(again)
        )
    if request.env is not None:
        values["env"] = EnvMaker(request.env).name
    if request.eval_env is not None:
        values["eval_env"] = EnvMaker(request.eval_env).name
    if request.algorithm:
        values["algo"] = algorithm_name(type(load_algorithm(request.algorithm)))
    settings = replace(resolve(values), source=source)
    return settings, _maker_of(settings, request)


def _code_name(name: str) -> str:
    return name if ":" in name else "module:callable"


def code_flags(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the flags that name a run's own code again, and their values.

    Args:
        config: the content of the run's config.json.
    """
    run = config["settings"]
    envs = [name for name in ("env", "eval_env") if config[f"{name}_is_code"]]
    named = {name: [run[name]] for name in envs} | {"wrapper": run["wrapper"]}
    named["model"] = [run["model"]] if run["model"] else []
    named["algo"] = [run["algo"]] if ":" in run["algo"] else []
    return {flag(name): [_code_name(of) for of in code] for name, code in named.items() if code}


def eval_flags(config: Mapping[str, Any]) -> str:
    """Return what names a run's own code again to `headrace eval` and `export`; "" without any.

    An environment of evaluations is the one that they need, if the run has its own.
    """
    code = code_flags(config)
    if config["settings"].get("eval_env"):
        code.pop("--env", None)
    return " ".join(f"{name} {shlex.join(of)}" for name, of in code.items())


def evaluated_of_run(run_dir: Path, request: RunRequest) -> tuple[Settings, EnvMaker, EnvSpec]:
    """Return a run's settings, and its environment of evaluations with the spec.

    `request.env` takes the place of that environment, unless `request.eval_env` is given.

    Raises:
        ConfigError: some of the run's code that is needed is not named again.
    """
    own = request.eval_env is not None or rundir.read_config(run_dir)["settings"].get("eval_env")
    is_replaced = own and request.env is not None and request.eval_env is None
    needs = "eval_env" if own and not is_replaced else "env"
    settings, maker = settings_of_run(run_dir, request, needs=(needs,))
    if is_replaced:
        return settings, maker, _spec_of(maker, settings.run)
    return settings, *_evaluated(settings, request, maker)


def _evaluated(
    settings: Settings, request: RunRequest, maker: EnvMaker
) -> tuple[EnvMaker, EnvSpec]:
    """Return the environment of evaluations, and its spec.

    One of its own is stepped as is usual for its kind, whatever is asked for in training.
    """
    run = settings.run
    env = run.eval_env if request.eval_env is None else request.eval_env
    if env == "":
        maker = replace(maker, kwargs=maker.kwargs | run.eval_env_kwargs)
        return maker, _spec_of(maker, run)

    def stepped(interface: Interface) -> EnvMaker:
        native = not maker.wrappers and is_usually_native(EnvMaker(env).name, interface)
        return replace(maker, env=env, kwargs=run.eval_env_kwargs, native=native)

    spec = _spec_of(stepped("gym"), run)
    return stepped(spec.interface), spec


def _check_same_spaces(trained: EnvSpec, evaluated: EnvSpec) -> None:
    """Raise ConfigError unless policies of the one environment can act in the other."""
    if replace(evaluated, id=trained.id) == trained:
        return
    parts = [_describe_spaces(spec) for spec in (trained, evaluated)]
    names = list(dict.fromkeys([*parts[0], *parts[1]]))
    pairs = [(name, *(part.get(name, "none") for part in parts)) for name in names]
    differing = [pair for pair in pairs if pair[1] != pair[2]] or pairs
    raise ConfigError(
        f"eval_env: the spaces of {evaluated.id} are not those of {trained.id}, which is trained "
        "on:\n"
        + "\n".join(f"  {name}: evaluation {b}, training {a}" for name, a, b in differing)
        + "\nName an environment with the same spaces, or leave --eval-env out."
    )


def _describe_spaces(spec: EnvSpec) -> dict[str, str]:
    return {
        "observation": spec.observation.describe(),
        "action": spec.action.describe(),
        "agents": ", ".join(f"{size} {role}" for role, size in spec.roles) or "1",
        "action mask": f"in {'info' if spec.mask_in_info else spec.mask_key or 'no place'}",
    } | {
        f"agent {i}": f"observation {of.observation.describe()}, action {of.action.describe()}"
        for i, of in enumerate(spec.agent_spaces)
    }


def job_of_run(
    run_dir: Path, request: RunRequest, *, saved: Checkpoint | None = None, quiet: bool = True
) -> Job:
    """Return the job of a directory's run; CheckpointError if policies of `saved` do not fit."""
    settings, maker = settings_of_run(run_dir, request)
    spec = _spec_of(maker, settings.run)
    before = {} if saved is None else checkpoint.policies(saved)
    if saved is not None:
        checkpoint.check_policies(before, spec, run_dir)
    job = _job_of(settings, maker, request, spec, run_dir, quiet=quiet)
    shares = {name: agents for name, (_, agents) in before.items()}
    if saved is not None and shares != job.shares:
        raise CheckpointError(
            f"The checkpoint in {run_dir} has the policies {format_assignment(shares)}; "
            f"those of {spec.id} would be {format_assignment(job.shares)}.\n"
            "Name the environment that it was trained on."
        )
    return replace(job, saved=saved)


def _spec_of(maker: EnvMaker, run: RunConfig) -> EnvSpec:
    """Make one environment under the watchdog."""
    limit_s = TIMES_AS_LONG_TO_START * timeouts.step_timeout(run.env_timeout_s, 0.0)
    watchdog = Watchdog(
        Meter(),
        Guards(env_timeout_s=limit_s, enabled=run.guards),
        lambda: 0,
        lambda: "while the first one was made, which may take 10 times as long as a step",
    )
    with contextlib.closing(watchdog), watchdog:
        return env_spec(maker)


def _job_of(
    settings: Settings,
    maker: EnvMaker,
    request: RunRequest,
    spec: EnvSpec,
    run_dir: Path,
    *,
    quiet: bool,
) -> Job:
    """Assign the agents to policies; ConfigError if a setting does not go with several."""
    run = settings.run
    shares = assign_agents(run.policies, spec)
    for name in shares:
        check_critic(settings.of(name))
    settings.algorithm.check(spec)
    _check_interface(run, spec)
    if spec.interface == "turns" and settings.network.core != "none":
        raise ConfigError(
            f"core={settings.network.core!r}, but {spec.id} is played in turns, where an agent has "
            "no row while others move, and so no memory is kept.\nLeave --core out."
        )
    if run.league and spec.num_agents < 2:
        raise ConfigError(
            f"league={run.league}, but {spec.id} has one agent: expected a game of several.\n"
            "Leave --league out."
        )
    check_frozen(run.frozen, shares, run.model)
    if set(shares) == set(run.frozen):
        raise ConfigError(
            f"frozen: all policies ({', '.join(shares)}) are frozen.\nLeave one out, to be trained."
        )
    eval_maker, eval_spec = maker, spec
    if run.eval_env or run.eval_env_kwargs:
        eval_maker, eval_spec = _evaluated(settings, request, maker)
        _check_same_spaces(spec, eval_spec)
    model = load_model(request.model)
    return Job(settings, maker, eval_maker, model, spec, eval_spec, shares, run_dir, None, quiet)


def guards_of(run: RunConfig) -> Guards:
    """Return the guards of a run's environments and workers."""
    return Guards(
        on_env_error=run.on_env_error,
        on_worker_loss=run.on_worker_loss,
        env_timeout_s=run.env_timeout_s,
        max_restarts=run.max_worker_restarts,
        enabled=run.guards,
    )


def why_no_workers(spec: EnvSpec) -> str:
    """Return why the learner's process steps these environments itself; "" if workers can."""
    return "steps tensors" if spec.interface == "tensor" else ""


def _check_interface(run: RunConfig, spec: EnvSpec) -> None:
    """Refuse what environments of this form cannot have."""
    is_game = spec.interface == "kernel" and spec.num_agents > 1
    if (why := why_no_workers(spec)) and run.num_workers not in (0, AUTO_WORKERS):
        raise ConfigError(
            f"num_workers={run.num_workers}, but {spec.id} {why}: it is stepped in the learner's "
            "process.\nUse --num-workers 0."
        )
    why = why or (f"is a compiled game of {spec.num_agents} agents" if is_game else "")
    if why and run.on_env_error == "restart":
        raise ConfigError(
            f"on_env_error='restart', but {spec.id} {why}: one that fails is not made anew.\n"
            "Leave --on-env-error out."
        )
    if is_game and run.vectorization == "python":
        raise ConfigError(
            f"vectorization='python', but {spec.id} {why}: only its compiled form steps several.\n"
            "Leave --vectorization out."
        )


def _check_whole(run: RunConfig, maker: EnvMaker, spec: EnvSpec) -> None:
    """Refuse settings without effect if all environments are one vector."""
    refused = None
    if spec.interface == "tensor" and run.vectorization != "native":
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
            f"learner's process: {why}.\nLeave {flag(name)} out."
        )


def _maker_of(settings: Settings, request: RunRequest) -> EnvMaker:
    run = settings.run
    return EnvMaker(
        run.env if request.env is None else request.env,
        run.env_kwargs,
        request.wrappers,
        native=settings.is_native(),
        drop_obs_keys=run.drop_obs_keys,
        action_mask=run.action_mask,
        shared_critic=run.critic == "shared",
        agent_ids=run.agent_ids,
    )
