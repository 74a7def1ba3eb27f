"""Settings: what there is, where each value comes from, and whether they fit together.

Precedence: flags (or Python arguments), then the `--config` file, then the preset, then the class
default. All settings of a run share one flat name space. Left out: reading flags (`commands.py`).
"""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.algos import a2c, appo, impala, ppo
from headrace.config.checks import (
    check_auto,
    check_cluster,
    check_divisibility,
    check_guards,
    largest_divisor,
    without_cluster,
)
from headrace.config.old_names import rename_settings
from headrace.config.policies import merged, own_settings
from headrace.config.run_config import RunConfig
from headrace.configclass import Between, check_values
from headrace.distributed.ranks import visible_gpus
from headrace.errors import ConfigError, did_you_mean
from headrace.models.policy import Network
from headrace.spec import Kind

ALGOS: dict[str, tuple[ModuleType, type[Any]]] = {
    "a2c": (a2c, a2c.A2C),
    "appo": (appo, appo.APPO),
    "impala": (impala, impala.IMPALA),
    "ppo": (ppo, ppo.PPO),
}
"""Name -> the algorithm's page, and its settings."""


@dataclass(frozen=True)
class Settings:
    """All settings of a run, resolved, and where each came from.

    Attributes:
        run, network, algo: the groups.
        origin: name -> `given` (by flag or argument), `config FILE`, `preset NAME`, `default`, or
            what it follows from.
    """

    run: RunConfig
    network: Network
    algo: Any
    origin: dict[str, str]

    @property
    def algo_module(self) -> ModuleType:
        """The algorithm's page."""
        return ALGOS[self.run.algo][0]

    def of(self, policy: str) -> "Settings":
        """Those of one policy: `[policies.NAME]` may have some of its own.

        Raises:
            ConfigError: an unknown name, or a value of the wrong type.
        """
        own = own_settings(self.run.policies).get(policy, {})
        configs: tuple[Any, ...] = (self.network, self.algo)
        source = f"policies.{policy}"
        _check_names(source, own, tuple(map(type, configs)))
        network, algo = (
            replace(config, **check_values(type(config), _part(type(config), own), source))
            for config in configs
        )
        if "lr" in own:
            algo = replace(algo, lr=algo.lr * _lr_factor(self.run))
        return replace(self, network=network, algo=algo)

    def ended_schedules(self) -> list[str]:
        """What will have fallen to 0 before the run ends."""
        ends_early = self.run.total_env_steps > self.run.schedule_env_steps
        names = [f.name for f in fields(self.algo) if f.name.endswith("_schedule")]
        return [n for n in names if ends_early and getattr(self.algo, n) == "linear"]

    def flat(self) -> dict[str, Any]:
        """Name -> value over all groups, as plain data."""
        return {
            f.name: getattr(group, f.name)
            for group in (self.run, self.network, self.algo)
            for f in fields(group)
        }


def resolve(
    given: Mapping[str, Any],
    config_file: Path | None = None,
    *,
    kind: Kind = "gym",
    cores: int | None = None,
    found: Mapping[str, Any] | None = None,
) -> Settings:
    """Bring flags, file, preset and defaults together, and check that they fit.

    Args:
        given: name -> value from flags or Python arguments; `env` may be there or in the file.
        config_file: TOML with settings at the top level.
        kind: what the environment is, which its name does not tell.
        cores: that workers can have; default: those of this process. On a cluster, at least one
            for each worker that was asked for.
        found: what was measured to be fast, for what is not given or in the file.

    Raises:
        ConfigError: an unknown name, a value of the wrong type, or sizes that contradict.
    """
    given = rename_settings(given)
    from_file = rename_settings(_read_toml(config_file)) if config_file else {}
    env = given.get("env", from_file.get("env"))
    if not env:
        raise ConfigError(
            "No environment was given; it comes first, before flags that take several values.\n"
            "Example: headrace train CartPole-v1"
        )
    algo = given.get("algo", from_file.get("algo", "ppo"))
    if algo not in ALGOS:
        raise ConfigError(f"algo={algo!r}: expected one of {', '.join(ALGOS)}.")
    preset_name, from_preset = preset(env, algo)
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("given", given),
        (f"config {config_file}", from_file),
        ("auto-scale", found or {}),
        (f"preset {preset_name}", from_preset),
    )
    groups = (RunConfig, Network, ALGOS[algo][1])
    for source, layer in layers:
        _check_names(source, layer, groups)
    sources: dict[str, str] = {}
    built: list[Any] = []
    for group in groups:
        values: dict[str, Any] = {}
        sources |= {f.name: "default" for f in fields(group)}
        for source, layer in reversed(layers):
            part = check_values(group, _part(group, layer), source)
            if "policies" in part and values.get("policies"):
                part["policies"] = merged(values["policies"], part["policies"])
                source = f"{sources['policies']}, {source}"
            sources |= dict.fromkeys(part, source)
            values |= part
        built.append(group(**values))
    cores = cores or cpu_cores()
    if built[0].cluster:
        cores = max(cores, built[0].num_workers)
    return _derive(built[0], built[1], built[2], sources, kind, cores)


