"""A plan that was found: plain data, and words. Left out: finding it (`planner.py`)."""

import math
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.errors import ConfigError
from headrace.tools.plan.goals import Budget, Goal, Need, Target
from headrace.tools.plan.machines import Catalogue, Kind
from headrace.tools.plan.rates import KEPT_BUSY, MOST_PER_CORE, Rates


@dataclass(frozen=True)
class Plan:
    """Machines to rent, and what runs on them; counts are by kind.

    Fields:
        kinds: those that are used.
        machines, learners, sampler_cores, samplers: how many, of all machines of a kind together;
            `samplers` only with a profile.
        cost_per_h: of all.
        env_steps_per_s: of training; the next two if samplers, or learners, never waited. None:
            there was no profile, or there is no learner.
        gap: the solver's proof: no plan is cheaper by more than this share.
    """

    kinds: tuple[Kind, ...]
    machines: dict[str, int]
    learners: dict[str, int]
    sampler_cores: dict[str, int]
    cost_per_h: float
    gap: float = 0.0
    samplers: dict[str, int] | None = None
    env_steps_per_s: float | None = None
    sampling_env_steps_per_s: float | None = None
    learning_env_steps_per_s: float | None = None

    def predicted(self, rates: Rates, slowest: float) -> "Plan":
        """With what it reaches; `slowest` is the speed of the slowest learner."""
        speeds = {kind.name: kind.cpu_speed for kind in self.kinds}
        sampling = sum(
            cores * speeds[name] * rates.core_env_steps_per_s
            for name, cores in self.sampler_cores.items()
        )
        count = sum(self.learners.values())
        alone = count * slowest * rates.learner_env_steps_per_s
        return replace(
            self,
            samplers={
                name: int(cores * rates.samplers_per_core)
                for name, cores in self.sampler_cores.items()
            },
            env_steps_per_s=rates.throughput(sampling, alone, count),
            sampling_env_steps_per_s=sampling,
            learning_env_steps_per_s=rates.learning(alone, count),
        )

    @property
    def limit(self) -> str | None:
        """What takes longer, "sampling" or "learning"; None: no prediction."""
        if self.sampling_env_steps_per_s is None or self.learning_env_steps_per_s is None:
            return None
        slower = self.sampling_env_steps_per_s < self.learning_env_steps_per_s
        return "sampling" if slower else "learning"

    @property
    def in_words(self) -> str:
        """`8 x small-gpu + 4 x cpu-8`."""
        return " + ".join(f"{n} x {name}" for name, n in self.machines.items())

    def hours(self, goal: Goal) -> float | None:
        """Until the target's env steps are done; None: there is no target."""
        if not isinstance(goal, Target) or not self.env_steps_per_s:
            return None
        return goal.env_steps / self.env_steps_per_s / 3600

    def command(self, rates: Rates, learner_threads: int) -> str | None:
        """What starts the training on these machines; None: no sampler has a core there."""
        learners = sum(self.learners.values())
        # An equal number for each learner: what does not divide is refused.
        workers = sum((self.samplers or {}).values()) // max(learners, 1) * learners
        if not workers:
            return None
        words = ["headrace", "train", rates.env, "--algo", rates.algo]
        words += ["--lag", str(rates.lag)] if rates.lag else []
        if sum(self.machines.values()) > 1:
            words += ["--cluster", "auto"]
            if rates.samplers_per_core != 1:
                words += ["--cpus-per-worker", f"{1 / rates.samplers_per_core:.3g}"]
        words += ["--learner-threads", str(learner_threads)] if learner_threads > 1 else []
        words += ["--num-learners", str(learners), "--num-workers", str(workers)]
        words += ["--num-envs", str(workers * rates.envs_per_worker)]
        words += ["--envs-per-vector", str(rates.envs_per_vector)]
        return shlex.join(words)

    def to_json(self, goal: Goal, catalogue: Catalogue, rates: Rates | None) -> dict[str, Any]:
        """Plain data."""
        hours = self.hours(goal)
        return {
            "machines": self.machines,
            "learners": self.learners,
            "sampler_cores": self.sampler_cores,
            "samplers": self.samplers,
            "cost_per_h": self.cost_per_h,
            "cost": None if hours is None else hours * self.cost_per_h,
            "hours": hours,
            "env_steps_per_s": self.env_steps_per_s,
            "sampling_env_steps_per_s": self.sampling_env_steps_per_s,
            "learning_env_steps_per_s": self.learning_env_steps_per_s,
            "limit": self.limit,
            "solver_gap": self.gap,
            "command": self.command(rates, catalogue.cpus_per_learner) if rates else None,
        }


