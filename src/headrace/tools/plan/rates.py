"""What a profile says of one sampler and one learner, and what many of them reach together.

With S env steps/s of all samplers and L of all learners, each as if it never waited:

- lag 0: samplers wait while learners learn, 1 / throughput = 1 / S + 1 / L;
- otherwise both go on at once: throughput = min(S, L).

More than one learner pay for the sum of their gradients: an update takes `allreduce_s` longer.
Left out: measuring (`headrace profile`), networks between machines, time to start.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

KEPT_BUSY = 0.9
"""Samplers that wait for something else than their core share it until it is this busy."""
MOST_PER_CORE = 8
"""And so many at most: each also takes memory, and time to switch."""


@dataclass(frozen=True)
class Rates:
    """What was measured on the profiled machine.

    Fields:
        sampler_env_steps_per_s: of one sampler process that never waits for the learner.
        sampler_cores: CPU cores that it keeps busy meanwhile.
        learner_env_steps_per_s: what one learner takes in that never waits for samplers.
        learner_device: "cpu", or the name of a GPU.
        lag: 0: samplers wait while the learner learns; otherwise both go on at once.
        batch: env steps per update, over all learners.
        env, algo: what was run.
        allreduce_s: what an update takes longer with more than one learner.
        envs_per_worker, envs_per_vector: of each sampler.
    """

    sampler_env_steps_per_s: float
    sampler_cores: float
    learner_env_steps_per_s: float
    learner_device: str
    lag: int
    batch: int
    env: str
    algo: str
    allreduce_s: float
    envs_per_worker: int
    envs_per_vector: int

    @classmethod
    def from_json(cls, profile: Mapping[str, Any], where: str) -> "Rates":
        """The `rates` of a profile; `where` names it in errors. Raises: ConfigError."""
        given = profile.get("rates") if isinstance(profile, Mapping) else None
        if given is None and isinstance(profile, Mapping) and "rates" in profile:
            raise ConfigError(
                f"{where}: its environments are stepped where the learner is, so there are no "
                "samplers to find machines for.\nTo find machines for a number of learners: "
                "headrace plan --need 'N gpus'"
            )
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{where} has no `rates`: expected what `headrace profile ENV --json` prints.\n"
                f"To make it: headrace profile ENV --json > {where}"
            )
        names = {f.name: f.type for f in fields(cls)}
        if missing := [name for name in names if name not in given]:
            raise ConfigError(
                f"The rates in {where} lack {', '.join(missing)}: they are of another version of "
                "Headrace, or incomplete.\nMake the profile again: headrace profile ENV --json"
            )
        return cls(**{name: _checked(name, of, given[name], where) for name, of in names.items()})

    @classmethod
    def read(cls, path: Path) -> "Rates":
        """The rates in a profile's file. Raises: ConfigError."""
        try:
            return cls.from_json(json.loads(path.read_text()), str(path))
        except OSError as error:
            raise ConfigError(
                f"--profile {path} cannot be read: {error.strerror}.\n"
                f"To make one: headrace profile ENV --json > {path}"
            ) from None
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"--profile {path} is no JSON: {error}.") from None

    @property
    def samplers_per_core(self) -> float:
        """How many share a core; below 1, if one keeps more than a core busy."""
        if self.sampler_cores > 1:
            return 1 / self.sampler_cores
        room = math.floor(KEPT_BUSY / max(self.sampler_cores, KEPT_BUSY / MOST_PER_CORE) + 1e-9)
        return max(1, room)

    @property
    def core_env_steps_per_s(self) -> float:
        """What samplers on one core make."""
        return self.samplers_per_core * self.sampler_env_steps_per_s

    def allreduce_per_env_step(self, learners: float) -> float:
        """Seconds."""
        return self.allreduce_s / self.batch if learners > 1 else 0.0

    def learning(self, alone: float, learners: float) -> float:
        """Env steps/s of learners that would take in `alone` with no sum of gradients."""
        return 1 / (1 / alone + self.allreduce_per_env_step(learners)) if alone else 0.0

    def throughput(self, sampling: float, alone: float, learners: float) -> float:
        """Env steps/s of training, from those of samplers and of learners alone."""
        learning = self.learning(alone, learners)
        if self.lag:
            return min(sampling, learning)
        return 1 / (1 / sampling + 1 / learning) if sampling and learning else 0.0


_WORDS = {"float": "a number", "int": "a whole number", "str": "text"}
_MAY_BE_0 = ("sampler_cores", "lag", "allreduce_s")


def _checked(name: str, of: Any, value: Any, where: str) -> Any:
    """The value, of its type and range; ConfigError."""
    of = of if isinstance(of, str) else of.__name__
    wanted: Any = {"float": (int, float), "int": int, "str": str}[of]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ConfigError(f"rates.{name} in {where} is {value!r}: expected {_WORDS[of]}.")
    if of == "str":
        return value
    if not 0 <= value < math.inf or (not value and name not in _MAY_BE_0):
        least = "0 or more" if name in _MAY_BE_0 else "above 0"
        raise ConfigError(f"rates.{name} in {where} is {value:g}: expected {_WORDS[of]}, {least}.")
    return float(value) if of == "float" else value
