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
(`result.py`).
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from headrace.errors import ConfigError, HeadraceError
from headrace.tools.plan.goals import Budget, Goal, Need, Target
from headrace.tools.plan.integer_program import (
    Ask,
    Case,
    Counts,
    Found,
    Machines,
    Programme,
    solver,
)
from headrace.tools.plan.machines import Catalogue, Kind
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.result import Answer, Plan, cannot_reach, no_place, too_small

SETTLED = 1e-5
"""A plan counts as reaching what is this much less, relatively: solvers round."""
_MOST_PROGRAMMES = 500


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
        solver()
        self.catalogue, self.rates = catalogue, rates
        self.one_learner_kind = one_learner_kind
        self.kinds = catalogue.kinds
        self.speeds = {kind.name: learner_speed(kind, rates) for kind in self.kinds}
        taken = tuple(
            catalogue.cpus_per_learner if kind.gpus else catalogue.cpus_per_learner or 1
            for kind in self.kinds
        )
        seats = tuple(
            min(kind.cpus // each if each else kind.gpus, kind.gpus or kind.cpus)
            for kind, each in zip(self.kinds, taken, strict=True)
        )
        self.machines = Machines(self.kinds, seats, taken, catalogue.at_most)

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
            found = self._search(Ask("cost", cpus=goal.cpus, without=without), cases)
            return self._plan(found) if found else None
        ask = Ask("cost", without=without)
        if isinstance(goal, Target):
            ask = replace(ask, env_steps_per_s=goal.env_steps_per_s)
        else:
            ask = replace(ask, budget=goal.per_h)
            most = self._search(replace(ask, minimize="time"))
            if most is None:
                return None
            ask = replace(ask, env_steps_per_s=-most.value * (1 - SETTLED))
        return self._made_the_most_of(ask)

    def _made_the_most_of(self, ask: Ask) -> Plan | None:
        """The cheapest machines; on those as many env steps/s as they allow, by few learners."""
        cheapest = self._search(ask)
        if cheapest is None:
            return None
        ask = replace(ask, machines=cheapest.machines)
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
        if isinstance(goal, Budget) and (found := self._search(Ask("cost"))):
            least = self._plan(found)
        return too_small(goal, self.catalogue, least)

    def _too_far(self, goal: Target) -> ConfigError:
        """The error for a target that no plan reaches."""
        assert self.rates
        if not (most := self._search(Ask("time"))):
            return no_place(self.catalogue)
        # All of it may take any number of machines, each of which gains less.
        nearly = self._search(Ask("cost", env_steps_per_s=-most.value * 0.99)) or most
        reach = -most.value, self._plan(most), self._plan(nearly)
        return cannot_reach(goal, self.catalogue, self.rates, *reach)

    def _plan(self, found: Found) -> Plan:
        machines = self._by_kind(found.machines)
        learners = self._by_kind(found.learners)
        kinds = tuple(kind for kind in self.kinds if kind.name in machines)
        plan = Plan(
            kinds=kinds,
            machines=machines,
            learners=learners,
            sampler_cores=self._by_kind(found.sampler_cores, machines),
            cost_per_h=sum(kind.price_per_h * machines[kind.name] for kind in kinds),
            gap=found.gap,
        )
        if self.rates is None or not learners:
            return plan
        return plan.predicted(self.rates, min(self.speeds[name] for name in learners))

    def _by_kind(self, counts: Counts, also: Collection[str] = ()) -> dict[str, int]:
        """Those that are not 0, and those of `also`."""
        named = {kind.name: int(n) for kind, n in zip(self.kinds, counts, strict=True)}
        return {name: n for name, n in named.items() if n or name in also}

    def _cases(self) -> Iterator[Case]:
        """All ways to place learners, by their speed and kind, with one of them or with more."""
        able = [kind for kind in self.kinds if self.speeds[kind.name]]
        groups: list[tuple[list[Kind], float]] = []
        if self.one_learner_kind:
            groups = [([kind], self.speeds[kind.name]) for kind in able]
        else:
            for on_gpu in (False, True):
                alike = [kind for kind in able if bool(kind.gpus) == on_gpu]
                for speed in sorted({self.speeds[kind.name] for kind in alike}):
                    fast = [kind for kind in alike if self.speeds[kind.name] >= speed]
                    groups.append((fast, speed))
        for kinds, speed in groups:
            names = frozenset(kind.name for kind in kinds)
            if self.rates and self.rates.allreduce_s:
                yield Case(names, speed, 1, 1)
                yield Case(names, speed, 2, math.inf)
            else:
                yield Case(names, speed, 1, math.inf)

    def _need_cases(self, gpus: int) -> Iterator[Case]:
        """A learner for each GPU that is needed."""
        able = [kind.name for kind in self.kinds if kind.gpus]
        for names in [[name] for name in able] if self.one_learner_kind and gpus else [able]:
            yield Case(frozenset(names), 1.0, gpus, gpus)

    def _search(self, ask: Ask, cases: Iterator[Case] | None = None) -> Found | None:
        """The best over all cases; None: there is no plan."""
        cases = self._cases() if cases is None else cases
        found = [self._solve(ask, case) for case in cases]
        return min((each for each in found if each), key=lambda each: each.value, default=None)

    def _solve(self, ask: Ask, case: Case) -> Found | None:
        """The best plan of one case, by as many programmes as tangents are needed."""
        unit = ask.env_steps_per_s or (self.rates.learner_env_steps_per_s if self.rates else 1.0)
        programme = Programme(self.machines, self.rates, ask, case, unit)
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


def learner_speed(kind: Kind, rates: Rates | None) -> float:
    """Of one learner there, relative to the profiled one; 0: no learner runs there.

    Raises:
        ConfigError: the kind has GPUs, the profile is of a CPU, and the catalogue does not say.
    """
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
