"""Plans with spot machines: which of them, how many spares, and how often to save.

Plans are made with spot machines for all, for workers only, and without them. A simulation
(`losses.py`) says what losses leave of each. If a target is missed by that, a faster plan is asked
for. The cheapest for each env step is taken; for a budget, the fastest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.errors import ConfigError
from headrace.tools.plan.goals import Budget, Goal, Target
from headrace.tools.plan.losses import (
    checkpoint_interval_s,
    learner_machines,
    simulate_losses,
)
from headrace.tools.plan.machines import Catalogue
from headrace.tools.plan.planner import Planner
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.result import MachinePlan, PlanResult, SpotForecast

_MOST_SPARES = 3
_MOST_TRIES = 6
_CLOSE = 1e-3
WITHOUT = "spot machines"
"""The name of the plan without them in `PlanResult.without`."""

_Found = tuple[MachinePlan, SpotForecast]


def make_plan(
    goals: Sequence[Goal],
    catalogue: Catalogue,
    rates: Rates | None = None,
    one_learner_kind: bool = False,
    spot: bool = False,
) -> PlanResult:
    """Plan for the one goal in `goals`; ConfigError if there is none, or more than one.

    Args:
        spot: whether to rent spot machines where they are cheaper.
    """
    if len(goals) != 1:
        raise ConfigError(
            f"Expected one of --target, --budget and --need, and got {len(goals) or 'none'}.\n"
            'Examples: --target "20M env_steps in 1h", --budget "5 USD/h", --need "8 gpus 64 cpus"'
        )
    (goal,) = goals
    if not spot:
        return Planner(catalogue, rates, one_learner_kind).plan(goal)
    if not any(kind.spot for kind in catalogue.kinds):
        raise ConfigError(
            "--spot, but no kind of machine has spot terms.\nExpected in --machines FILE, for "
            "example:\n[machines.NAME.spot]\nprice_per_h = 0.2\nhours_between_losses = 5"
        )
    steady = Planner(catalogue, rates, one_learner_kind)
    anywhere, for_workers = (
        Planner(catalogue.with_spot(learners=learners), rates, one_learner_kind)
        for learners in (True, False)
    )
    found = [each for planner in (anywhere, for_workers, steady) for each in _plans(planner, goal)]
    if not found:
        return anywhere.plan(goal)  # the error says why
    plan, forecast = min(found, key=_fastest if isinstance(goal, Budget) else _cost_per_env_step)
    if not any(kind.is_spot for kind in plan.kinds):
        return steady.plan(goal)
    without = {WITHOUT: steady.best(goal)}
    return PlanResult(goal, anywhere.catalogue, rates, plan, without, forecast)


def _fastest(found: _Found) -> float:
    return -(found[1].env_steps_per_s or 0.0)


def _cost_per_env_step(found: _Found) -> float:
    plan, forecast = found
    return plan.cost_per_h / ((plan.env_steps_per_s or 1.0) * max(forecast.left.share, 1e-9))


def _plans(planner: Planner, goal: Goal) -> Iterator[_Found]:
    """Yield plans that reach the goal in spite of losses: with each number of spares."""
    for spares in range(_MOST_SPARES + 1):
        aim = goal
        for _ in range(_MOST_TRIES):
            plan = planner.best(aim)
            if plan is None:
                break
            plan = planner.with_rates(_with_spares(plan, spares))
            forecast = _forecast(plan, planner)
            missing = _missing(plan, forecast, goal)
            if missing <= 1 + _CLOSE:
                yield plan, forecast
                break
            if isinstance(aim, Target):
                aim = replace(aim, env_steps=aim.env_steps * missing)
            elif isinstance(aim, Budget):
                aim = replace(aim, per_h=aim.per_h / missing)


def _missing(plan: MachinePlan, forecast: SpotForecast, goal: Goal) -> float:
    """Return how many times as fast, or as cheap, a plan must be to reach the goal."""
    if isinstance(goal, Target):
        return goal.env_steps_per_s / max(forecast.env_steps_per_s or 0.0, 1e-9)
    return plan.cost_per_h / goal.per_h if isinstance(goal, Budget) else 1.0


def _with_spares(plan: MachinePlan, spares: int) -> MachinePlan:
    """Add machines of each kind of spot machines that has learners; workers have their cores."""
    more = {
        kind: spares - min(spares, plan.machines[kind.name] - learner_machines(kind, plan))
        for kind in plan.kinds
        if kind.is_spot and plan.learners.get(kind.name)
    }
    return replace(
        plan,
        machines=plan.machines | {k.name: plan.machines[k.name] + n for k, n in more.items()},
        worker_cores=plan.worker_cores
        | {k.name: plan.worker_cores[k.name] + n * k.cpus for k, n in more.items()},
        cost_per_h=plan.cost_per_h + sum(n * kind.price_per_h for kind, n in more.items()),
    )


def _forecast(plan: MachinePlan, planner: Planner) -> SpotForecast:
    checkpoint_s = planner.catalogue.checkpoint_s
    every_s = checkpoint_interval_s(plan, checkpoint_s)
    left = simulate_losses(plan, planner.rates, every_s, checkpoint_s)
    rate = None if plan.env_steps_per_s is None else plan.env_steps_per_s * left.share
    spares = {
        kind.name: plan.machines[kind.name] - learner_machines(kind, plan)
        for kind in plan.kinds
        if kind.is_spot and plan.learners.get(kind.name)
    }
    return SpotForecast({k: n for k, n in spares.items() if n}, every_s, left, rate)
