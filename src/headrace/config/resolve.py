"""Reads settings from their sources, derives the others, and checks that all fit together.

Precedence: flags (or Python arguments), then the `--config` file, then the preset, then the
defaults for this kind of environment, then the class default. All settings of a run share one flat
name space. Left out: reading flags (`commands.py`), and what presets hold (`presets.py`).
"""

import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headrace.algos.base import Algorithm
from headrace.algos.ppo import PPO
from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.config.batches import fitting_minibatches, fitting_steps
from headrace.config.checks import (
    check_cluster,
    check_divisibility,
    check_guards,
    largest_divisor,
    without_cluster,
)
from headrace.config.old_names import PEER_NAMES, rename_settings
from headrace.config.policies import merge_policies, policy_settings
from headrace.config.presets import defaults, preset
from headrace.config.run_config import RunConfig
from headrace.configclass import check_values
from headrace.distributed.ranks import visible_gpus
from headrace.errors import ConfigError, did_you_mean
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Kind

_SUGGESTED = ("default", "preset ")
"""How the sources of settings begin that nobody asked for ("default" also those of a kind)."""
_FREE = (*_SUGGESTED, "follows")
"""The same, and those that follow from others."""
_EITHER = {"num_minibatches": "minibatch_size", "minibatch_size": "num_minibatches"}


@dataclass(frozen=True)
class Settings:
    """All settings of a run, and their sources.

    Attributes:
        algorithm: the algorithm that `run.algo` names.
        source: name -> `given` (by flag or keyword), `config FILE`, `auto-scale`, `preset NAME`,
            `defaults for KIND`, `default`, or the settings that it follows from.
        suggested_envs: number of environments of preset and defaults, whatever was asked for.
    """

    run: RunConfig
    network: Network
    algo: Any
    source: dict[str, str]
    algorithm: Algorithm[Any]
    suggested_envs: int = 0

    def of(self, policy: str) -> "Settings":
        """Return the settings of one policy: `[policies.NAME]` may change some; or ConfigError."""
        changes = policy_settings(self.run.policies).get(policy, {})
        changes = _checked(changes, (Network, type(self.algo)), f"policies.{policy}")
        network = replace(self.network, **_part(Network, changes))
        algo = replace(self.algo, **_part(type(self.algo), changes))
        if "lr" in changes:
            algo = replace(algo, lr=algo.lr * _lr_factor(self.run))
        if changes.keys() & _EITHER.keys():
            changed = dict.fromkeys(changes, "given")
            own = replace(self, network=network, algo=algo, source=self.source | changed)
            algo = replace(algo, **_minibatches(own, changes.get("minibatch_size", 0)))
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
        return replace(self, run=replace(self.run, **values), source=self._sources(source, values))

    def follow_algo(self, source: str, **values: Any) -> "Settings":
        """Return the settings with some of the algorithm replaced, as `follow` does."""
        return replace(
            self, algo=replace(self.algo, **values), source=self._sources(source, values)
        )

    def _sources(self, source: str, names: Iterable[str]) -> dict[str, str]:
        added = source.startswith("+")
        return self.source | {n: self.source[n] + source[1:] if added else source for n in names}


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
    spec: EnvSpec | None = None,
) -> Settings:
    """Return the settings of flags, file, preset and defaults, before any is derived.

    Args:
        measured: sizes that `headrace autoscale` measured, used where no size is set.
        spec: of the environment, for the defaults of its kind; None: without these.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of bounds.
    """
    explicit = rename_settings(explicit)
    from_file = rename_settings(_read_toml(config_file)) if config_file else {}
    env = explicit.get("env", from_file.get("env"))
    if not env:
        raise ConfigError(
            "No environment was given; it comes first, before flags that take several values.\n"
            "Example: headrace train CartPole-v1"
        )
    algo = explicit.get("algo", from_file.get("algo", "ppo"))
    algorithm = load_algorithm(algo)
    preset_name, from_preset = preset(env, algo)
    kind, from_kind = "", dict[str, Any]()
    if spec is not None:
        core = (from_preset | from_file | explicit).get("core", "none")
        kind, from_kind = defaults(spec, algo, core)
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"defaults for {kind}", from_kind),
        (f"preset {preset_name}", from_preset),
        ("auto-scale", measured or {}),
        (f"config {config_file}", from_file),
        ("given", explicit),
    )
    classes: tuple[type[Any], ...] = (RunConfig, Network, algorithm.Config)
    values: dict[str, Any] = {}
    sources = {f.name: "default" for cls in classes for f in fields(cls)}
    suggested_envs = RunConfig().num_envs
    for source, layer in layers:
        checked = _checked(layer, classes, source)
        for name, other in _EITHER.items():  # what a later layer says replaces both
            if name in checked:
                values.pop(other, None)
                sources[other] = "default"
        if source.startswith(_SUGGESTED):
            suggested_envs = checked.get("num_envs", suggested_envs)
        layer_sources = dict.fromkeys(checked, source)
        if "policies" in checked and values.get("policies"):
            checked["policies"] = merge_policies(values["policies"], checked["policies"])
            layer_sources["policies"] = f"{sources['policies']}, {source}"
        values |= checked
        sources |= layer_sources
    run, network, config = (cls(**_part(cls, values)) for cls in classes)
    return Settings(run, network, config, sources, algorithm, suggested_envs)


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
    settings = _derive_minibatches(_derive_steps(_derive_learners(settings)))
    settings = _derive_vectors(settings, kind, cores)
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


