"""What a profile says: where a run's time goes, what limits it, and what to change.

Left out: making one (`profiler.py`), and telling it (`told.py`).
"""

from dataclasses import dataclass
from typing import Any

import headrace
from headrace.config.resolve import Settings, cpu_cores
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import lock_step_s
from headrace.meter import Laps
from headrace.tools.profile.advice import Change


@dataclass(frozen=True)
class Profile:
    """What came out.

    Attributes:
        settings: of the run.
        costs: of its parts, measured apart.
        env_steps_per_s: of the run; None: it had fewer than two updates.
        seconds: by process and span; `wait` of samplers in two parts (`shares.py`).
        tracks: what each process did when.
        ceilings: env steps/s of environments alone, inference alone, one learner alone (of all
            learners), and of the three together.
        predicted: env steps/s, from `costs`.
        gains: see `limits.gains`.
        changes: what would help most.
        is_whole: environments have a vector of their own, which steps many at a time.
        rates: what `headrace plan` needs; None: environments are stepped where the learner is.
    """

    settings: Settings
    costs: Costs
    env_steps_per_s: float | None
    seconds: dict[str, dict[str, float]]
    tracks: dict[str, Laps]
    ceilings: dict[str, float]
    predicted: float
    gains: dict[str, float]
    changes: list[Change]
    is_whole: bool
    rates: dict[str, Any] | None

    @property
    def of_limit(self) -> float | None:
        """Share of the ceilings' limit that the run reached."""
        rate = self.env_steps_per_s
        return None if rate is None else rate / self.ceilings["together"]

    @property
    def lock_step(self) -> float | None:
        """Env steps/s if each step waited for the slowest of all environments; None: `is_whole`."""
        if self.is_whole:
            return None
        num_envs = self.settings.run.num_envs
        return num_envs / lock_step_s(self.costs, num_envs)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `headrace plan` and others go on."""
        step, reset = self.costs.step, self.costs.reset
        return {
            "headrace": headrace.__version__,
            "settings": self.settings.flat(),
            "cores": cpu_cores(),
            "env_steps_per_s": self.env_steps_per_s,
            "seconds": self.seconds,
            "times": {
                name: {
                    "mean_s": of.mean,
                    "p50_s": of.percentile(0.5),
                    "p99_s": of.percentile(0.99),
                    "max_s": of.max,
                    "tail_weight": of.tail_weight,
                }
                for name, of in (("step", step), ("reset", reset))
            },
            "lock_step_env_steps_per_s": self.lock_step,
            "ceilings": self.ceilings,
            "of_limit": self.of_limit,
            "predicted_env_steps_per_s": self.predicted,
            "gains": self.gains,
            "changes": [{"settings": c.settings, "gain": c.gain} for c in self.changes],
            "rates": self.rates,
            "costs": self.costs.to_json(),
        }