@dataclass(frozen=True)
class Answer:
    """The best plan, and the best without each kind that it uses (None: there is none)."""

    goal: Goal
    catalogue: Catalogue
    rates: Rates | None
    plan: Plan
    without: dict[str, Plan | None]

    @property
    def runner_up(self) -> str | None:
        """The kind without which the plan is the best of the others; None: there are none."""
        others = {kind: plan for kind, plan in self.without.items() if plan}
        return min(others, key=lambda kind: self._worse(others[kind]), default=None)

    def _worse(self, plan: Plan) -> float:
        if isinstance(self.goal, Budget):
            return -(plan.env_steps_per_s or 0.0)
        return plan.cost_per_h

    def to_json(self) -> dict[str, Any]:
        """Plain data; what does not apply is null."""
        catalogue = {name: of for name, of in vars(self.catalogue).items() if name != "kinds"}
        return {
            "goal": {type(self.goal).__name__.lower(): asdict(self.goal)},
            "catalogue": catalogue,
            "rates": asdict(self.rates) if self.rates else None,
            "plan": self.plan.to_json(self.goal, self.catalogue, self.rates),
            "runner_up": self.runner_up,
            "without": {
                kind: plan.to_json(self.goal, self.catalogue, self.rates) if plan else None
                for kind, plan in self.without.items()
            },
            "assumed": self.assumed(),
        }

    def assumed(self) -> list[str]:
        """What the plan rests on and nobody measured."""
        said = [f"{kind.name}: {kind.note}." for kind in self.plan.kinds if kind.note]
        if not self.rates:
            return said
        said += [
            f"A learner on {kind.name} is {kind.learner_speed or 1.0:g} times as fast as the "
            f"profiled one ({self.rates.learner_device})."
            for kind in self.plan.kinds
            if kind.name in self.plan.learners
        ]
        said += [
            f"A core of {kind.name} is {kind.cpu_speed:g} times as fast as the profiled one."
            for kind in self.plan.kinds
            if self.plan.sampler_cores[kind.name]
        ]
        said.append(
            f"{self.rates.samplers_per_core:g} sampler(s) share a core: one keeps "
            f"{self.rates.sampler_cores:g} busy, {KEPT_BUSY:g} may be, by {MOST_PER_CORE} at most."
        )
        said.append("The batch is shared out evenly: every learner waits for the slowest one.")
        said.append(
            "Networks between machines, and the time that machines take to start, are free."
        )
        return said

    def describe(self) -> str:
        """The same for people."""
        catalogue, rates = self.catalogue, self.rates
        lines = [f"Prices: {catalogue.source}; {catalogue.date}."]
        if catalogue.is_example:
            lines[0] = f"THE PRICES ARE AN EXAMPLE, not yours. {lines[0]}\n"
            lines[0] += "Write down your own, and give them with --machines FILE.\n"
        if rates:
            together = "samplers wait for it" if not rates.lag else "beside the samplers"
            lines.append(
                f"Profile: {rates.env}, {rates.algo}, {rates.batch:,} env steps in a batch. "
                f"A sampler makes {rates.sampler_env_steps_per_s:,.0f} env steps/s, a learner "
                f"({rates.learner_device}) takes {rates.learner_env_steps_per_s:,.0f}, {together} "
                f"(lag {rates.lag})."
            )
        lines += [f"Goal: {_goal(self.goal, catalogue)}.", "", "Plan", *self._machines(self.plan)]
        lines += self._prediction()
        lines += [self._other(kind) for kind in self.without]
        if self.plan.gap > 1e-6:
            lines.append(
                f"The solver was stopped: a plan may be {self.plan.gap:.2%} cheaper, no more."
            )
        if rates and (command := self.plan.command(rates, catalogue.cpus_per_learner)):
            lines += ["", f"To start it: {command}"]
        if assumed := self.assumed():
            lines += ["", "Assumed", *(f"  {each}" for each in assumed)]
        return "\n".join(lines)

    def _machines(self, plan: Plan) -> list[str]:
        lines = []
        for kind in plan.kinds:
            name, n = kind.name, plan.machines[kind.name]
            count = plan.learners.get(name, 0)
            runs = f"{count} learner{'s' if count > 1 else ''}, " if count else ""
            runs += f"{plan.sampler_cores[name]} cores for samplers"
            runs += f" ({plan.samplers[name]})" if plan.samplers else ""
            price = f"{n * kind.price_per_h:,.4f} {self.catalogue.currency}/h"
            lines.append(f"  {n:>4} x {name} ({kind.has}): {runs}; {price}")
        return lines

    def _prediction(self) -> list[str]:
        plan, currency = self.plan, self.catalogue.currency
        lines = [f"  Cost: {plan.cost_per_h:,.4f} {currency}/h."]
        if plan.env_steps_per_s is None:
            return lines
        sampling, learning = plan.sampling_env_steps_per_s, plan.learning_env_steps_per_s
        lines.append(
            f"  Predicted: {plan.env_steps_per_s:,.0f} env steps/s. The limit is {plan.limit}: "
            f"samplers alone make {sampling:,.0f}, learners alone take {learning:,.0f}."
        )
        if (hours := plan.hours(self.goal)) is not None:
            lines.append(
                f"  Takes {hours:,.2f} h: {hours * plan.cost_per_h:,.2f} {currency} in all."
            )
        return lines

    def _other(self, kind: str) -> str:
        plan = self.without[kind]
        if plan is None:
            return f"  Without {kind}: there is no plan."
        first = "the runner-up, " if kind == self.runner_up else ""
        cost = f"{plan.cost_per_h:,.4f} {self.catalogue.currency}/h"
        more = f" ({plan.cost_per_h / self.plan.cost_per_h:.2f} x)" if self.plan.cost_per_h else ""
        if isinstance(self.goal, Budget):
            more = f" for {plan.env_steps_per_s:,.0f} env steps/s"
        return f"  Without {kind}: {first}{cost}{more}: {plan.in_words}."


