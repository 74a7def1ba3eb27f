"""The algorithms by name, and loading one that lies outside the package."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from headrace.algos import a2c, manual_gradient, ppo
from headrace.algos.a2c import A2CAlgorithm
from headrace.algos.action_values import dqn, dqn_manual_gradient
from headrace.algos.action_values.pqn import PQNAlgorithm
from headrace.algos.appo import APPOAlgorithm
from headrace.algos.base import Algorithm, AlgorithmConfig
from headrace.algos.critics import manual_gradient as of_critics
from headrace.algos.critics import manual_targets, sac, td3
from headrace.algos.critics.crossq import CrossQAlgorithm
from headrace.algos.critics.sac import DROQAlgorithm, REDQAlgorithm, SACAlgorithm, TQCAlgorithm
from headrace.algos.critics.shared import critics_loss
from headrace.algos.critics.td3 import DDPGAlgorithm, TD3Algorithm
from headrace.algos.impala import IMPALAAlgorithm
from headrace.algos.offline.bc import BCAlgorithm
from headrace.algos.offline.cql import CQLAlgorithm
from headrace.algos.offline.iql import IQLAlgorithm
from headrace.algos.offline.td3_bc import TD3BCAlgorithm
from headrace.errors import ConfigError, did_you_mean
from headrace.importing import load_callable
from headrace.models.fast_paths import FastPath

ALGORITHMS: dict[str, Algorithm[Any]] = {
    algorithm.name: algorithm
    for algorithm in (
        ppo.PPOAlgorithm(),
        A2CAlgorithm(),
        APPOAlgorithm(),
        IMPALAAlgorithm(),
        PQNAlgorithm(),
        dqn.DQNAlgorithm(),
        dqn.RainbowAlgorithm(),
        SACAlgorithm(),
        TQCAlgorithm(),
        REDQAlgorithm(),
        DROQAlgorithm(),
        CrossQAlgorithm(),
        TD3Algorithm(),
        DDPGAlgorithm(),
        BCAlgorithm(),
        TD3BCAlgorithm(),
        CQLAlgorithm(),
        IQLAlgorithm(),
    )
}
_Paths = list[tuple[Callable[..., Any], Callable[..., str], Callable[..., Any]]]
_GRADIENTS: _Paths = [
    (ppo.loss, manual_gradient.unsupported, manual_gradient.PPOGradient),
    (a2c.loss, manual_gradient.unsupported, manual_gradient.A2CGradient),
    (dqn.loss, dqn_manual_gradient.unsupported, dqn_manual_gradient.Gradient),
    (critics_loss, of_critics.unsupported, of_critics.CriticsGradient),
    (sac.actor_loss, of_critics.policy_unsupported, of_critics.SACGradient),
    (td3.actor_loss, of_critics.policy_unsupported, of_critics.TD3Gradient),
    (sac.temperature_loss, of_critics.temperature_unsupported, of_critics.TemperatureGradient),
]
_TARGETS: _Paths = [
    (sac.targets, manual_targets.unsupported, manual_targets.SACTargets),
    (td3.targets, manual_targets.unsupported, manual_targets.TD3Targets),
    (dqn.targets, dqn_manual_gradient.unsupported_targets, dqn_manual_gradient.Targets),
]


def _manual(paths: _Paths) -> list[FastPath]:
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-6}
    return [FastPath("manual", *path, tolerance) for path in paths]


GRADIENTS = _manual(_GRADIENTS)
"""Gradients that are written out, in place of autograd's of a loss."""
TARGETS = _manual(_TARGETS)
"""What computes the targets of a minibatch in place of the algorithm's own function."""

AlgorithmLike = str | type[Algorithm[Any]] | Algorithm[Any]
"""A name in `ALGORITHMS`, `module:Name`, or an algorithm itself."""


def load_algorithm(algorithm: AlgorithmLike) -> Algorithm[Any]:
    """Return an algorithm; `module:Name` is imported. ConfigError if it is none."""
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    loaded: Any = algorithm
    if isinstance(algorithm, str):
        if ":" not in algorithm:
            raise ConfigError(
                f"algo={algorithm!r}: expected one of {', '.join(ALGORITHMS)}, or module:Name for "
                f"one of your own.{did_you_mean(algorithm, list(ALGORITHMS))}"
            )
        # One of a script (`__main__`) cannot be imported by its name in another process.
        known = {algorithm_name(kind): kind for kind in _kinds()}
        loaded = known.get(algorithm) or load_callable(algorithm, ConfigError)
    if isinstance(loaded, type) and issubclass(loaded, Algorithm):
        if missing := sorted(loaded.__abstractmethods__):
            raise ConfigError(
                f"algo={algorithm!r}: the class has no {' and no '.join(missing)}. Expected both "
                "methods, losses and update.\nSee examples/own_algorithm.py."
            )
        loaded = loaded()
    if isinstance(loaded, type) and issubclass(loaded, AlgorithmConfig):
        raise ConfigError(
            f"algo={algorithm!r}: expected settings, and this is their class.\n"
            f"Did you mean {loaded.__name__}()?"
        )
    config = getattr(loaded, "Config", None)
    if not isinstance(loaded, Algorithm) or not (
        isinstance(config, type) and issubclass(config, AlgorithmConfig)
    ):
        raise ConfigError(
            f"algo={algorithm!r}: expected a class derived from headrace.algos.base.Algorithm, "
            "whose Config is a @configclass derived from AlgorithmConfig.\n"
            "See examples/own_algorithm.py."
        )
    return loaded


def algorithms_with(setting: str) -> list[str]:
    """Return the names of the algorithms whose own settings include this one."""
    return [
        name
        for name, algorithm in ALGORITHMS.items()
        if setting in {f.name for f in fields(algorithm.Config)}
    ]


def algorithm_name(kind: type[Algorithm[Any]]) -> str:
    """Return the value of the setting `algo`: a name in `ALGORITHMS`, or `module:Name`."""
    for name, known in ALGORITHMS.items():
        if type(known) is kind:
            return name
    return f"{kind.__module__}:{kind.__qualname__}"


def name_of_config(config: Any) -> str | None:
    """Return the name of the algorithm whose settings `config` is; None if there is none."""
    for kind in _kinds():
        if vars(kind).get("Config") is type(config):
            return algorithm_name(kind)
    return None


def _kinds() -> list[type[Algorithm[Any]]]:
    kinds = list(Algorithm.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
    return kinds
