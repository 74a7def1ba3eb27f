"""The cheapest machines that reach a goal, by integer programmes (`scipy.optimize.milp`).

Integers are the machines of each kind and the learners on each; what learners leave of the cores
is the samplers'. What training reaches (`rates.py`) is a concave function of these, so it is no
more than any of its tangents. Tangents are what a linear programme can hold: where its answer lies
above the curve, the tangent at that answer is added and it is solved again. So what comes out is
the best plan of the model, not of a grid.

Learners share a batch evenly and step together, so all are as slow as the slowest, and CPU learners
do not mix with those on GPUs. One programme therefore looks at one speed: it may put learners
wherever they are at least that fast. The sum of gradients, which one learner alone does not pay
for, makes two of each. The best over all of them is the plan.

Left out: reading what is asked for (`goals.py`, `machines.py`), saying what was found
(`planned.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from headrace.errors import ConfigError, HeadraceError, MissingExtraError
from headrace.scale.goals import Budget, Goal, Need, Target
from headrace.scale.machines import Catalogue, Kind
from headrace.scale.planned import Answer, Plan, cannot_reach, no_place, too_small
from headrace.scale.rates import Rates

MOST = 10_000
"""Machines of a kind, where the catalogue has no `at_most`: a search needs an end."""
SETTLED = 1e-5
"""A plan counts as reaching what is this much less, relatively: solvers round."""
_MOST_PROGRAMMES = 500
_SOLVER = {"mip_rel_gap": 1e-7, "time_limit": 20.0}


@dataclass(frozen=True)
class _Case:
    """The plans that one programme looks at."""

    learner_kinds: frozenset[str]
    speed: float
    fewest: int
    most: float
    """Of learners; above 1 they pay for the sum of gradients."""


@dataclass(frozen=True)
class _Ask:
    """What is wanted of a plan, and what it must hold to."""

    minimize: Literal["cost", "learners", "time"]
    env_steps_per_s: float = 0.0
    budget: float = math.inf
    cpus: int = 1
    machines: Mapping[str, int] | None = None
    without: str = ""


@dataclass(frozen=True)
class _Found:
    """An answer of one programme: machines and learners by kind, and the objective's value."""

    machines: np.ndarray
    learners: np.ndarray
    value: float
    gap: float