def _derive(
    run: RunConfig, network: Network, algo: Any, origin: dict[str, str], kind: Kind, cores: int
) -> Settings:
    """Fill what follows from other settings, then check all sums."""
    derived: dict[str, Any] = {}
    if not run.schedule_env_steps:
        derived["schedule_env_steps"] = run.total_env_steps
        origin["schedule_env_steps"] = "follows total_env_steps"
    if run.num_learners == -1:
        check_auto(run)
        gpus = visible_gpus(run.device)
        run = replace(run, num_learners=max(1, gpus))
        origin["num_learners"] += f", follows {gpus or 'no'} GPUs"
    learners = run.num_learners
    if run.num_envs_per_learner:
        if origin["num_envs"] == "given":
            raise ConfigError(
                f"num_envs={run.num_envs} and num_envs_per_learner={run.num_envs_per_learner}: "
                "expected one of the two."
            )
        derived["num_envs"] = run.num_envs_per_learner * learners
        origin["num_envs"] = f"follows num_envs_per_learner, {learners} learners"
        run = replace(run, num_envs=derived["num_envs"])
    if (factor := _lr_factor(run)) != 1:
        origin["lr"] = (
            f"{origin['lr']} {algo.lr:g} x {factor:g} ({run.lr_scale}, {learners} learners)"
        )
        algo = replace(algo, lr=algo.lr * factor)
    if run.vectorization == "auto" or (run.wrapper and origin["vectorization"] != "given"):
        has_own = run.env.startswith("ALE/") or kind in ("kernel", "tensor")
        native = has_own and not run.wrapper
        derived["vectorization"] = "native" if native else "python"
        origin["vectorization"] = "follows env and wrapper"
    if not run.learner_threads:
        derived["learner_threads"] = cpu_cores()
        origin["learner_threads"] = f"follows {cpu_cores()} cores"
    if run.cluster and origin["num_workers"] == "default" and kind == "gym":
        run, origin["num_workers"] = replace(run, num_workers=-1), "follows cluster"
    native = derived.get("vectorization", run.vectorization) == "native"
    # A vector of either has threads of its own, or cannot have any.
    whole = kind in ("tensor", "parallel") or (native and not (run.cluster and run.num_workers))
    derived |= _shared_out(run, origin, cores, whole=whole)
    if run.lag == -1:
        beside = ALGOS[run.algo][0].CORRECTS_LAG and derived.get("num_workers", run.num_workers) > 0
        derived["lag"] = _USUAL_LAG if beside else 0
        origin["lag"] = "follows algo and num_workers"
    run = type(run)(**{f.name: getattr(run, f.name) for f in fields(run)} | derived)
    check_guards(run)
    settings = Settings(run, network, algo, origin)
    _check_workers(run)
    check_cluster(run)
    for each in (settings, *map(settings.of, own_settings(run.policies))):
        _check_bounds(each.algo)
        check_divisibility(run, each.network, each.algo)
    return settings


def _lr_factor(run: RunConfig) -> float:
    """By what the number of learners multiplies learning rates."""
    scale = {"none": 1.0, "sqrt": math.sqrt(run.num_learners), "linear": float(run.num_learners)}
    return scale[run.lr_scale]


