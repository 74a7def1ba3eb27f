"""The cheapest machines that reach a goal, by integer programmes (`scipy.optimize.milp`).

Variables are the machines of each kind and the learners on each; workers have the other cores. The
rate of training (`rates.py`) is concave: tangents bound it. If a solution exceeds the rate, the
tangent there is added, and the program is solved again. The slowest learner sets the speed, and
only several learners pay for the all-reduce, so there are two programs for each learner speed.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from headrace.errors import ConfigError, HeadraceError
from headrace.tools.plan.goals import Budget, Goal, Need, Target
from headrace.tools.plan.integer_program import (
    Counts,
    IntegerProgram,
    LearnerCase,
    Objective,
    Solution,
    load_optimize,
)
from headrace.tools.plan.machines import Catalogue, MachineKind
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.result import MachinePlan, PlanResult

TOLERANCE = 1e-5
"""A plan may miss its goal by this relative amount: solvers round."""
_MAX_PROGRAMS = 500


class Planner:
    """Makes plans with one catalogue and one profile.

    Args:
        rates: rates of the profile; None: only `Need` goals are possible.
        one_learner_kind: True puts all learners on machines of one kind.

    Raises:
        ConfigError: the speed of a learner on one of the kinds is not known.
        MissingExtraError: the `plan` extra is missing.
    """

    def __init__(
        self, catalogue: Catalogue, rates: Rates | None = None, one_learner_kind: bool = False
    ) -> None:
        load_optimize()
        self.catalogue, self.rates = catalogue, rates
        self.one_learner_kind = one_learner_kind
        self.kinds = catalogue.kinds
        self._most_learners = rates.most_learners if rates else math.inf
        self.speeds = {kind.name: learner_speed(kind, rates) for kind in self.kinds}

    def plan(self, goal: Goal) -> PlanResult:
        """Find the best plan, and the best plan without each kind that it uses.

        Raises:
            ConfigError: no plan reaches the goal (the message says what can be reached); or the
                goal needs a profile, or names another currency than the catalogue.
        """
        if isinstance(goal, Budget) and goal.currency not in ("", self.catalogue.currency.upper()):
            raise ConfigError(
                f"The budget is in {goal.currency}, but the prices are in "
                f"{self.catalogue.currency}: give both in the same currency."
            )
        if self.rates is None and not isinstance(goal, Need):
            raise ConfigError(
                "A target or a budget needs --profile: the rates of a worker and a learner.\n"
                "To make one: headrace profile ENV --json > P.json"
            )
        most = self._most_learners
        if self.rates and isinstance(goal, Need) and goal.gpus > most:
            raise ConfigError(
                f"--need asks for {goal.gpus} GPUs with a learner each, but more than {most:g} "
                f"gain nothing with {self.rates.algo}, whose minibatches are small.\nAsk for "
                f"{most:g} gpus, or leave out --profile."
            )
        best = self.best(goal)
        if best is None:
            raise self._refusal(goal)
        without = {kind: self.best(goal, without=kind) for kind in best.machines}
        return PlanResult(goal, self.catalogue, self.rates, best, without)

    def best(self, goal: Goal, without: str = "") -> MachinePlan | None:
        """Return the best plan, without one kind of machines; None if no plan reaches the goal."""
        if isinstance(goal, Need):
            cases = self._need_cases(goal.gpus)
            solution = self._search(Objective("cost", cpus=goal.cpus, without=without), cases)
            return self._plan(solution) if solution else None
        objective = Objective("cost", without=without)
        if isinstance(goal, Target):
            objective = replace(objective, env_steps_per_s=goal.env_steps_per_s)
        else:
            objective = replace(objective, budget=goal.per_h)
            most = self._search(replace(objective, minimize="time"))
            if most is None:
                return None
            objective = replace(objective, env_steps_per_s=-most.value * (1 - TOLERANCE))
        return self._use_machines_well(objective)

    def _use_machines_well(self, objective: Objective) -> MachinePlan | None:
        """Find the cheapest machines; on these the highest rate; for that the fewest learners."""
        cheapest = self._search(objective)
        if cheapest is None:
            return None
        objective = replace(objective, machines=cheapest.machines)
        most = self._search(replace(objective, minimize="time"))
        least = -most.value * (1 - TOLERANCE) if most else objective.env_steps_per_s
        fewest = self._search(replace(objective, minimize="learners", env_steps_per_s=least))
        solution = fewest or most or cheapest
        return self._plan(replace(solution, gap=cheapest.gap))

    def _refusal(self, goal: Goal) -> ConfigError:
        """Return the error for a goal that no plan reaches."""
        if isinstance(goal, Need):
            return ConfigError(
                f"No machines have {goal.gpus} GPUs, and {goal.cpus} further CPUs for workers.\n"
                "Raise at_most, or add kinds that have them."
            )
        if isinstance(goal, Target):
            return self._target_error(goal)
        if not (cheapest := self._search(Objective("cost"))):
            return self._no_machine_error()
        least = self._plan(cheapest)
        return ConfigError(
            f"A budget of {goal.per_h:g} {self.catalogue.currency}/h is too small: the cheapest "
            f"machines for a learner and a worker cost {least.cost_per_h:g} ({least.summary})."
        )

    def _no_machine_error(self) -> ConfigError:
        return ConfigError(
            "There is no machine here for a learner and workers.\nExpected kinds with GPUs; or, "
            f"if the profile is of a CPU, with more than {self.catalogue.cpus_per_learner or 1} "
            "CPUs; and at_most above 0."
        )

    def _target_error(self, goal: Target) -> ConfigError:
        rates, at_most = self.rates, self.catalogue.at_most
        assert rates
        if not (most := self._search(Objective("time"))):
            return self._no_machine_error()
        # The last 1 % may take very many machines.
        nearly = self._search(Objective("cost", env_steps_per_s=-most.value * 0.99)) or most
        fastest, near = self._plan(most), self._plan(nearly)
        full = [kind.name for kind in fastest.kinds if kind.at_most == fastest.machines[kind.name]]
        if at_most == sum(fastest.machines.values()):
            full = ["all machines", *full]
        advice = (
            f"Raise at_most of {', '.join(full)}, or ask for less." if full else "Ask for less."
        )
        if fastest.limit == "learning" and sum(fastest.learners.values()) == rates.most_learners:
            advice = "More learners would gain nothing. Ask for less."
        bound = math.inf
        if rates.allreduce_s and rates.most_learners > 1:
            bound = rates.batch / rates.allreduce_s
        if goal.env_steps_per_s >= bound:  # more machines are no help
            advice = (
                f"More learners stay below {bound:,.0f}, however many: the sum of their gradients "
                f"takes {rates.allreduce_s:g} s per update of {rates.batch:,} env steps.\n"
                "Ask for less, or profile with a larger batch."
            )
        return ConfigError(
            f"The target needs {goal.env_steps_per_s:,.0f} env steps/s. These machines reach "
            f"{-most.value:,.0f} at most; {fastest.limit} is the limit. "
            f"{near.env_steps_per_s:,.0f} take {near.summary}.\n{advice}"
        )

    def _plan(self, solution: Solution) -> MachinePlan:
        machines = self._by_kind(solution.machines)
        learners = self._by_kind(solution.learners)
        kinds = tuple(kind for kind in self.kinds if kind.name in machines)
        cores = self._by_kind(solution.worker_cores, machines)
        plan = MachinePlan(
            kinds=kinds,
            machines=machines,
            learners=learners,
            worker_cores=cores,
            cost_per_h=sum(kind.price_per_h * machines[kind.name] for kind in kinds),
            solver_gap=solution.gap,
        )
        return self.with_rates(plan)

    def with_rates(self, plan: MachinePlan) -> MachinePlan:
        """Return the plan with the rates of its machines, workers and learners."""
        rates, cores, count = self.rates, plan.worker_cores, sum(plan.learners.values())
        if rates is None or not count:
            return plan
        sampling = sum(
            cores[kind.name] * kind.cpu_speed * rates.core_env_steps_per_s for kind in plan.kinds
        )
        slowest = min(self.speeds[name] for name in plan.learners)
        alone = count * slowest * rates.learner_env_steps_per_s
        return replace(
            plan,
            workers={name: int(n * rates.workers_per_core) for name, n in cores.items()},
            env_steps_per_s=rates.throughput(sampling, alone, count),
            sampling_env_steps_per_s=sampling,
            learning_env_steps_per_s=rates.learning(alone, count),
        )

    def _by_kind(self, counts: Counts, also: Collection[str] = ()) -> dict[str, int]:
        """Return the counts above 0, and those of the kinds in `also`, by name."""
        named = {kind.name: int(n) for kind, n in zip(self.kinds, counts, strict=True)}
        return {name: n for name, n in named.items() if n or name in also}

    def _cases(self) -> Iterator[LearnerCase]:
        """Yield all cases of learners' speed and kind, with one learner and with several."""
        able = [kind for kind in self.kinds if self.speeds[kind.name]]
        groups: list[tuple[list[MachineKind], float]] = []
        if self.one_learner_kind:
            groups = [([kind], self.speeds[kind.name]) for kind in able]
        else:
            for on_gpu in (False, True):
                alike = [kind for kind in able if bool(kind.gpus) == on_gpu]
                for speed in sorted({self.speeds[kind.name] for kind in alike}):
                    fast = [kind for kind in alike if self.speeds[kind.name] >= speed]
                    groups.append((fast, speed))
        most = self._most_learners
        for kinds, speed in groups:
            names = frozenset(kind.name for kind in kinds)
            if self.rates and self.rates.allreduce_s:
                yield LearnerCase(names, speed, 1, 1)
                if most > 1:
                    yield LearnerCase(names, speed, 2, most)
            else:
                yield LearnerCase(names, speed, 1, most)

    def _need_cases(self, gpus: int) -> Iterator[LearnerCase]:
        """Yield the cases with one learner on each needed GPU."""
        able = [kind.name for kind in self.kinds if kind.gpus and self.speeds[kind.name]]
        for names in [[name] for name in able] if self.one_learner_kind and gpus else [able]:
            yield LearnerCase(frozenset(names), 1.0, gpus, gpus)

    def _search(
        self, objective: Objective, cases: Iterator[LearnerCase] | None = None
    ) -> Solution | None:
        """Return the best solution of all cases; None if there is none."""
        cases = self._cases() if cases is None else cases
        solutions = [self._solve(objective, case) for case in cases]
        return min((each for each in solutions if each), key=lambda each: each.value, default=None)

    def _solve(self, objective: Objective, case: LearnerCase) -> Solution | None:
        """Return the best solution of one case; add tangents until the rate is exact."""
        unit = objective.env_steps_per_s or (
            self.rates.learner_env_steps_per_s if self.rates else 1.0
        )
        program = IntegerProgram(self.catalogue, self.rates, objective, case, unit)
        for _ in range(_MAX_PROGRAMS):
            solved = program.solve()
            if solved is None or self.rates is None:
                return solved
            claimed = -solved.value if objective.minimize == "time" else objective.env_steps_per_s
            if not claimed:
                return solved
            sampling, alone = program.rates_of(solved)
            reached = self.rates.throughput(sampling, alone, case.most)
            if reached >= claimed * (1 - TOLERANCE):
                return replace(solved, value=-reached) if objective.minimize == "time" else solved
            program.add_tangents(sampling / unit, alone / unit)
        raise HeadraceError(
            f"The planner did not converge after {_MAX_PROGRAMS} programs: the plan reaches about "
            f"{reached:,.0f} env steps/s of {claimed:,.0f}. Please report it, with the catalogue "
            "and the profile."
        )


def learner_speed(kind: MachineKind, rates: Rates | None) -> float:
    """Return a learner's speed, relative to the profiled one (0: none runs); ConfigError."""
    if kind.learner_speed == 0.0:
        return 0.0
    if rates is None:
        return 1.0 if kind.gpus else 0.0
    if kind.learner_speed is not None:
        return kind.learner_speed
    if bool(kind.gpus) == (rates.learner_device != "cpu"):
        return 1.0
    if not kind.gpus:
        return 0.0
    raise ConfigError(
        f"The profile is of a learner on the CPU; how fast one is on the GPU of {kind.name} is not "
        f"known.\nProfile on one, or put learner_speed into [machines.{kind.name}]: how many times "
        "as fast it learns as the profiled one."
    )