class Planner:
    """Plans with one catalogue and one profile.

    Args:
        catalogue: the machines there are.
        rates: of the profile; None: only `Need`s can be planned for.
        one_learner_kind: all learners are on machines of one kind.

    Raises:
        ConfigError: it is not known how fast a learner is on one of the kinds.
        MissingExtraError: without the `plan` extra.
    """

    def __init__(
        self, catalogue: Catalogue, rates: Rates | None = None, one_learner_kind: bool = False
    ) -> None:
        _solver()
        self.catalogue, self.rates = catalogue, rates
        self.one_learner_kind = one_learner_kind
        self.kinds = catalogue.kinds
        self.speeds = {kind.name: learner_speed(kind, rates) for kind in self.kinds}
        self.taken = [
            catalogue.cpus_per_learner if kind.gpus else catalogue.cpus_per_learner or 1
            for kind in self.kinds
        ]
        self.seats = [
            min(kind.cpus // taken if taken else kind.gpus, kind.gpus or kind.cpus)
            for kind, taken in zip(self.kinds, self.taken, strict=True)
        ]

    def answer(self, goal: Goal) -> Answer:
        """The best plan, and the best without each of the kinds that it uses.

        Raises:
            ConfigError: no plan reaches the goal; it says what can be reached. Or the goal needs
                a profile and there is none, or names another currency than the catalogue.
        """
        if isinstance(goal, Budget) and goal.currency not in ("", self.catalogue.currency.upper()):
            raise ConfigError(
                f"The budget is in {goal.currency}, but the prices are in "
                f"{self.catalogue.currency}: give both in the same currency."
            )
        if self.rates is None and not isinstance(goal, Need):
            raise ConfigError(
                "A target or a budget needs --profile: what samplers and learners do is measured.\n"
                "To make one: headrace profile ENV --json > P.json"
            )
        best = self._best(goal)
        if best is None:
            raise self._refusal(goal)
        without = {kind: self._best(goal, without=kind) for kind in best.machines}
        return Answer(goal, self.catalogue, self.rates, best, without)

    def _best(self, goal: Goal, without: str = "") -> Plan | None:
        if isinstance(goal, Need):
            cases = self._need_cases(goal.gpus)
            found = self._search(_Ask("cost", cpus=goal.cpus, without=without), cases)
            return self._plan(found) if found else None
        ask = _Ask("cost", without=without)
        if isinstance(goal, Target):
            ask = replace(ask, env_steps_per_s=goal.env_steps_per_s)
        else:
            ask = replace(ask, budget=goal.per_h)
            most = self._search(replace(ask, minimize="time"))
            if most is None:
                return None
            ask = replace(ask, env_steps_per_s=-most.value * (1 - SETTLED))
        return self._made_the_most_of(ask)

    def _made_the_most_of(self, ask: _Ask) -> Plan | None:
        """The cheapest machines; on those as many env steps/s as they allow, by few learners."""
        cheapest = self._search(ask)
        if cheapest is None:
            return None
        rented = {k.name: int(n) for k, n in zip(self.kinds, cheapest.machines, strict=True)}
        ask = replace(ask, machines=rented)
        most = self._search(replace(ask, minimize="time"))
        least = -most.value * (1 - SETTLED) if most else ask.env_steps_per_s
        fewest = self._search(replace(ask, minimize="learners", env_steps_per_s=least))
        found = fewest or most or cheapest
        return self._plan(replace(found, gap=cheapest.gap))

    def _refusal(self, goal: Goal) -> ConfigError:
        """Why there is no plan: what can be reached, or what the least costs."""
        if isinstance(goal, Target):
            return self._too_far(goal)
        least = None
        if isinstance(goal, Budget) and (found := self._search(_Ask("cost"))):
            least = self._plan(found)
        return too_small(goal, self.catalogue, least)

    def _too_far(self, goal: Target) -> ConfigError:
        """The error for a target that no plan reaches."""
        assert self.rates
        if not (most := self._search(_Ask("time"))):
            return no_place(self.catalogue)
        # All of it may take any number of machines, each of which gains less.
        nearly = self._search(_Ask("cost", env_steps_per_s=-most.value * 0.99)) or most
        reach = -most.value, self._plan(most), self._plan(nearly)
        return cannot_reach(goal, self.catalogue, self.rates, *reach)

    def _plan(self, found: _Found) -> Plan:
        kinds = [kind for kind, n in zip(self.kinds, found.machines, strict=True) if n]
        learners = {
            kind.name: int(n) for kind, n in zip(self.kinds, found.learners, strict=True) if n
        }
        machines = {
            kind.name: int(n) for kind, n in zip(self.kinds, found.machines, strict=True) if n
        }
        taken = dict(zip((kind.name for kind in self.kinds), self.taken, strict=True))
        cores = {
            kind.name: kind.cpus * machines[kind.name]
            - taken[kind.name] * learners.get(kind.name, 0)
            for kind in kinds
        }
        plan = Plan(
            kinds=tuple(kinds),
            machines=machines,
            learners=learners,
            sampler_cores=cores,
            cost_per_h=sum(kind.price_per_h * machines[kind.name] for kind in kinds),
            gap=found.gap,
        )
        if self.rates is None or not learners:
            return plan
        slowest = min(self.speeds[name] or 1.0 for name in learners)
        return plan.predicted(self.rates, slowest)

    def _cases(self) -> Iterator[_Case]:
        """All ways to place learners, by their speed and kind, with one of them or with more."""
        able = [kind for kind in self.kinds if self.speeds[kind.name]]
        groups: list[tuple[list[Kind], float]] = []
        if self.one_learner_kind:
            groups = [([kind], self.speeds[kind.name] or 0.0) for kind in able]
        else:
            for on_gpu in (False, True):
                alike = [kind for kind in able if bool(kind.gpus) == on_gpu]
                for speed in sorted({self.speeds[kind.name] or 0.0 for kind in alike}):
                    fast = [kind for kind in alike if (self.speeds[kind.name] or 0.0) >= speed]
                    groups.append((fast, speed))
        for kinds, speed in groups:
            names = frozenset(kind.name for kind in kinds)
            if self.rates and self.rates.allreduce_s:
                yield _Case(names, speed, 1, 1)
                yield _Case(names, speed, 2, math.inf)
            else:
                yield _Case(names, speed, 1, math.inf)

    def _need_cases(self, gpus: int) -> Iterator[_Case]:
        """A learner for each GPU that is needed."""
        able = [kind.name for kind in self.kinds if kind.gpus]
        for names in [[name] for name in able] if self.one_learner_kind and gpus else [able]:
            yield _Case(frozenset(names), 1.0, gpus, gpus)

    def _search(self, ask: _Ask, cases: Iterator[_Case] | None = None) -> _Found | None:
        """The best over all cases; None: there is no plan."""
        found = [self._solve(ask, case) for case in cases or self._cases()]
        return min((each for each in found if each), key=lambda each: each.value, default=None)

    def _solve(self, ask: _Ask, case: _Case) -> _Found | None:
        """The best plan of one case, by as many programmes as tangents are needed."""
        unit = ask.env_steps_per_s or (self.rates.learner_env_steps_per_s if self.rates else 1.0)
        programme = _Programme(self, ask, case, unit)
        for _ in range(_MOST_PROGRAMMES):
            solved = programme.solve()
            if solved is None or self.rates is None:
                return solved
            claimed = -solved.value if ask.minimize == "time" else ask.env_steps_per_s
            if not claimed:
                return solved
            sampling, alone = programme.rates_of(solved)
            reached = self.rates.throughput(sampling, alone, case.most)
            if reached >= claimed * (1 - SETTLED):
                return replace(solved, value=-reached) if ask.minimize == "time" else solved
            programme.add_tangents(sampling / unit, alone / unit)
        raise HeadraceError(
            f"The plan did not settle after {_MOST_PROGRAMMES} programmes: it is about "
            f"{reached:,.0f} env steps/s of {claimed:,.0f}. Please report it, with the catalogue "
            "and the profile."
        )


class _Programme:
    """One integer programme: machines by kind, learners by kind, and what they reach.

    The last variable is env steps per `unit`, so that all rows are near 1.
    """

    def __init__(self, planner: Planner, ask: _Ask, case: _Case, unit: float) -> None:
        self.ask, self.case, self.unit, self.rates = ask, case, unit, planner.rates
        self.kinds = planner.kinds
        count = len(self.kinds)
        self.rows: list[tuple[np.ndarray, float, float]] = []
        self.width = 2 * count + 1
        cpus = np.array([kind.cpus for kind in self.kinds], float)
        taken = np.array(planner.taken, float)
        self.prices = np.array([kind.price_per_h for kind in self.kinds])
        eye = np.eye(count)
        for k in range(count):
            self._row(-eye[k] * planner.seats[k], eye[k], most=0)
        self._row(np.ones(count), most=planner.catalogue.at_most)
        self._row(learners=np.ones(count), least=case.fewest, most=case.most)
        self._row(cpus, -taken, least=ask.cpus)
        self._row(self.prices, most=ask.budget)
        self.sampling = self.alone = np.zeros(self.width)
        if self.rates:
            speeds = np.array([kind.cpu_speed for kind in self.kinds])
            core = self.rates.core_env_steps_per_s / unit
            self.sampling = np.concatenate([core * speeds * cpus, -core * speeds * taken, [0.0]])
            learner = case.speed * self.rates.learner_env_steps_per_s / unit
            self.alone = np.concatenate([np.zeros(count), np.full(count, learner), [0.0]])
            for share in (1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 1e-3):
                self.add_tangents(1 / share, 1 / (1 - share))
        self.upper = self._upper(planner)

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

    def _upper(self, planner: Planner) -> np.ndarray:
        upper = np.full(self.width, math.inf)
        for k, kind in enumerate(self.kinds):
            upper[k] = MOST if kind.at_most is None else kind.at_most
            upper[k] = 0 if kind.name == self.ask.without else upper[k]
            allowed = kind.name in self.case.learner_kinds
            upper[len(self.kinds) + k] = upper[k] * planner.seats[k] if allowed else 0
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

    def rates_of(self, found: _Found) -> tuple[float, float]:
        """Env steps/s of its samplers, and of its learners alone."""
        x = np.concatenate([found.machines, found.learners, [0.0]])
        return float(self.sampling @ x) * self.unit, float(self.alone @ x) * self.unit

    def solve(self) -> _Found | None:
        """None: there is no solution."""
        from scipy.optimize import Bounds, LinearConstraint

        count = len(self.kinds)
        lower = np.zeros(self.width)
        lower[-1] = self.ask.env_steps_per_s / self.unit
        upper = self.upper.copy()
        if self.ask.machines is not None:
            fixed = [self.ask.machines[kind.name] for kind in self.kinds]
            lower[:count] = upper[:count] = fixed
        whole = np.concatenate([np.ones(2 * count), [0]])
        if self.rates is None:
            upper[-1] = 0.0
        aim, scale = self._objective()
        matrix, least, most = zip(*self.rows, strict=True)
        result = _solver()(
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
        return _Found(x[:count], x[count:], value, gap)

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


def learner_speed(kind: Kind, rates: Rates | None) -> float | None:
    """Of one learner there, relative to the profiled one; None: no learner runs there.

    Raises:
        ConfigError: the kind has GPUs, the profile is of a CPU, and the catalogue does not say.
    """
    if rates is None:
        return 1.0 if kind.gpus else None
    if kind.learner_speed is not None:
        return kind.learner_speed
    if bool(kind.gpus) == (rates.learner_device != "cpu"):
        return 1.0
    if not kind.gpus:
        return None
    raise ConfigError(
        f"The profile is of a learner on the CPU; how fast one is on the GPU of {kind.name} is not "
        f"known.\nProfile on one, or put learner_speed into [machines.{kind.name}]: how many times "
        "as fast it learns as the profiled one."
    )


def _solver() -> Any:
    try:
        from scipy.optimize import milp
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"Planning needs a package that is not installed ({error}).\n"
            "To install it: pip install 'headrace[plan]'"
        ) from None
    return milp


def make_plan(
    goals: Sequence[Goal],
    catalogue: Catalogue,
    rates: Rates | None = None,
    one_learner_kind: bool = False,
) -> Answer:
    """The answer to the one goal of `goals`; ConfigError: there is none, or there are more."""
    if len(goals) != 1:
        raise ConfigError(
            f"Expected one of --target, --budget and --need, and got {len(goals) or 'none'}.\n"
            'Examples: --target "20M env_steps in 1h", --budget "5 USD/h", --need "8 gpus 64 cpus"'
        )
    return Planner(catalogue, rates, one_learner_kind).answer(goals[0])
