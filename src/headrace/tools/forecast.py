"""`headrace simulate`: predicts other numbers of workers, learners and machines from a profile."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config.algorithms import ALGORITHMS
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, gains, simulate
from headrace.errors import ConfigError, quoted

_MANY_WORKERS = 500  # above, few updates are enough: each has many fragments
_MAX_WORKERS, _MAX_LEARNERS = 10_000, 1_024


@dataclass(frozen=True)
class Forecast:
    """A prediction for one combination of sizes; `limit` is the part with the greatest `gain`."""

    num_workers: int
    num_learners: int
    batch: int
    env_steps_per_s: float
    limit: str
    gain: float


@dataclass(frozen=True)
class MeasuredRun:
    """The part of a profile's file that predictions need."""

    costs: Costs
    sizes: Topology
    learners_help: bool

    @classmethod
    def read(cls, path: Path) -> "MeasuredRun":
        """Read the output of `headrace profile --json`; ConfigError if it is something else."""
        try:
            profile = json.loads(path.read_text())
            run = profile["settings"]
            names = ("num_envs", "num_steps", "envs_per_vector", "num_workers", "lag")
            values: dict[str, Any] = {name: int(run[name]) for name in names}
            sizes = Topology(**values)
            if sizes.envs_per_vector < 1:
                raise ValueError(f"envs_per_vector={sizes.envs_per_vector}")
            algorithm = ALGORITHMS[run["algo"]]
            sizes = replace(sizes, asynchronous=algorithm.is_asynchronous(sizes.lag))
            return cls(Costs.from_json(profile["costs"]), sizes, algorithm.learners_help)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no profile: {quoted(error)}.\n"
                "Expected a file with what this prints: headrace profile ENV --json"
            ) from None

    def topology(
        self,
        num_workers: int,
        num_learners: int,
        *,
        env_steps_per_update: int = 0,
        cores_per_machine: int = 0,
        learners_apart: bool = False,
    ) -> Topology:
        """Build a topology whose workers have as many environments as in the profile.

        Args:
            env_steps_per_update: 0: fragments are as long as in the profile.
            cores_per_machine: cores, and workers, of each machine; 0: each process has a core.
            learners_apart: True puts learners on machines of their own.

        Raises:
            ConfigError: the workers do not divide among the learners; or several gain nothing.
        """
        if num_learners > 1 and not self.learners_help:
            raise ConfigError(
                f"num_learners={num_learners}: a minibatch of a replay is small, and a part of it "
                "takes as long as the whole, so several are no faster than one.\n"
                "Use --num-learners 1."
            )
        if num_workers % num_learners:
            raise ConfigError(
                f"num_workers={num_workers} cannot be divided among {num_learners} learners.\n"
                "Give multiples."
            )
        n, workers = self.sizes.envs_per_vector, max(1, self.sizes.num_workers)
        num_envs = n * max(1, self.sizes.num_envs // n // workers) * num_workers
        steps = (
            max(1, round(env_steps_per_update / num_envs))
            if env_steps_per_update
            else self.sizes.num_steps
        )
        return replace(
            self.sizes,
            num_envs=num_envs,
            num_steps=steps,
            num_workers=num_workers,
            num_learners=num_learners,
            cores=cores_per_machine,
            machines=math.ceil(num_workers / cores_per_machine) if cores_per_machine else 1,
            learners_apart=learners_apart,
        )


def forecasts(
    run: MeasuredRun, num_workers: Sequence[int], num_learners: Sequence[int], **sizes: Any
) -> Iterator[Forecast]:
    """Predict each combination; `sizes` are arguments of `MeasuredRun.topology`.

    Raises:
        ConfigError: a number is out of range, or no number of workers divides among learners.
    """
    for name in ("env_steps_per_update", "cores_per_machine"):
        if sizes.get(name, 0) < 0:
            raise ConfigError(f"{name}={sizes[name]}: expected 0 or more.")
    for name, counts, most in (
        ("num_workers", num_workers, _MAX_WORKERS),
        ("num_learners", num_learners, _MAX_LEARNERS),
    ):
        for count in counts:
            if not 1 <= count <= most:
                raise ConfigError(f"{name}={count}: expected 1 to {most:,}.")
    pairs = [(workers, learners) for learners in num_learners for workers in num_workers]
    shared = [(workers, learners) for workers, learners in pairs if workers % learners == 0]
    tops = [run.topology(*pair, **sizes) for pair in shared or pairs]
    for top in tops:
        updates = 5 if top.num_workers > _MANY_WORKERS else 30
        rate = simulate(run.costs, top, num_updates=updates)
        part_gains = gains(run.costs, top, rate, num_updates=updates)
        limit = max(part_gains, key=lambda part: part_gains[part])
        yield Forecast(top.num_workers, top.num_learners, top.batch, rate, limit, part_gains[limit])
