"""Reads settings from their sources, derives the others, and checks that all fit together.

Precedence: flags (or Python arguments), then the `--config` file, then the preset, then the class
default. All settings of a run share one flat name space. Left out: reading flags (`commands.py`).
"""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headrace.algos.base import Algorithm
from headrace.catalog.families import advice_without_env
from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.config.checks import (
    check_cluster,
    check_divisibility,
    check_guards,
    largest_divisor,
    without_cluster,
)
from headrace.config.old_names import PEER_NAMES, rename_settings
from headrace.config.policies import merge_policies, policy_settings
from headrace.config.preset_tables import preset_table
from headrace.config.run_config import RunConfig
from headrace.configclass import check_values
from headrace.distributed.ranks import visible_gpus
from headrace.errors import ConfigError, did_you_mean
from headrace.models.policy import Network
from headrace.spec import Kind


@dataclass(frozen=True)
class Settings:
    """All settings of a run, and their sources.

    Attributes:
        algorithm: the algorithm that `run.algo` names.
        source: name -> `given` (by flag or keyword), `config FILE`, `auto-scale`, `preset NAME`,
            `default`, or the settings that it follows from.
    """

    run: RunConfig
    network: Network
    algo: Any
    source: dict[str, str]
    algorithm: Algorithm[Any]

    def of(self, policy: str) -> "Settings":
        """Return the settings of one policy: `[policies.NAME]` may change some; or ConfigError."""
        changes = policy_settings(self.run.policies).get(policy, {})
        changes = _checked(changes, (Network, type(self.algo)), f"policies.{policy}")
        network = replace(self.network, **_part(Network, changes))
        algo = replace(self.algo, **_part(type(self.algo), changes))
        if "lr" in changes:
            algo = replace(algo, lr=algo.lr * _lr_factor(self.run))
        return replace(self, network=network, algo=algo)

    def ended_schedules(self) -> list[str]:
        """Return which schedules will have fallen to 0 before the run ends."""
        ends_early = self.run.total_env_steps > self.run.schedule_env_steps
        names = [f.name for f in fields(self.algo) if f.name.endswith("_schedule")]
        return [n for n in names if ends_early and getattr(self.algo, n) == "linear"]

    def flat(self) -> dict[str, Any]:
        """Return name -> value of all settings, as plain data."""
        return {
            f.name: getattr(config, f.name)
            for config in (self.run, self.network, self.algo)
            for f in fields(config)
        }

    def is_native(self, kind: Kind = "gym") -> bool:
        """Return whether the environment's own vector form is stepped."""
        run = self.run
        if run.vectorization == "auto" or (run.wrapper and self.source["vectorization"] != "given"):
            return not run.wrapper and (run.env.startswith("ALE/") or kind in ("kernel", "tensor"))
        return run.vectorization == "native"

    def follow(self, source: str, **values: Any) -> "Settings":
        """Return the settings with some of the run replaced; a `source` of +... is added."""
        sources = {
            name: self.source[name] + source[1:] if source.startswith("+") else source
            for name in values
        }
        return replace(self, run=replace(self.run, **values), source=self.source | sources)


