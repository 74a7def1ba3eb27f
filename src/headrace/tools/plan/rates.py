"""The rates of one worker and one learner in a profile, and what many of them reach together.

`docs/plan.md` has the formulas.
"""

import json
import math
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from headrace.configclass import NonNegative, NonNegativeInt, PositiveInt, check_values
from headrace.errors import ConfigError
from headrace.tools.plan.machines import Positive

MAX_CORE_LOAD = 0.9
"""Workers that leave their core idle share it up to this load."""
MAX_WORKERS_PER_CORE = 8
"""A limit, because each worker also takes memory and time to switch."""


@dataclass(frozen=True)
class Rates:
    """Rates on the profiled machine.

    Attributes:
        worker_env_steps_per_s: rate of one worker that never waits for the learner.
        worker_cores: CPU cores that this worker keeps busy.
        learner_env_steps_per_s: rate of one learner that never waits for workers.
        learner_device: "cpu", or the name of a GPU.
        lag: 0: workers wait while the learner learns; otherwise both run at the same time.
        batch: env steps per update, over all learners.
        allreduce_s: additional time of an update with more than one learner.
        max_learners: learners beyond this number gain nothing; 0: no limit.
    """

    worker_env_steps_per_s: Positive
    worker_cores: NonNegative
    learner_env_steps_per_s: Positive
    learner_device: str
    lag: NonNegativeInt
    batch: PositiveInt
    env: str
    algo: str
    allreduce_s: NonNegative
    envs_per_worker: PositiveInt
    envs_per_vector: PositiveInt
    max_learners: NonNegativeInt = 0

    @classmethod
    def from_json(cls, profile: Any, place: str) -> "Rates":
        """Read the `rates` of a profile; ConfigError names it by `place`.

        Old profiles say "sampler" for worker.
        """
        rates = profile.get("rates", {}) if isinstance(profile, dict) else {}
        if rates is None:
            raise ConfigError(
                f"{place}: its environments are stepped where the learner is, so there are no "
                "workers to find machines for.\nTo find machines for a number of learners: "
                "headrace plan --need 'N gpus'"
            )
        rates = rates if isinstance(rates, dict) else {}
        rates = {name.replace("sampler_", "worker_"): v for name, v in rates.items()}
        rates = {field.name: rates[field.name] for field in fields(cls) if field.name in rates}
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in needed if name not in rates]:
            raise ConfigError(
                f"The rates in {place} lack {', '.join(missing)}: expected what `headrace profile "
                f"ENV --json` of this version prints.\nTo make it: headrace profile ENV --json > "
                f"{place}"
            )
        return cls(**check_values(cls, rates, f"rates in {place}"))

    @classmethod
    def read(cls, path: Path) -> "Rates":
        """Read the rates in a profile's file; ConfigError."""
        try:
            profile = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"--profile {path} cannot be read: {error.strerror}.\n"
                f"To make one: headrace profile ENV --json > {path}"
            ) from None
        except ValueError as error:
            raise ConfigError(f"--profile {path} is no JSON: {error}.") from None
        return cls.from_json(profile, str(path))

    @property
    def most_learners(self) -> float:
        """The number of learners beyond which more gain nothing."""
        return self.max_learners or math.inf

    @property
    def workers_per_core(self) -> float:
        """Number of workers that share a core; below 1 if one keeps more than a core busy."""
        if self.worker_cores > 1:
            return 1 / self.worker_cores
        load = max(self.worker_cores, MAX_CORE_LOAD / MAX_WORKERS_PER_CORE)
        return max(1, math.floor(MAX_CORE_LOAD / load + 1e-9))

    @property
    def core_env_steps_per_s(self) -> float:
        """Rate of the workers of one core."""
        return self.workers_per_core * self.worker_env_steps_per_s

    def allreduce_per_env_step(self, learners: float) -> float:
        """Return the seconds per env step that summing gradients takes."""
        return self.allreduce_s / self.batch if learners > 1 else 0.0

    def learning(self, alone: float, learners: float) -> float:
        """Return the rate of learners that would have the rate `alone` without all-reduce."""
        return 1 / (1 / alone + self.allreduce_per_env_step(learners)) if alone else 0.0

    def throughput(self, sampling: float, alone: float, learners: float) -> float:
        """Return the rate of training, from those of workers and of learners alone."""
        learning = self.learning(alone, learners)
        if self.lag:
            return min(sampling, learning)
        return 1 / (1 / sampling + 1 / learning) if sampling and learning else 0.0