def _shared_out(
    run: RunConfig, origin: dict[str, str], cores: int, *, whole: bool
) -> dict[str, Any]:
    """How many environments a vector has, and how many workers there are."""
    learners, size = run.num_learners, run.envs_per_vector
    share, of_cores = run.num_envs // learners, max(1, cores // learners)
    workers = of_cores if run.num_workers == -1 else max(1, run.num_workers // learners)
    # Where the learner acts, one vector of a worker is stepped while another one waits.
    vectors_each = 2 if run.inference == "learner" else 1
    is_preset = origin["envs_per_vector"].startswith("preset")
    found: dict[str, Any] = {}
    if vectors_each > 1 and (not size or (is_preset and share // size < vectors_each * workers)):
        size = largest_divisor(share, max(1, share // (vectors_each * workers)))
        origin["envs_per_vector"] = f"follows num_envs, for {vectors_each} vectors of each worker"
    elif not size:
        size = largest_divisor(share, max(1, share // (1 if whole else of_cores)))
        origin["envs_per_vector"] = "follows num_envs" + ("" if whole else f" / {cores} cores")
    elif learners > 1 and share % size and is_preset:
        size = largest_divisor(share, size)
        origin["envs_per_vector"] += f", to fit {share} envs of each learner"
    found["envs_per_vector"] = size
    if run.num_workers == -1:
        found["num_workers"] = learners * max(1, min(workers, share // size))
        origin["num_workers"] += f", {cores} cores"
    return found


_USUAL_LAG = 2


def _check_workers(run: RunConfig) -> None:
    """Refuse what needs workers where there are none, and lags that nobody corrects for."""
    corrects = ALGOS[run.algo][0].CORRECTS_LAG
    if run.lag > 1 and not corrects:
        able = " or ".join(name for name, (page, _) in ALGOS.items() if page.CORRECTS_LAG)
        raise ConfigError(
            f"lag={run.lag}, but {run.algo} does not correct for what older weights did: expected "
            f"0 or 1.\nUse --lag 1, or --algo {able}."
        )
    if run.lag and corrects and not run.num_workers:
        raise ConfigError(
            f"lag={run.lag} with algo={run.algo} lets workers sample while the learner learns, and "
            "there are none: num_workers=0.\nUse --num-workers -1 (one for each CPU core), or "
            "--lag 0."
        )
    if run.inference == "learner" and not run.num_workers:
        raise ConfigError(
            "inference='learner' lets workers ask the learner's process for actions, and there are "
            "none: num_workers=0.\nUse --num-workers -1 (one for each CPU core), or --inference "
            "worker."
        )


def cpu_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("num_epochs", "num_minibatches", "is_clip"), (1, math.inf)),
    **dict.fromkeys(
        ("lr", "clip_coef", "ent_coef", "vf_coef", "target_kl", "max_grad_norm", "adam_eps"),
        (0, math.inf),
    ),
    **dict.fromkeys(("gamma", "gae_lambda"), (0, 1)),
    **dict.fromkeys(("rho_clip", "c_clip"), (0, math.inf)),
}


def _check_bounds(algo: Any) -> None:
    for name, bounds in _BOUNDS.items():
        if hasattr(algo, name) and not Between(*bounds).contain(getattr(algo, name)):
            raise ConfigError(f"{name}={getattr(algo, name)}: expected {Between(*bounds)}.")


def preset(env: str, algo: str) -> tuple[str, dict[str, Any]]:
    """The shipped preset's name and values for an environment; ("none", {}) if there is none.

    A table's name is an id, or a pattern of ids (`MiniGrid-*`); the id itself comes first.
    """
    found: tuple[str, dict[str, Any]] = "none", {}
    for file in sorted(resources.files("headrace.config").joinpath("presets").iterdir(), key=str):
        if file.name.endswith(".toml"):
            for pattern, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
                if pattern == env or (found[0] == "none" and fnmatchcase(env, pattern)):
                    values = dict(table)
                    per_algo = {name: values.pop(name, {}) for name in ALGOS}
                    found = (
                        file.name.removesuffix(".toml"),
                        rename_settings(values | per_algo[algo]),
                    )
                if pattern == env:
                    return found
    return found


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from None


def _part(group: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one group."""
    return {f.name: values[f.name] for f in fields(group) if f.name in values}


def _check_names(source: str, values: Mapping[str, Any], groups: tuple[type[Any], ...]) -> None:
    known = [f.name for group in groups for f in fields(group)]
    for name in values:
        if name not in known:
            raise ConfigError(f"Unknown setting {name!r} ({source}).{did_you_mean(name, known)}")


def given_for_resume(
    config: dict[str, Any], changed: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """All settings of a run as it was started, but for those that resume is to change; origins.

    Other learners have another share of the environments and workers: those are made to fit. A
    machine on its own need not have what machines of a cluster had to have.
    """
    given, origin = dict(config["settings"]), dict(config["origin"])
    given |= dict(changed)
    if given["num_learners"] == -1:
        given["num_learners"] = max(1, visible_gpus(given["device"]))
    origin |= dict.fromkeys(changed, "given to resume")
    left = without_cluster(changed.get("cluster"))
    given, origin = given | left, origin | dict.fromkeys(left, "default")
    share = given["num_envs"] // given["num_learners"]
    if "num_learners" in changed and share % given["envs_per_vector"]:
        given["envs_per_vector"] = largest_divisor(share, given["envs_per_vector"])
        origin["envs_per_vector"] = f"follows {given['num_learners']} learners"
    if "num_learners" in changed and given["num_workers"] % given["num_learners"]:
        of_each = max(1, given["num_workers"] // given["num_learners"])
        given["num_workers"] = given["num_learners"] * of_each
        origin["num_workers"] = f"follows {given['num_learners']} learners"
    # The number of environments is settled, and with it the learning rate.
    settled = {"num_envs_per_learner": 0, "lr_scale": "none"}
    return given | settled, origin | dict.fromkeys(settled, "default")


MAY_CHANGE = (
    "total_env_steps", "schedule_env_steps", "num_learners", "on_env_error", "on_worker_loss",
    "env_timeout_s", "max_worker_restarts", "cluster", "stop_after_s",
)  # fmt: skip
"""What may be another when a run goes on."""


def changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `given_for_resume` is to change: what was given, and may be; None is not given."""
    return {name: given[name] for name in MAY_CHANGE if given.get(name) is not None}
