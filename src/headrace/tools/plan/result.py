"""The result of planning, as data and as text."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from headrace.tools.plan.goals import Budget, Goal, Target
from headrace.tools.plan.machines import Catalogue, MachineKind
from headrace.tools.plan.rates import MAX_CORE_LOAD, MAX_WORKERS_PER_CORE, Rates


@dataclass(frozen=True)
class MachinePlan:
    """Machines to rent, and what runs on them.

    Attributes:
        machines, learners, worker_cores, workers: counts by kind; `workers` only with a profile.
        env_steps_per_s: rate of training; None without a profile, or without a learner.
        sampling_env_steps_per_s, learning_env_steps_per_s: rate of the workers, and of the
            learners, if they never waited.
        solver_gap: the solver's proof that no plan is cheaper by more than this share.
    """

    kinds: tuple[MachineKind, ...]
    machines: dict[str, int]
    learners: dict[str, int]
    worker_cores: dict[str, int]
    cost_per_h: float
    solver_gap: float = 0.0
    workers: dict[str, int] | None = None
    env_steps_per_s: float | None = None
    sampling_env_steps_per_s: float | None = None
    learning_env_steps_per_s: float | None = None

    @property
    def limit(self) -> str | None:
        """The slower side, "sampling" or "learning"; None without a prediction."""
        if self.sampling_env_steps_per_s is None or self.learning_env_steps_per_s is None:
            return None
        slower = self.sampling_env_steps_per_s < self.learning_env_steps_per_s
        return "sampling" if slower else "learning"

    @property
    def summary(self) -> str:
        """The machines as text, such as `8 x small-gpu + 4 x cpu-8`."""
        return " + ".join(f"{n} x {name}" for name, n in self.machines.items())

    def hours(self, goal: Goal, spot: "SpotForecast | None" = None) -> float | None:
        """Return the duration of the target's env steps, with losses; None without a target."""
        rate = spot.env_steps_per_s if spot else self.env_steps_per_s
        if not isinstance(goal, Target) or not rate:
            return None
        return goal.env_steps / rate / 3600

    def command(self, rates: Rates, learner_threads: int) -> str | None:
        """Return the command that starts training; None if no worker has a core."""
        learners = sum(self.learners.values())
        # Each learner needs an equal number: train refuses others.
        workers = sum((self.workers or {}).values()) // max(learners, 1) * learners
        if not workers:
            return None
        words = ["headrace", "train", rates.env, "--algo", rates.algo]
        words += ["--lag", str(rates.lag)] if rates.lag else []
        if sum(self.machines.values()) > 1:
            words += ["--cluster", "auto"]
            if rates.workers_per_core != 1:
                words += ["--cpus-per-worker", f"{1 / rates.workers_per_core:.3g}"]
        words += ["--learner-threads", str(learner_threads)] if learner_threads > 1 else []
        words += ["--num-learners", str(learners), "--num-workers", str(workers)]
        words += ["--num-envs", str(workers * rates.envs_per_worker)]
        words += ["--envs-per-vector", str(rates.envs_per_vector)]
        return shlex.join(words)


@dataclass(frozen=True)
class Yield:
    """What losses of machines leave of a plan.

    Attributes:
        share: env steps that are learned from, of those without a loss.
        losses_per_h: machines that are lost, of all.
        learner_losses_per_h: machines of learners among these.
        again: env steps that are made again after a rollback, of those without a loss.
        standing: time in which learners stand still, of all.
    """

    share: float
    losses_per_h: float
    learner_losses_per_h: float
    again: float
    standing: float


@dataclass(frozen=True)
class SpotForecast:
    """What is expected of a plan with spot machines.

    Attributes:
        spares: of the plan's machines, those beyond what its learners need, by kind.
        checkpoint_every_s: how often to save.
        left: what losses leave of the plan.
        env_steps_per_s: of the plan, with losses; None without a profile.
    """

    spares: dict[str, int]
    checkpoint_every_s: float
    left: Yield
    env_steps_per_s: float | None


