"""What is left of a plan's speed if machines are taken away: a simulation of some months.

Machines are lost at random, each after the same time on average, and replaced after a fixed time.
What a loss costs was measured (`ROLLBACK`). Left out: which machines to rent (`spot.py`), losses of
many machines at once, and notices before a loss, with which nothing has to be made again.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headrace.config.algorithms import load_algorithm
from headrace.tools.plan.machines import MachineKind
from headrace.tools.plan.rates import Rates
from headrace.tools.plan.result import MachinePlan, Yield

_MIN_CHECKPOINT_EVERY_S, _MAX_CHECKPOINT_EVERY_S = 10.0, 600.0


@dataclass(frozen=True)
class Recovery:
    """How a run goes on after the loss of a learner's machine.

    Attributes:
        notice_s: until the loss is noticed.
        restart_s: from then on, until learners learn again; where they wait for room, from when
            there is room.
        keeps_work: True: from the last gradient step; False: from the newest checkpoint.
        waits: True: learning stands still until there is room for all learners; False: those that
            are left go on with all of the batch.
        move_s: that all learners then stand still when a machine comes, and one moves there.
        workers_s: until workers of a lost machine have made their fragments elsewhere; a batch that
            needs all of them waits. The fault test of that, at lag 0, measures it.
    """

    notice_s: float
    restart_s: float
    keeps_work: bool
    waits: bool
    move_s: float = 0.0
    workers_s: float = 4.8


ROLLBACK = Recovery(2.3, 5.2, keeps_work=False, waits=True)
"""Of one learner, and of learners on GPUs: by the seconds that one on a CPU takes, and no GPU was
measured (docs/cluster.md, F20, a learner's machine is lost)."""
ON_CPUS = Recovery(2.0, 3.9, keeps_work=True, waits=False, move_s=5.2)
"""Of several learners on CPUs (docs/cluster.md, F20, the machine of one of two is lost)."""


def checkpoint_interval_s(plan: MachinePlan, checkpoint_s: float) -> float:
    """Return how often to save (s), so that saving and work made again cost the least together.

    Young 1974, "A first order approximation to the optimum checkpoint interval". If
    the loss of a learner costs no work, the interval is the longest that is allowed.
    """
    keeps_work = recovery_of(plan).keeps_work
    rate = sum(
        learner_machines(kind, plan) / (3600 * kind.spot.hours_between_losses)
        for kind in plan.kinds
        if kind.is_spot and kind.spot and not keeps_work
    )
    best = math.sqrt(2 * checkpoint_s / rate) if rate else math.inf
    return min(max(best, _MIN_CHECKPOINT_EVERY_S), _MAX_CHECKPOINT_EVERY_S)


def simulate_losses(
    plan: MachinePlan,
    rates: Rates | None,
    checkpoint_every_s: float,
    checkpoint_s: float,
    recovery: Recovery | None = None,
    *,
    hours: float = 2_000.0,
    most_losses: int = 5_000,
) -> Yield:
    """Simulate the losses of a plan's machines; every call draws the same ones.

    Args:
        rates: of the profile; None: workers are taken for the limit.
        checkpoint_every_s: seconds between two checkpoints, which take `checkpoint_s` each.
        recovery: None: that of the plan's learners.
        hours: to simulate; fewer if there were so many losses before.
    """
    recovery = recovery or recovery_of(plan)
    simulation = _Simulation(plan, rates, checkpoint_every_s, checkpoint_s, recovery)
    return simulation.run(hours, most_losses)


def recovery_of(plan: MachinePlan) -> Recovery:
    """Return how the plan's learners go on after the loss of a machine of theirs."""
    on_gpus = any(kind.gpus for kind in plan.kinds if plan.learners.get(kind.name))
    return ROLLBACK if on_gpus or sum(plan.learners.values()) < 2 else ON_CPUS


class Change(NamedTuple):
    """A machine is lost, or comes back."""

    at: float  # s
    kind: str
    comes: bool


def draw_losses(plan: MachinePlan) -> Iterator[Change]:
    """Draw when machines of a plan are lost, and come back; every call draws the same ones."""
    drawn, now = random.Random(0), 0.0
    spot = [(kind, kind.spot) for kind in plan.kinds if kind.is_spot and kind.spot]
    here = {kind.name: plan.machines[kind.name] for kind, _ in spot}
    back: list[tuple[float, str]] = []
    while spot:
        chances = [here[kind.name] / (3600 * terms.hours_between_losses) for kind, terms in spot]
        total = sum(chances)
        now += drawn.expovariate(total) if total else math.inf
        if back and back[0][0] <= now:
            now, name = heapq.heappop(back)
            here[name] += 1
            yield Change(now, name, comes=True)
        else:
            kind, terms = drawn.choices(spot, chances)[0]
            here[kind.name] -= 1
            heapq.heappush(back, (now + 60 * terms.minutes_to_replace, kind.name))
            yield Change(now, kind.name, comes=False)


def learner_machines(kind: MachineKind, plan: MachinePlan) -> int:
    """Return how many machines of a kind its learners need."""
    learners = plan.learners.get(kind.name, 0)
    return math.ceil(learners / (kind.gpus or kind.cpus)) if learners else 0


class _Simulation:
    def __init__(
        self,
        plan: MachinePlan,
        rates: Rates | None,
        checkpoint_every_s: float,
        checkpoint_s: float,
        recovery: Recovery,
    ) -> None:
        self._plan, self._rates, self._recovery = plan, rates, recovery
        self._every_s, self._random = checkpoint_every_s, random.Random(0)
        self._saving = checkpoint_every_s / (checkpoint_every_s + checkpoint_s)
        self._here = {kind.name: plan.machines[kind.name] for kind in plan.kinds}
        self._learning = {kind.name: learner_machines(kind, plan) for kind in plan.kinds}
        self._waits_for_all = rates is None or not load_algorithm(rates.algo).is_asynchronous(
            rates.lag
        )
        self._full = self._rate()
        self._learned = self._again = self._standing_s = 0.0
        self._stands_until, self._since_checkpoint = 0.0, 0.0

    def run(self, hours: float, most_losses: int) -> Yield:
        """Return what is left after so many hours, or losses."""
        now, end = 0.0, 3600 * hours
        losses = learner_losses = 0
        for change in draw_losses(self._plan):
            if change.at >= end or losses >= most_losses:
                break
            self._go_on(now, change.at)
            now = change.at
            if change.comes:
                self._comes(change.kind, now)
            else:
                losses += 1
                learner_losses += self._is_lost(change.kind, now)
        if losses < most_losses:
            self._go_on(now, end)
            now = end
        passed = max(now, 1.0)
        return Yield(
            share=max(0.0, self._learned) / (self._full * passed),
            losses_per_h=3600 * losses / passed,
            learner_losses_per_h=3600 * learner_losses / passed,
            again=self._again / (self._full * passed),
            standing=self._standing_s / passed,
        )

    def _go_on(self, now: float, until: float) -> None:
        """Learn until then, unless learners stand still."""
        begin = min(max(now, self._stands_until), until)
        if self._recovery.waits and not self._has_room():
            begin = until
        self._standing_s += begin - now
        learning_s = (until - begin) * self._saving
        self._learned += learning_s * self._rate()
        self._since_checkpoint = (self._since_checkpoint + learning_s) % self._every_s

    def _is_lost(self, name: str, now: float) -> bool:
        """Take a machine away; return whether a learner was on it."""
        here, learning = self._here[name], self._learning[name]
        again = self._since_checkpoint * self._rate()
        self._here[name] -= 1
        if self._waits_for_all and self._plan.worker_cores[name]:
            self._stand(now, self._recovery.workers_s)
        if self._random.random() >= min(learning, here) / here:
            return False
        self._stand(now, self._recovery.notice_s + self._recovery.restart_s)
        if not self._recovery.keeps_work:
            self._learned, self._again = self._learned - again, self._again + again
            self._since_checkpoint = 0.0
        return True

    def _comes(self, name: str, now: float) -> None:
        is_for_a_learner = self._here[name] < self._learning[name]
        self._here[name] += 1
        if is_for_a_learner and not self._recovery.waits:
            self._stand(now, self._recovery.move_s)
        elif is_for_a_learner and self._has_room():
            self._stand(now, self._recovery.restart_s)

    def _stand(self, now: float, for_s: float) -> None:
        """Let learning stand still for so many seconds from now on."""
        self._stands_until = max(self._stands_until, now + for_s)

    def _has_room(self) -> bool:
        return all(self._here[name] >= needed for name, needed in self._learning.items())

    def _rate(self) -> float:
        """Return the env steps/s of the machines that are there; without rates, of 1 in all."""
        plan, learners, sampling = self._plan, 0.0, self._sampling()
        for name, needed in self._learning.items():
            if needed:
                learners += plan.learners[name] * min(1.0, self._here[name] / needed)
        if self._rates is None or not plan.learning_env_steps_per_s:
            return sampling if learners or not plan.learners else 0.0
        learning = plan.learning_env_steps_per_s * learners / sum(plan.learners.values())
        return self._rates.throughput(
            sampling * (plan.sampling_env_steps_per_s or 0.0), learning, 1
        )

    def _sampling(self) -> float:
        """Return the share of the workers' speed that is left.

        Where a batch waits for all workers, it is that of the cores that most workers share.
        """
        plan = self._plan
        cores = {
            kind: plan.worker_cores[kind.name] / plan.machines[kind.name] for kind in plan.kinds
        }
        if not self._waits_for_all:
            here, all_there = (
                sum(machines[kind.name] * cores[kind] * kind.cpu_speed for kind in plan.kinds)
                for machines in (self._here, plan.machines)
            )
            return here / all_there if all_there else 1.0
        workers = sum(plan.worker_cores[kind.name] for kind in plan.kinds)
        sizes = [(cores[kind], self._here[kind.name]) for kind in plan.kinds if cores[kind]]
        if not workers or not any(machines for _, machines in sizes):
            return float(not workers)
        load = 1.0  # workers of a core
        while sum(machines * _fit(load, size) for size, machines in sizes) < workers:
            load = min((_fit(load, size) + 1) / size for size, machines in sizes if machines)
        return 1 / load


def _fit(load: float, cores: float) -> int:
    """Return how many workers a machine has if so many share a core."""
    return math.floor(load * cores + 1e-9)