def _derive_steps(settings: Settings) -> Settings:
    """Keep the rows of a batch and of a minibatch, where only the number of envs was asked for."""
    run, source, algo = settings.run, settings.source, settings.algo
    envs = settings.suggested_envs
    is_asked = not source["num_envs"].startswith(_FREE)
    if run.num_envs == envs or not is_asked or not source["num_steps"].startswith(_SUGGESTED):
        return settings
    batch = envs * run.num_steps
    in_minibatch = 1  # env steps of each environment
    if isinstance(algo, PPO):
        size = algo.minibatch_size or batch // algo.num_minibatches
        if settings.network.core == "none":
            in_minibatch = max(1, round(size / run.num_envs))
        if not algo.minibatch_size and source["num_minibatches"].startswith(_SUGGESTED):
            rows = f"follows num_envs, {size} rows as before"
            settings = settings.follow_algo(rows, minibatch_size=size)
    steps = fitting_steps(run.num_envs, batch, run.num_steps, in_minibatch)
    rows = steps * run.num_envs
    words = f"a batch of {rows:,} rows" + ("" if rows == batch else f" in place of {batch:,}")
    return settings.follow(f"follows num_envs, {words}", num_steps=steps)


def _derive_minibatches(settings: Settings) -> Settings:
    """Make number and size of minibatches agree."""
    algo, source = settings.algo, settings.source
    if not isinstance(algo, PPO):
        return settings
    scale = settings.run.num_learners if settings.run.num_envs_per_learner else 1
    values = _minibatches(settings, algo.minibatch_size * scale)
    pair = "num_minibatches", "minibatch_size"
    if algo.minibatch_size and all(not source[name].startswith(_FREE) for name in pair):
        if values["num_minibatches"] != algo.num_minibatches:
            raise ConfigError(
                f"num_minibatches={algo.num_minibatches} and minibatch_size={algo.minibatch_size}, "
                f"of {settings.run.num_envs * settings.run.num_steps} rows: expected one of the "
                "two.\nLeave one out."
            )
        return settings
    given, follows = pair[::-1] if algo.minibatch_size else pair
    settings = settings.follow_algo(f"follows {given}", **{follows: values[follows]})
    if values[given] != getattr(algo, given):
        words = f"+, {getattr(algo, given)} fitted to the batch"
        settings = settings.follow_algo(words, **{given: values[given]})
    return settings


def _minibatches(settings: Settings, size: int) -> dict[str, int]:
    """Return number and size of minibatches; a size of 0 follows from the number."""
    run, algo, source = settings.run, settings.algo, settings.source
    whole, rows_each = run.num_steps, run.num_envs
    if settings.network.core != "none":
        whole, rows_each = rows_each, whole
    count = algo.num_minibatches
    if size:
        count = fitting_minibatches(whole, rows_each, size)
    elif source["num_minibatches"].startswith(_FREE):
        count = largest_divisor(whole, count)
    return {"num_minibatches": count, "minibatch_size": whole * rows_each // count}


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
