"""One integer program of the planner, for `scipy.optimize.milp`: variables, rows, solution."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError, MissingExtraError, install_command
from headrace.tools.plan.machines import Catalogue
from headrace.tools.plan.rates import Rates

Counts = npt.NDArray[np.float64]
"""`[kinds]` whole numbers in the order of the catalogue."""
MAX_MACHINES = 10_000
"""Limit for a kind of machine without `at_most`."""
_SOLVER = {"mip_rel_gap": 1e-7, "time_limit": 20.0}


@dataclass(frozen=True)
class LearnerCase:
    """The learners that one program considers; `speed` is that of the slowest.

    From `fewest` to `most` of them learn; more than one pay for the all-reduce.
    """

    learner_kinds: frozenset[str]
    speed: float
    fewest: int
    most: float


@dataclass(frozen=True)
class Objective:
    """Objective of a plan, and its constraints."""

    minimize: Literal["cost", "learners", "time"]
    env_steps_per_s: float = 0.0
    budget: float = math.inf
    cpus: int = 1
    machines: Counts | None = None
    without: str = ""


@dataclass(frozen=True)
class Solution:
    """A solution of one program: counts by kind, and the value of the objective."""

    machines: Counts
    learners: Counts
    worker_cores: Counts
    value: float
    gap: float


class IntegerProgram:
    """An integer program with machines by kind and learners by kind as variables.

    The last variable is the rate of training in `unit`s, so that all rows are near 1.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        rates: Rates | None,
        objective: Objective,
        case: LearnerCase,
        unit: float,
    ) -> None:
        self.objective, self.case, self.unit, self.rates = objective, case, unit, rates
        self.kinds = catalogue.kinds
        count = len(self.kinds)
        self.rows: list[tuple[np.ndarray, float, float]] = []
        self.width = 2 * count + 1
        self.cpus = np.array([kind.cpus for kind in self.kinds], float)
        each = catalogue.cpus_per_learner
        self.taken = np.array([each or (0 if kind.gpus else 1) for kind in self.kinds], float)
        self.prices = np.array([kind.price_per_h for kind in self.kinds])
        self.upper = np.full(self.width, math.inf)
        for k, kind in enumerate(self.kinds):
            places = kind.gpus or kind.cpus
            if self.taken[k]:
                places = min(places, int(kind.cpus // self.taken[k]))
            most = MAX_MACHINES if kind.at_most is None else kind.at_most
            most = 0 if kind.name == objective.without else most
            self.upper[k] = most
            self.upper[count + k] = places * most if kind.name in case.learner_kinds else 0
            one = np.arange(count) == k
            self._row(-places * one, one, most=0)
        self._row(1.0, most=catalogue.at_most)
        self._row(learners=1.0, least=case.fewest, most=case.most)
        self._row(self.cpus, -self.taken, least=objective.cpus)
        self._row(self.prices, most=objective.budget)
        self.sampling = self.alone = np.zeros(self.width)
        if self.rates:
            speeds = np.array([kind.cpu_speed for kind in self.kinds])
            core = self.rates.core_env_steps_per_s / unit * speeds
            self.sampling = np.concatenate([core * self.cpus, -core * self.taken, [0.0]])
            learner = case.speed * self.rates.learner_env_steps_per_s / unit
            self.alone = np.concatenate([np.zeros(count), np.full(count, learner), [0.0]])
            for share in (1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-3):
                self.add_tangents(1 / share, 1 / (1 - share))

    def _row(
        self,
        machines: np.ndarray | float = 0.0,
        learners: np.ndarray | float = 0.0,
        least: float = -math.inf,
        most: float | None = math.inf,
    ) -> None:
        if most is None or (least == -math.inf and most == math.inf):
            return
        row = np.zeros(self.width)
        count = len(self.kinds)
        row[:count], row[count : 2 * count] = machines, learners
        self.rows.append((row, least, most))

    def add_tangents(self, sampling: float, alone: float) -> None:
        """Bound the rate by its tangents at this point (rates in units)."""
        assert self.rates
        sampling, alone = max(sampling, 1e-9), max(alone, 1e-9)
        wait = self.rates.allreduce_per_env_step(self.case.most) * self.unit
        learning = 1 / (1 / alone + wait)
        reached = 1 / (1 / sampling + 1 / learning)
        curves = [(reached, (reached / sampling) ** 2, (reached / alone) ** 2)]
        if self.rates.lag:
            curves = [(sampling, 1.0, 0.0), (learning, 0.0, (learning / alone) ** 2)]
        for value, by_sampling, by_alone in curves:
            row = -by_sampling * self.sampling - by_alone * self.alone
            row[-1] = 1.0
            offset = value - by_sampling * sampling - by_alone * alone
            self.rows.append((row, -math.inf, offset))

    def rates_of(self, solution: Solution) -> tuple[float, float]:
        """Return the rates of the workers alone and of the learners alone (env steps/s)."""
        x = np.concatenate([solution.machines, solution.learners, [0.0]])
        return float(self.sampling @ x) * self.unit, float(self.alone @ x) * self.unit

    def solve(self) -> Solution | None:
        """Solve the program; None if it has no solution."""
        optimize, count = load_optimize(), len(self.kinds)
        lower = np.zeros(self.width)
        lower[-1] = self.objective.env_steps_per_s / self.unit
        upper = self.upper.copy()
        if self.objective.machines is not None:
            lower[:count] = upper[:count] = self.objective.machines
        whole = np.concatenate([np.ones(2 * count), [0]])
        if self.rates is None:
            upper[-1] = 0.0
        aim, scale = self._objective()
        matrix, least, most = zip(*self.rows, strict=True)
        result = optimize.milp(
            aim / scale,
            integrality=whole,
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(np.array(matrix), least, most),
            options=_SOLVER,
        )
        if result.x is None:
            if result.status == 2:
                return None
            raise HeadraceError(f"The solver found no plan: {result.message}")
        x = np.round(result.x[:-1])
        value = float(aim[:-1] @ x) if aim[:-1].any() else -float(result.x[-1]) * self.unit
        gap = float(result.mip_gap or 0.0)
        cores = self.cpus * x[:count] - self.taken * x[count:]
        return Solution(x[:count], x[count:], cores, value, gap)

    def _objective(self) -> tuple[np.ndarray, float]:
        """Return the coefficients to minimize, and a scale that makes them near 1."""
        aim, count = np.zeros(self.width), len(self.kinds)
        if self.objective.minimize == "cost":
            aim[:count] = self.prices
            return aim, max(float(self.prices.max()), 1e-12)
        if self.objective.minimize == "learners":
            aim[count : 2 * count] = 1.0
        else:
            aim[-1] = -1.0
        return aim, 1.0


def load_optimize() -> Any:
    """Import `scipy.optimize`; MissingExtraError without the `plan` extra."""
    try:
        import scipy.optimize
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"Planning needs a package that is not installed ({error}).\n"
            f"To install it: {install_command('plan')}"
        ) from None
    return scipy.optimize