def _goal(goal: Goal, catalogue: Catalogue) -> str:
    if isinstance(goal, Target):
        return (
            f"{goal.env_steps:,.0f} env steps in {goal.seconds / 3600:,.2f} h, "
            f"{goal.env_steps_per_s:,.0f} env steps/s, at the least cost"
        )
    if isinstance(goal, Budget):
        return f"as many env steps/s as {goal.per_h:g} {catalogue.currency}/h allows"
    return f"{goal.gpus} GPUs, and {goal.cpus} CPUs for samplers, at the least cost"


def cannot_reach(
    goal: Target, catalogue: Catalogue, rates: Rates, most: float, all_of: Plan, nearly: Plan
) -> ConfigError:
    """The error for a target that no plan reaches.

    Args:
        goal: the target.
        catalogue: what there is.
        rates: of the profile.
        most: env steps/s that can be reached.
        all_of: with what.
        nearly: what reaches 99 % of that at the least cost.
    """
    wanted = f"The target needs {goal.env_steps_per_s:,.0f} env steps/s"
    full = [kind.name for kind in all_of.kinds if kind.at_most == all_of.machines[kind.name]]
    if catalogue.at_most == sum(all_of.machines.values()):
        full = ["all machines", *full]
    advice = f"Raise at_most of {', '.join(full)}, or ask for less." if full else "Ask for less."
    bound = rates.batch / rates.allreduce_s if rates.allreduce_s else math.inf
    if goal.env_steps_per_s >= bound:  # more machines are no help
        advice = (
            f"More learners stay below {bound:,.0f}, however many: the sum of their gradients "
            f"takes {rates.allreduce_s:g} s per update of {rates.batch:,} env steps.\n"
            "Ask for less, or profile with a larger batch."
        )
    return ConfigError(
        f"{wanted}; the most that these machines reach is {most:,.0f}, where {all_of.limit} is the "
        f"limit. {nearly.env_steps_per_s:,.0f} take {nearly.in_words}.\n{advice}"
    )


def no_place(catalogue: Catalogue) -> ConfigError:
    """The error for machines on which nothing can be trained."""
    return ConfigError(
        "There is no machine here for a learner and samplers.\nExpected kinds with GPUs, or, where "
        f"the profile is of a CPU, with more than {catalogue.cpus_per_learner or 1} CPUs; and "
        "at_most above 0."
    )


def too_small(goal: Budget | Need, catalogue: Catalogue, least: Plan | None) -> ConfigError:
    """The error for a budget that rents nothing, or a need that no machines meet."""
    if isinstance(goal, Need):
        return ConfigError(
            f"No machines have {goal.gpus} GPUs, and {goal.cpus} CPUs besides for samplers.\n"
            "Raise at_most, or add kinds that have them."
        )
    if least is None:
        return no_place(catalogue)
    return ConfigError(
        f"A budget of {goal.per_h:g} {catalogue.currency}/h is too small: the cheapest machines "
        f"for a learner and a sampler cost {least.cost_per_h:g} ({least.in_words})."
    )
