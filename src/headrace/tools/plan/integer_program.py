"""One integer programme of the planner, for `scipy.optimize.milp`: variables, rows, answer.

Left out: which programmes to solve, and what is made of their answers (`planner.py`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError, MissingExtraError
from headrace.tools.plan.machines import Kind
from headrace.tools.plan.rates import Rates

Counts = npt.NDArray[np.float64]
"""Whole numbers, one of each kind, in the catalogue's order."""
MOST = 10_000
"""Machines of a kind, where the catalogue has no `at_most`: a search needs an end."""
_SOLVER = {"mip_rel_gap": 1e-7, "time_limit": 20.0}


@dataclass(frozen=True)
class Machines:
    """The kinds, and for each: learners that one machine has room for, cores that each takes."""

    kinds: tuple[Kind, ...]
    seats: tuple[int, ...]
    taken: tuple[int, ...]
    at_most: int | None


@dataclass(frozen=True)
class Case:
    """The plans that one programme looks at."""

    learner_kinds: frozenset[str]
    speed: float
    fewest: int
    most: float
    """Of learners; above 1 they pay for the sum of gradients."""


@dataclass(frozen=True)
class Ask:
    """What is wanted of a plan, and what it must hold to."""

    minimize: Literal["cost", "learners", "time"]
    env_steps_per_s: float = 0.0
    budget: float = math.inf
    cpus: int = 1
    machines: Counts | None = None
    without: str = ""


@dataclass(frozen=True)
class Found:
    """An answer of one programme: counts by kind, and the objective's value."""

    machines: Counts
    learners: Counts
    sampler_cores: Counts
    value: float
    gap: float


class Programme:
    """One integer programme: machines by kind, learners by kind, and what they reach.

    The last variable is env steps per `unit`, so that all rows are near 1.
    """

    def __init__(
        self, machines: Machines, rates: Rates | None, ask: Ask, case: Case, unit: float
    ) -> None:
        self.ask, self.case, self.unit, self.rates = ask, case, unit, rates
        self.kinds = machines.kinds
        count = len(self.kinds)
        self.rows: list[tuple[np.ndarray, float, float]] = []
        self.width = 2 * count + 1
        self.cpus = np.array([kind.cpus for kind in self.kinds], float)
        self.taken = np.array(machines.taken, float)
        self.prices = np.array([kind.price_per_h for kind in self.kinds])
        eye = np.eye(count)
        for k in range(count):
            self._row(-eye[k] * machines.seats[k], eye[k], most=0)
        self._row(np.ones(count), most=machines.at_most)
        self._row(learners=np.ones(count), least=case.fewest, most=case.most)
        self._row(self.cpus, -self.taken, least=ask.cpus)
        self._row(self.prices, most=ask.budget)
        self.sampling = self.alone = np.zeros(self.width)
        if self.rates:
            speeds = np.array([kind.cpu_speed for kind in self.kinds])
            core = self.rates.core_env_steps_per_s / unit * speeds
            self.sampling = np.concatenate([core * self.cpus, -core * self.taken, [0.0]])
            learner = case.speed * self.rates.learner_env_steps_per_s / unit
            self.alone = np.concatenate([np.zeros(count), np.full(count, learner), [0.0]])
            for share in (1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-3):
                self.add_tangents(1 / share, 1 / (1 - share))
        self.upper = self._upper(machines)

    def _row(
        self,
        machines: np.ndarray | None = None,
        learners: np.ndarray | None = None,
        least: float = -math.inf,
        most: float | None = math.inf,
    ) -> None:
        if most is None or (least == -math.inf and most == math.inf):
            return
        row = np.zeros(self.width)
        count = len(self.kinds)
        row[:count] = 0 if machines is None else machines
        row[count : 2 * count] = 0 if learners is None else learners
        self.rows.append((row, least, most))

    def _upper(self, machines: Machines) -> np.ndarray:
        upper = np.full(self.width, math.inf)
        for k, kind in enumerate(self.kinds):
            upper[k] = MOST if kind.at_most is None else kind.at_most
            upper[k] = 0 if kind.name == self.ask.without else upper[k]
            allowed = kind.name in self.case.learner_kinds
            upper[len(self.kinds) + k] = upper[k] * machines.seats[k] if allowed else 0
        return upper

    def add_tangents(self, sampling: float, alone: float) -> None:
        """What is reached is no more than the tangents there (rates per unit) allow."""
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

    def rates_of(self, found: Found) -> tuple[float, float]:
        """Env steps/s of its samplers, and of its learners alone."""
        x = np.concatenate([found.machines, found.learners, [0.0]])
        return float(self.sampling @ x) * self.unit, float(self.alone @ x) * self.unit

    def solve(self) -> Found | None:
        """None: there is no solution."""
        from scipy.optimize import Bounds, LinearConstraint

        count = len(self.kinds)
        lower = np.zeros(self.width)
        lower[-1] = self.ask.env_steps_per_s / self.unit
        upper = self.upper.copy()
        if self.ask.machines is not None:
            lower[:count] = upper[:count] = self.ask.machines
        whole = np.concatenate([np.ones(2 * count), [0]])
        if self.rates is None:
            upper[-1] = 0.0
        aim, scale = self._objective()
        matrix, least, most = zip(*self.rows, strict=True)
        result = solver()(
            aim / scale,
            integrality=whole,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(np.array(matrix), least, most),
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
        return Found(x[:count], x[count:], cores, value, gap)

    def _objective(self) -> tuple[np.ndarray, float]:
        """What is minimized, and what it is divided by so that it is near 1."""
        aim, count = np.zeros(self.width), len(self.kinds)
        if self.ask.minimize == "cost":
            aim[:count] = self.prices
            return aim, max(float(self.prices.max()), 1e-12)
        if self.ask.minimize == "learners":
            aim[count : 2 * count] = 1.0
        else:
            aim[-1] = -1.0
        return aim, 1.0


def solver() -> Any:
    """`milp`; MissingExtraError: without the `plan` extra."""
    try:
        from scipy.optimize import milp
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"Planning needs a package that is not installed ({error}).\n"
            "To install it: pip install 'headrace[plan]'"
        ) from None
    return milp
