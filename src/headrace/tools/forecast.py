"""`headrace simulate`: other numbers of samplers, learners and machines, from a profile's parts.

Left out: the model (`model.py`), what machines cost (`planner.py`).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config.algorithms import ALGORITHMS
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, gains, simulate
from headrace.errors import ConfigError

_MANY = 500  # workers from which fewer updates are enough: each has many fragments
_MOST_WORKERS, _MOST_LEARNERS = 10_000, 1_024


@dataclass(frozen=True)
class Forecast:
    """One of them.

    Attributes:
        num_workers, num_learners: how many.
        batch: env steps of an update.
        env_steps_per_s: predicted.
        limit: see `limits.gains`.
        gain: times as fast, if that cost nothing.
    """

    num_workers: int
    num_learners: int
    batch: int
    env_steps_per_s: float
    limit: str
    gain: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Profiled:
    """What a profile's file holds of this.

    Attributes:
        costs: of the parts.
        num_steps: T.
        envs_per_vector: n.
        vectors_per_worker: of each.
        batch: env steps of an update.
        lag: of the run.
        asynchronous: see `Plan.asynchronous`.
    """

    costs: Costs
    num_steps: int
    envs_per_vector: int
    vectors_per_worker: int
    batch: int
    lag: int
    asynchronous: bool

    @classmethod
    def read(cls, path: Path) -> "Profiled":
        """From what `headrace profile --json` printed; ConfigError if it is not that."""
        try:
            profile = json.loads(path.read_text())
            run = profile["settings"]
            n, workers = int(run["envs_per_vector"]), max(1, int(run["num_workers"]))
            lag = int(run["lag"])
            return cls(
                Costs.from_json(profile["costs"]),
                int(run["num_steps"]),
                n,
                max(1, int(run["num_envs"]) // n // workers),
                int(run["num_envs"]) * int(run["num_steps"]),
                lag,
                lag > 0 and ALGORITHMS[run["algo"]].accepts_any_lag,
            )
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{path} is no profile: {error!r}.\n"
                "Expected a file with what this prints: headrace profile ENV --json"
            ) from None

    def topology(
        self,
        num_workers: int,
        num_learners: int,
        *,
        batch_size: int = 0,
        cores_per_machine: int = 0,
        learners_apart: bool = False,
    ) -> Topology:
        """That many, each worker with as many environments as in the profile.

        Args:
            num_workers: in all, each with a core of its own where machines are not given.
            num_learners: in all.
            batch_size: env steps of an update; 0: fragments are as long as in the profile.
            cores_per_machine: machines have one worker for each of these.
            learners_apart: they are on machines of their own.

        Raises:
            ConfigError: workers cannot be shared out among learners.
        """
        if num_workers % num_learners:
            raise ConfigError(
                f"num_workers={num_workers} cannot be shared out among {num_learners} learners.\n"
                "Give multiples."
            )
        n = self.envs_per_vector
        num_envs = n * self.vectors_per_worker * num_workers
        machines = math.ceil(num_workers / cores_per_machine) if cores_per_machine else 1
        return Topology(
            num_envs=num_envs,
            num_steps=max(1, round(batch_size / num_envs)) if batch_size else self.num_steps,
            envs_per_vector=n,
            num_workers=num_workers,
            num_learners=num_learners,
            lag=self.lag,
            asynchronous=self.asynchronous,
            cores=cores_per_machine,
            machines=machines,
            learners_apart=learners_apart,
        )


def forecasts(
    profiled: Profiled, num_workers: Sequence[int], num_learners: Sequence[int], **how: Any
) -> Iterator[Forecast]:
    """Predict each combination; see `Profiled.topology` for the rest.

    Raises:
        ConfigError: a number is out of range, or no number of workers can be shared out.
    """
    for name in ("batch_size", "cores_per_machine"):
        if how.get(name, 0) < 0:
            raise ConfigError(f"{name}={how[name]}: expected 0 or more.")
    for name, counts, most in (
        ("num_workers", num_workers, _MOST_WORKERS),
        ("num_learners", num_learners, _MOST_LEARNERS),
    ):
        for count in counts:
            if not 1 <= count <= most:
                raise ConfigError(f"{name}={count}: expected 1 to {most:,}.")
    pairs = [(workers, learners) for learners in num_learners for workers in num_workers]
    shared = [(workers, learners) for workers, learners in pairs if workers % learners == 0]
    tops = [profiled.topology(*pair, **how) for pair in shared or pairs]
    for top in tops:
        updates = 5 if top.num_workers > _MANY else 30
        rate = simulate(profiled.costs, top, num_updates=updates).env_steps_per_s
        found = gains(profiled.costs, top, rate, num_updates=updates)
        limit = max(found, key=lambda part: found[part])
        yield Forecast(top.num_workers, top.num_learners, top.batch, rate, limit, found[limit])