def resolve(
    explicit: Mapping[str, Any],
    config_file: Path | None = None,
    *,
    kind: Kind = "gym",
    cores: int | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Settings:
    """Read settings and derive the others; arguments are those of `read_settings` and `derive`."""
    return derive(read_settings(explicit, config_file, measured), kind, cores)


def read_settings(
    explicit: Mapping[str, Any],
    config_file: Path | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of flags, file, preset and defaults, before any is derived.

    Args:
        measured: sizes that `headrace autoscale` measured, used where no size is set.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of bounds.
    """
    explicit = rename_settings(explicit)
    from_file = rename_settings(_read_toml(config_file)) if config_file else {}
    env = explicit.get("env", from_file.get("env"))
    if not env:
        raise ConfigError(advice_without_env())
    algo = explicit.get("algo", from_file.get("algo", "ppo"))
    algorithm = load_algorithm(algo)
    preset_name, from_preset = preset(env, algo)
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"preset {preset_name}", from_preset),
        ("auto-scale", measured or {}),
        (f"config {config_file}", from_file),
        ("given", explicit),
    )
    classes: tuple[type[Any], ...] = (RunConfig, Network, algorithm.Config)
    values: dict[str, Any] = {}
    sources = {f.name: "default" for cls in classes for f in fields(cls)}
    for source, layer in layers:
        checked = _checked(layer, classes, source)
        layer_sources = dict.fromkeys(checked, source)
        if "policies" in checked and values.get("policies"):
            checked["policies"] = merge_policies(values["policies"], checked["policies"])
            layer_sources["policies"] = f"{sources['policies']}, {source}"
        values |= checked
        sources |= layer_sources
    run, network, config = (cls(**_part(cls, values)) for cls in classes)
    return Settings(run, network, config, sources, algorithm)


def derive(settings: Settings, kind: Kind = "gym", cores: int | None = None) -> Settings:
    """Return the settings with those that follow from others, or raise ConfigError.

    Args:
        cores: CPU cores for workers; default: those of this process. On a cluster, at least one
            for each worker that was asked for.
    """
    cores = cores or cpu_cores()
    if settings.run.cluster:
        cores = max(cores, settings.run.num_workers)
    if not settings.run.schedule_env_steps:
        total = settings.run.total_env_steps
        settings = settings.follow("follows total_env_steps", schedule_env_steps=total)
    if not settings.run.learner_threads:
        settings = settings.follow(f"follows {cpu_cores()} cores", learner_threads=cpu_cores())
    settings = _derive_vectors(_derive_learners(settings), kind, cores)
    if settings.run.lag == -1:
        corrected = settings.algorithm.data == "lag_corrected" and settings.run.num_workers
        settings = settings.follow("follows algo and num_workers", lag=2 if corrected else 0)
    run = settings.run
    check_guards(run)
    _check_workers(run, settings.algorithm)
    check_cluster(run)
    for each in (settings, *map(settings.of, policy_settings(run.policies))):
        check_divisibility(run, each.network, each.algo, settings.algorithm)
    return settings


def _derive_learners(settings: Settings) -> Settings:
    run = settings.run
    if run.num_learners == -1:
        if run.cluster:
            raise ConfigError(
                "num_learners=-1 (auto) counts the GPUs of this machine, and on a cluster learners "
                f"are on others (cluster={run.cluster!r}).\nUse --num-learners N."
            )
        gpus = visible_gpus(run.device)
        source = f"+, follows {gpus or 'no'} GPUs"
        settings = settings.follow(source, num_learners=max(1, gpus))
    learners = settings.run.num_learners
    if run.num_envs_per_learner:
        if settings.source["num_envs"] == "given":
            raise ConfigError(
                f"num_envs={run.num_envs} and num_envs_per_learner={run.num_envs_per_learner}: "
                "expected one of the two.\nLeave one out."
            )
        source = f"follows num_envs_per_learner, {learners} learners"
        settings = settings.follow(source, num_envs=run.num_envs_per_learner * learners)
    if (factor := _lr_factor(settings.run)) != 1:
        lr = settings.algo.lr
        source = (
            f"{settings.source['lr']} {lr:g} x {factor:g} ({run.lr_scale}, {learners} learners)"
        )
        algo = replace(settings.algo, lr=lr * factor)
        settings = replace(settings, algo=algo, source=settings.source | {"lr": source})
    return settings


def _lr_factor(run: RunConfig) -> float:
    scale = {"none": 1.0, "sqrt": math.sqrt(run.num_learners), "linear": float(run.num_learners)}
    return scale[run.lr_scale]


def _derive_vectors(settings: Settings, kind: Kind, cores: int) -> Settings:
    form = "native" if settings.is_native(kind) else "python"
    if form != settings.run.vectorization:
        settings = settings.follow("follows env and wrapper", vectorization=form)
    if settings.run.cluster and settings.source["num_workers"] == "default" and kind == "gym":
        settings = settings.follow("follows cluster", num_workers=-1)
    run = settings.run
    # A vector of either has threads of its own, or cannot have any.
    whole = kind in ("tensor", "parallel") or (
        form == "native" and not (run.cluster and run.num_workers)
    )
    learners, size = run.num_learners, run.envs_per_vector
    share, of_cores = run.num_envs // learners, max(1, cores // learners)
    workers = of_cores if run.num_workers == -1 else max(1, run.num_workers // learners)
    # Where the learner acts, one vector of a worker is stepped while another one waits.
    vectors_each = 2 if run.inference == "learner" else 1
    is_preset = settings.source["envs_per_vector"].startswith("preset")
    source = ""
    if vectors_each > 1 and (not size or (is_preset and share // size < vectors_each * workers)):
        size = largest_divisor(share, max(1, share // (vectors_each * workers)))
        source = f"follows num_envs, for {vectors_each} vectors of each worker"
    elif not size:
        size = largest_divisor(share, max(1, share // (1 if whole else of_cores)))
        source = "follows num_envs" + ("" if whole else f" / {cores} cores")
    elif learners > 1 and share % size and is_preset:
        size = largest_divisor(share, size)
        source = f"+, to fit {share} envs of each learner"
    if source:
        settings = settings.follow(source, envs_per_vector=size)
    if run.num_workers == -1:
        workers = learners * max(1, min(workers, share // size))
        settings = settings.follow(f"+, {cores} cores", num_workers=workers)
    return settings


def _check_workers(run: RunConfig, algorithm: Algorithm[Any]) -> None:
    if run.lag > 1 and not algorithm.accepts_any_lag:
        able = " or ".join(name for name, other in ALGORITHMS.items() if other.accepts_any_lag)
        raise ConfigError(
            f"lag={run.lag}, but {run.algo} does not correct for what older weights did: expected "
            f"0 or 1.\nUse --lag 1, or --algo {able}."
        )
    if run.lag and algorithm.accepts_any_lag and not run.num_workers:
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
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def preset(env: str, algo: str) -> tuple[str, dict[str, Any]]:
    """Return an environment's shipped preset: its name and values; ("none", {}) without one."""
    name, table = preset_table(env)
    # A table has settings of PPO; another algorithm takes those that it has as well.
    groups = [RunConfig, Network] + ([ALGORITHMS[algo].Config] if algo in ALGORITHMS else [])
    values = {key: value for group in groups for key, value in _part(group, table).items()}
    return name, values | table.get(algo, {})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from None


def _part(group: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(group) if f.name in values}


def _checked(
    values: Mapping[str, Any], groups: tuple[type[Any], ...], source: str
) -> dict[str, Any]:
    known = [f.name for group in groups for f in fields(group)]
    for name in values:
        if name not in known:
            hint = did_you_mean(PEER_NAMES.get(name, name), known)
            if isinstance(values[name], dict):
                hint = f"\nSettings are flat: leave the section [{name}] out."
            raise ConfigError(f"Unknown setting {name!r} ({source}).{hint}")
    checked: dict[str, Any] = {}
    for group in groups:
        checked |= check_values(group, _part(group, values), source)
    return checked


def values_for_resume(
    config: dict[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all settings of config.json with some changed, and their sources.

    Another number of learners means another share of the environments and workers: those are made
    to fit. A run that leaves its cluster loses what the cluster's machines had to have.
    """
    values, sources = config["settings"] | changes, dict(config["origin"])
    sources |= dict.fromkeys(changes, "given to resume")
    if values["num_learners"] == -1:
        values["num_learners"] = max(1, visible_gpus(values["device"]))
    left = without_cluster(changes.get("cluster"))
    values, sources = values | left, sources | dict.fromkeys(left, "default")
    learners = values["num_learners"]
    share = values["num_envs"] // learners
    if "num_learners" in changes and share % values["envs_per_vector"]:
        values["envs_per_vector"] = largest_divisor(share, values["envs_per_vector"])
        sources["envs_per_vector"] = f"follows {learners} learners"
    if "num_learners" in changes and values["num_workers"] % learners:
        values["num_workers"] = learners * max(1, values["num_workers"] // learners)
        sources["num_workers"] = f"follows {learners} learners"
    # The number of environments is settled, and with it the learning rate.
    settled = {"num_envs_per_learner": 0, "lr_scale": "none"}
    return values | settled, sources | dict.fromkeys(settled, "default")


MAY_CHANGE = (
    "total_env_steps", "schedule_env_steps", "num_learners", "on_env_error", "on_worker_loss",
    "env_timeout_s", "max_worker_restarts", "cluster", "stop_after_s",
)  # fmt: skip
"""The settings that resume may change."""
