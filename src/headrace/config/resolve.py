"""Reads settings from their sources.

Precedence: flags (or Python arguments), then the `--config` file, then `--auto-scale`, then the
preset, then the defaults for this kind of environment, then the class default. All settings of a
run share one flat name space. Left out: reading flags (`cli/flags.py`), what presets hold
(`presets.py`), and the settings that follow from others (`derive.py`).
"""

import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.algos.schedules import SCHEDULES, schedules_of
from headrace.catalog.families import advice_without_env
from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.config.checks import checked_values, largest_divisor, part_of, without_cluster
from headrace.config.derive import derive
from headrace.config.old_names import rename_settings, settings_of_file
from headrace.config.policies import merge_policies
from headrace.config.presets import defaults, preset
from headrace.config.run_config import AUTO_THREADS, AUTO_WORKERS, RunConfig
from headrace.config.settings import EITHER, FREE, SUGGESTED, Settings
from headrace.distributed.ranks import visible_gpus
from headrace.errors import ConfigError, flag
from headrace.machine.limits import cpu_cores
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Interface


@dataclass(frozen=True)
class ConfigFile:
    """What a `--config` file says, with today's names. It may be a pipe, which can be read once."""

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_pipe: bool = False


NO_FILE = ConfigFile()


def read_config_file(path: Path | None) -> ConfigFile:
    """Read a TOML file of settings; None: `NO_FILE`. Warn of a file without settings.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has a setting under two names.
    """
    if path is None:
        return NO_FILE
    try:
        is_pipe = path.is_fifo()
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} is not valid TOML: {error}.") from None
    if not settings:
        warnings.warn(f"The config file {path} has no settings.", stacklevel=2)
    return ConfigFile(str(path), settings_of_file(settings), is_pipe)


def resolve(
    explicit: Mapping[str, Any],
    config_file: ConfigFile = NO_FILE,
    *,
    interface: Interface = "gym",
    cores: int | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Settings:
    """Read settings and derive the others; arguments are those of `read_settings` and `derive`."""
    return derive(read_settings(explicit, config_file, measured), interface, cores)


def read_settings(
    explicit: Mapping[str, Any],
    config_file: ConfigFile = NO_FILE,
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
    from_file = config_file.settings
    env = explicit.get("env", from_file.get("env"))
    if not env:
        raise ConfigError(advice_without_env())
    algo = explicit.get("algo", from_file.get("algo", "ppo"))
    algorithm = load_algorithm(algo)
    preset_name, from_preset = preset(env, algo)
    kind, from_kind = "", dict[str, Any]()
    if spec is not None:
        core = {**from_preset, **from_file, **explicit}.get("core", "none")
        kind, from_kind = defaults(spec, algo, core)
    layers: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"defaults for {kind}", from_kind),
        (f"preset {preset_name}", from_preset),
        ("auto-scale", measured or {}),
        (f"config {config_file.name}", from_file),
        ("given", explicit),
    )
    classes: tuple[type[Any], ...] = (RunConfig, Network, algorithm.Config)
    values: dict[str, Any] = {}
    sources = {f.name: "default" for cls in classes for f in fields(cls)}
    suggested_envs = RunConfig().num_envs
    for source, layer in layers:
        checked = checked_values(layer, classes, source)
        for name in _replaced_by(checked, values):
            values.pop(name, None)
            sources[name] = "default"
        if source.startswith(SUGGESTED):
            suggested_envs = checked.get("num_envs", suggested_envs)
        is_word = checked.get("learner_threads") == AUTO_THREADS
        if is_word:  # that of the kind, if it has one
            checked["learner_threads"] = from_kind.get("learner_threads", AUTO_THREADS)
        layer_sources = dict.fromkeys(checked, source)
        if is_word and "learner_threads" in from_kind:
            layer_sources["learner_threads"] = f"defaults for {kind}"
        if "policies" in checked and values.get("policies"):
            checked["policies"] = merge_policies(values["policies"], checked["policies"])
            layer_sources["policies"] = f"{sources['policies']}, {source}"
        values |= checked
        sources |= layer_sources
    run, network, config = (cls(**part_of(cls, values)) for cls in classes)
    num_inputs = _num_inputs(spec, kind, algo, network.core) if spec else 0
    return Settings(run, network, config, sources, algorithm, suggested_envs, num_inputs)