@dataclass(frozen=True)
class PlanResult:
    """The best plan, and the best without each kind that it uses (None if there is none).

    Attributes:
        spot: what losses leave of it, if it was made with spot machines. Then the one plan of
            `without` is that without these.
    """

    goal: Goal
    catalogue: Catalogue
    rates: Rates | None
    plan: MachinePlan
    without: dict[str, MachinePlan | None]
    spot: SpotForecast | None = None

    @property
    def runner_up(self) -> str | None:
        """The kind whose removal costs least; None if no other plan exists."""
        others = {kind: plan for kind, plan in self.without.items() if plan}
        return min(others, key=lambda kind: self._loss(others[kind]), default=None)

    def _loss(self, plan: MachinePlan) -> float:
        if isinstance(self.goal, Budget):
            return -(plan.env_steps_per_s or 0.0)
        return plan.cost_per_h

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data; null where a value does not apply."""
        catalogue = {name: value for name, value in vars(self.catalogue).items() if name != "kinds"}
        return {
            "goal": {type(self.goal).__name__.lower(): asdict(self.goal)},
            "catalogue": catalogue,
            "rates": asdict(self.rates) if self.rates else None,
            "plan": self._plain(self.plan, self.spot),
            "spot": asdict(self.spot) if self.spot else None,
            "runner_up": self.runner_up,
            "without": {
                kind: self._plain(plan) if plan else None for kind, plan in self.without.items()
            },
            "assumed": self.assumptions(),
        }

    def _plain(self, plan: MachinePlan, spot: SpotForecast | None = None) -> dict[str, Any]:
        hours = plan.hours(self.goal, spot)
        return {name: value for name, value in vars(plan).items() if name != "kinds"} | {
            "cost": None if hours is None else hours * plan.cost_per_h,
            "hours": hours,
            "limit": plan.limit,
            "command": self._command(plan, spot),
        }

    def _command(self, plan: MachinePlan, spot: SpotForecast | None) -> str | None:
        if not self.rates:
            return None
        command = plan.command(self.rates, self.catalogue.cpus_per_learner)
        if command and spot:
            command += f" --checkpoint-every-s {spot.checkpoint_every_s:.0f}"
        return command

    def assumptions(self) -> list[str]:
        """List what the plan assumes without a measurement."""
        lines = [f"{kind.name}: {kind.note}." for kind in self.plan.kinds if kind.note]
        if not self.rates:
            return lines
        lines += [
            f"A learner on {kind.name} is {kind.learner_speed or 1.0:g} times as fast as the "
            f"profiled one ({self.rates.learner_device})."
            for kind in self.plan.kinds
            if kind.name in self.plan.learners
        ]
        lines += [
            f"A core of {kind.name} is {kind.cpu_speed:g} times as fast as the profiled one."
            for kind in self.plan.kinds
            if self.plan.worker_cores[kind.name]
        ]
        lines.append(
            f"{self.rates.workers_per_core:g} worker(s) share a core: one keeps "
            f"{self.rates.worker_cores:g} busy. The load of a core is at most {MAX_CORE_LOAD:g}, "
            f"by at most {MAX_WORKERS_PER_CORE} workers."
        )
        lines.append("The batch is divided evenly: every learner waits for the slowest one.")
        lines.append("Networks between machines and the start of machines take no time.")
        if self.spot:
            lines.append(
                "Machines are lost one by one, at random, and without a notice. Learners that "
                "have lost a machine begin again from the newest checkpoint, once there is room."
            )
        return lines

    def describe(self) -> str:
        """Format the result as text."""
        catalogue, rates = self.catalogue, self.rates
        lines = [f"Prices: {catalogue.source}; {catalogue.date}."]
        if catalogue.is_example:
            lines[0] = f"THE PRICES ARE AN EXAMPLE, not yours. {lines[0]}\n"
            lines[0] += "Write down your own, and give them with --machines FILE.\n"
        if rates:
            together = "workers wait for it" if not rates.lag else "while the workers go on"
            lines.append(
                f"Profile: {rates.env}, {rates.algo}, {rates.batch:,} env steps in a batch. "
                f"A worker makes {rates.worker_env_steps_per_s:,.0f} env steps/s, a learner "
                f"({rates.learner_device}) takes {rates.learner_env_steps_per_s:,.0f}, {together} "
                f"(lag {rates.lag})."
            )
        lines += [f"Goal: {_goal(self.goal, catalogue)}.", "", "Plan", *self._machine_lines()]
        lines += [*self._prediction_lines(), *self._loss_lines()]
        lines += [self._alternative(kind) for kind in self.without]
        if (gap := self.plan.solver_gap) > 1e-6:
            lines.append(f"The solver reached its time limit: a plan may be {gap:.2%} cheaper.")
        if command := self._command(self.plan, self.spot):
            lines += ["", f"To start it: {command}"]
        if assumptions := self.assumptions():
            lines += ["", "Assumed", *(f"  {each}" for each in assumptions)]
        return "\n".join(lines)

    def _machine_lines(self) -> list[str]:
        plan, lines = self.plan, []
        for kind in plan.kinds:
            name, n = kind.name, plan.machines[kind.name]
            count = plan.learners.get(name, 0)
            runs = f"{count} learner{'s' if count > 1 else ''}, " if count else ""
            runs += f"{plan.worker_cores[name]} cores for workers"
            runs += f" ({plan.workers[name]})" if plan.workers else ""
            price = f"{n * kind.price_per_h:,.4f} {self.catalogue.currency}/h"
            lines.append(f"  {n:>4} x {name} ({kind.hardware}): {runs}; {price}")
        return lines

    def _prediction_lines(self) -> list[str]:
        plan, currency = self.plan, self.catalogue.currency
        lines = [f"  Cost: {plan.cost_per_h:,.4f} {currency}/h."]
        if plan.env_steps_per_s is None:
            return lines
        sampling, learning = plan.sampling_env_steps_per_s, plan.learning_env_steps_per_s
        lines.append(
            f"  Predicted: {plan.env_steps_per_s:,.0f} env steps/s. The limit is {plan.limit}: "
            f"workers alone make {sampling:,.0f}, learners alone take {learning:,.0f}."
        )
        if (hours := plan.hours(self.goal, self.spot)) is not None:
            lines.append(
                f"  Takes {hours:,.2f} h: {hours * plan.cost_per_h:,.2f} {currency} in all."
            )
        return lines

    def _loss_lines(self) -> list[str]:
        if not (spot := self.spot):
            return []
        left = spot.left
        rate = f": {spot.env_steps_per_s:,.0f} env steps/s" if spot.env_steps_per_s else ""
        lines = [
            f"  With losses: {left.share:.1%} of this speed{rate}. {left.losses_per_h:.2g} "
            f"machines are lost per hour, {left.learner_losses_per_h:.2g} of them learners'. "
            f"Learners stand still {left.standing:.1%} of the time, and make {left.again:.1%} "
            "again."
        ]
        lines += [
            f"  Spare: {n} x {kind}, so that learners begin again at once (till then its cores "
            "have workers)."
            for kind, n in spot.spares.items()
        ]
        return lines

    def _alternative(self, kind: str) -> str:
        plan = self.without[kind]
        if plan is None:
            return f"  Without {kind}: there is no plan."
        first = "the runner-up, " if kind == self.runner_up else ""
        cost = f"{plan.cost_per_h:,.4f} {self.catalogue.currency}/h"
        more = f" ({plan.cost_per_h / self.plan.cost_per_h:.2f} x)" if self.plan.cost_per_h else ""
        if isinstance(self.goal, Budget):
            more = f" for {plan.env_steps_per_s:,.0f} env steps/s"
        return f"  Without {kind}: {first}{cost}{more}: {plan.summary}."


def _goal(goal: Goal, catalogue: Catalogue) -> str:
    if isinstance(goal, Target):
        return (
            f"{goal.env_steps:,.0f} env steps in {goal.seconds / 3600:,.2f} h, "
            f"{goal.env_steps_per_s:,.0f} env steps/s, at the least cost"
        )
    if isinstance(goal, Budget):
        return f"as many env steps/s as {goal.per_h:g} {catalogue.currency}/h allows"
    return f"{goal.gpus} GPUs, and {goal.cpus} CPUs for workers, at the least cost"
