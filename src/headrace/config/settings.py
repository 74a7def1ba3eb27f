"""The settings of a run, and where each comes from. Left out: reading (`resolve.py`)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from headrace.algos.base import Algorithm
from headrace.algos.schedules import schedules_of
from headrace.config.algorithms import ALGORITHMS, algorithm_name
from headrace.config.batches import minibatch_sizes
from headrace.config.checks import checked_values, part_of
from headrace.config.policies import policy_settings
from headrace.config.run_config import RunConfig
from headrace.models.policy import Network
from headrace.spec import Interface

SUGGESTED = ("default", "preset ")
"""How the sources of settings begin that nobody asked for ("default" also those of a kind)."""
FREE = (*SUGGESTED, "follows")
"""The same, and those that follow from others."""
EITHER = {"num_minibatches": "minibatch_size", "minibatch_size": "num_minibatches"}


@dataclass(frozen=True)
class Settings:
    """All settings of a run, and their sources.

    Attributes:
        algorithm: the algorithm that `run.algo` names.
        source: name -> `given` (by flag or keyword), `import` (of another library's model),
            `config FILE`, `auto-scale`, `preset NAME`, `defaults for KIND`, `default`, or the
            settings that it follows from.
        suggested_envs: number of environments of preset and defaults, whatever was asked for.
        num_inputs: numbers in an observation, if hidden layers alone see them; else 0.
    """

    run: RunConfig
    network: Network
    algo: Any
    source: dict[str, str]
    algorithm: Algorithm[Any]
    suggested_envs: int = 0
    num_inputs: int = 0

    def of(self, policy: str) -> "Settings":
        """Return the settings of one policy: `[policies.NAME]` may change some; or ConfigError."""
        changes = policy_settings(self.run.policies).get(policy, {})
        changes = checked_values(changes, (Network, type(self.algo)), f"policies.{policy}")
        network = replace(self.network, **part_of(Network, changes))
        algo = replace(self.algo, **part_of(type(self.algo), changes))
        if changes.keys() & EITHER.keys():
            size = changes.get("minibatch_size", 0)
            algo = replace(algo, **minibatch_sizes(self.run, network, algo.num_minibatches, size))
        source = self.source | dict.fromkeys(changes, "given")
        for name, schedule in schedules_of(algo).items():  # its own replace those of all
            is_points = not isinstance(getattr(algo, schedule), str)
            if is_points and name in changes and schedule not in changes:
                algo = replace(algo, **{schedule: "constant"})
            elif is_points and name not in changes:
                source[name] = f"replaced by {schedule}"
        return replace(self, network=network, algo=algo, source=source)

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

    def is_native(self, interface: Interface = "gym") -> bool:
        """Return whether the environment's own vector form is stepped."""
        run = self.run
        if run.vectorization == "auto" or (run.wrapper and self.source["vectorization"] != "given"):
            return is_usually_native(run.env, interface) and not run.wrapper
        return run.vectorization == "native"

    @property
    def may_be_recorded(self) -> bool:
        """Whether a gradient step that one GPU makes may be a CUDA graph.

        Else it waits for the device: with a recurrent core, and maybe in the code of others.
        """
        run, network = self.run, self.network
        plain = network.arithmetic == "plain" or network.core != "none"
        own = run.model or algorithm_name(type(self.algorithm)) not in ALGORITHMS
        # The learner's process acts on the device, too, where workers ask it for actions.
        other = run.compile or run.num_accumulation_steps > 1 or run.inference == "learner"
        return not (plain or own or other)

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


def is_usually_native(env: str, interface: Interface) -> bool:
    """Return whether environments of this name and interface are stepped as a vector of their own.

    That is where they are not wrapped, and the user did not ask for one or the other.
    """
    return env.startswith("ALE/") or interface in ("kernel", "tensor")


def rows_factor(run: RunConfig) -> int:
    """Return by what a minibatch_size is multiplied: it is of each learner, as environments are."""
    return run.num_learners if run.num_envs_per_learner else 1


def lr_factor(run: RunConfig) -> float:
    """Return by what `lr_scale` multiplies the learning rate."""
    scale = {"none": 1.0, "sqrt": math.sqrt(run.num_learners), "linear": float(run.num_learners)}
    return scale[run.lr_scale]