def _replaced_by(layer: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the settings of lower layers that a layer replaces by another setting."""
    replaced = [other for name, other in EITHER.items() if name in layer]
    for name, schedule in SCHEDULES.items():
        if not isinstance(layer.get(schedule, ""), str):
            replaced.append(name)
        elif name in layer and not isinstance(values.get(schedule, ""), str):
            replaced.append(schedule)
    return replaced


def _num_inputs(spec: EnvSpec, kind: str, algo: str, core: str) -> int:
    """Return the numbers in an observation, if hidden layers alone see them; else 0."""
    if "images" in kind or algo not in ALGORITHMS or core != "none":
        return 0
    return sum(part.size for _, part in spec.seen.leaves)


def values_for_resume(
    config: dict[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all settings of config.json with some changed, and their sources.

    Another number of learners means another share of the environments and workers: those are made
    to fit. Workers whose number was found for a machine with other cores are found anew, since they
    change no bits. A run that leaves its cluster loses what the cluster's machines had to have.
    """
    values = config["settings"] | changes
    sources = dict.fromkeys(values, "") | config["origin"]  # a damaged file may lack some
    sources |= dict.fromkeys(changes, "given to resume")
    _replace_schedules(values, sources, changes)
    if values["num_learners"] == -1:
        values["num_learners"] = max(1, visible_gpus(values["device"]))
    if sources.get("num_learners", "").startswith("auto,") and "num_learners" not in changes:
        most = visible_gpus(values["device"]) or cpu_cores()
        learners = largest_divisor(values["num_envs"], min(values["num_learners"], most))
        if learners != values["num_learners"]:
            changes = {**changes, "num_learners": learners}
            values["num_learners"] = learners
    left = without_cluster(changes.get("cluster"))
    values, sources = values | left, sources | dict.fromkeys(left, "default")
    learners = values["num_learners"]
    share = values["num_envs"] // learners
    if "num_learners" in changes and share % values["envs_per_vector"]:
        values["envs_per_vector"] = largest_divisor(share, values["envs_per_vector"])
        sources["envs_per_vector"] = f"follows {learners} learners"
    each = -(-values["num_workers"] // learners)
    has_few = share // values["envs_per_vector"] < each
    if "num_workers" in changes and has_few and _is_free(sources["envs_per_vector"]):
        values["envs_per_vector"] = largest_divisor(share, max(1, share // each))
        workers = f"{values['num_workers']} workers"
        sources["envs_per_vector"] = f"follows {workers}, results differ by rounding"
    is_free = "num_learners" in changes and "num_workers" not in changes
    if is_free and 0 < values["num_workers"] < learners:
        values["num_workers"] = learners
        sources["num_workers"] = f"follows {learners} learners"
    asked, saved = values["num_workers"] == AUTO_WORKERS, config["settings"]["num_workers"]
    cores = config.get("cores", cpu_cores())
    follows_cores = sources["num_workers"].startswith(("auto,", "default,"))
    was_auto = follows_cores and not values["cluster"] and "num_workers" not in changes
    # No workers, or more than cores, were chosen for what a step costs; that is the same here.
    if asked and not 0 < saved <= cores:
        values["num_workers"] = saved
    elif asked or (was_auto and 0 < saved <= cores != cpu_cores()):
        vectors = values["num_envs"] // values["envs_per_vector"]
        values["num_workers"] = learners * max(1, min(cpu_cores(), vectors) // learners)
        sources["num_workers"] = f"auto, {cpu_cores()} cores"
    algorithm = ALGORITHMS.get(values["algo"])
    is_nonstop = algorithm is not None and algorithm.is_asynchronous(values["lag"])
    if values["num_workers"] == 0 and is_nonstop and _is_free(sources["lag"]):
        values["lag"], sources["lag"] = 0, "follows num_workers"
    if "total_env_steps" in changes and "schedule_env_steps" not in changes:
        sources["schedule_env_steps"] = "as the run began"
    # The number of environments is settled, and with it the learning rate.
    settled = {"num_envs_per_learner": 0, "lr_scale": "none"}
    return values | settled, sources | dict.fromkeys(settled, "default")


def _replace_schedules(
    values: dict[str, Any], sources: dict[str, str], changes: Mapping[str, Any]
) -> None:
    """Let points replace a value, and a value points; ConfigError if neither may change."""
    algorithm = ALGORITHMS.get(values["algo"])
    known = values if algorithm is None else schedules_of(algorithm.Config).values()
    for name, schedule in SCHEDULES.items():
        if name in changes and name in values and schedule not in known and name != "gamma":
            raise ConfigError(
                f"{name}={changes[name]}: a run of {values['algo']} keeps the {name} that it has.\n"
                f"Leave {flag(name)} out."
            )
        is_replaced = schedule in changes and sources.get(name) == f"replaced by {schedule}"
        if isinstance(values.get(schedule, ""), str):
            if is_replaced and name not in changes:
                raise ConfigError(
                    f"{schedule}={changes[schedule]!r}: so far points were all the values that "
                    f"{name} had.\nGive one beside it: {flag(name)} VALUE."
                )
        elif name in changes and schedule not in changes:
            values[schedule], sources[schedule] = "constant", f"replaced by {name}"
        elif name not in changes:
            values.pop(name, None)
            sources[name] = f"replaced by {schedule}"


def _is_free(source: str) -> bool:
    """Return whether nobody asked for a value of this source."""
    return source.startswith((*FREE, "auto,"))


MAY_CHANGE = (
    "total_env_steps", "schedule_env_steps", "num_workers", "num_learners", "on_env_error",
    "on_worker_loss", "env_timeout_s", "max_worker_restarts", "cluster", "stop_after_s",
    "checkpoint_every_s", "keep", "replay_dir", "data",
    *SCHEDULES, *SCHEDULES.values(),
)  # fmt: skip
"""The settings that resume may change."""
