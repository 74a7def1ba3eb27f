"""A model of training in discrete events: how fast would it be with other sizes, or machines?

What takes time is drawn from measured distributions (`costs.py`); who waits for whom is in
`schedules.py`. Left out: faults, starting up, inference in the learner's process, and queues in the
network (what passes between machines is in `Costs.hand_over`, `Costs.latency`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headrace.cost_model.costs import PARTS, Costs
from headrace.cost_model.events import Events, Machine
from headrace.cost_model.schedules import (
    FirstReady,
    Inline,
    InTurns,
    Learning,
    Rank,
    Schedule,
    Worker,
)

_WARM_UP = 3  # updates that are not counted
_DRAWN = 256  # fragments at a time


@dataclass(frozen=True)
class Topology:
    """What is to run, and where.

    Attributes:
        num_envs: N, over all learners.
        num_steps: T.
        envs_per_vector: n.
        num_workers: over all learners; 0: learners step the environments themselves.
        num_learners: R.
        lag: see `RunSettings.lag`.
        first_ready: see `Plan.first_ready`.
        cores: of one machine (0: as many as it has processes).
        machines: that share the workers; learners are on the first ones, in turns.
        apart: learners have machines of their own.
        core_speed: of a machine's cores, beside those that costs were measured on.
    """

    num_envs: int
    num_steps: int
    envs_per_vector: int
    num_workers: int = 0
    num_learners: int = 1
    lag: int = 0
    first_ready: bool = False
    cores: float = 0.0
    machines: int = 1
    apart: bool = False
    core_speed: float = 1.0

    @property
    def batch(self) -> int:
        """Env steps of one update, over all learners."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class Predicted:
    """What came out.

    Attributes:
        env_steps_per_s: learned from.
        learner_busy: share of the time in which a learner learns.
        workers_busy: share of the time in which a worker fills fragments.
        update_s: from one update's end to the next one's.
    """

    env_steps_per_s: float
    learner_busy: float
    workers_busy: float
    update_s: float


class _Drawn:
    """`schedules.Work`, drawn from costs."""

    def __init__(self, costs: Costs, top: Topology, seed: int) -> None:
        self._costs, self._count = costs, top.num_steps * top.envs_per_vector
        n = top.envs_per_vector
        self._besides = top.num_steps * costs.vector.at(n)
        self._sums = self._draw(np.random.default_rng(seed))
        self.latency_s, self.hand_over_s = costs.latency, costs.hand_over
        self.learn_s = costs.learn.at(top.batch / top.num_learners)
        if top.num_learners > 1:
            self.learn_s += costs.allreduce.at(top.num_learners)
        if top.first_ready:  # the learner hears of fragments between updates
            self.learn_s += top.num_envs // n // top.num_learners * costs.hand_over

    def _draw(self, rng: np.random.Generator) -> Iterator[float]:
        """Seconds of environments in one fragment."""
        costs, often = self._costs, min(1.0, self._costs.resets_per_step)
        while True:
            steps = costs.step.sums(rng, self._count, _DRAWN)
            resets = rng.binomial(self._count, often, _DRAWN)
            yield from (
                total + float(costs.reset.sums(rng, int(many), 1)[0])
                for total, many in zip(steps.tolist(), resets, strict=True)
            )

    def fragment(self) -> tuple[float, float]:
        """See `Work`."""
        seconds, computing = next(self._sums), self._costs.cpu_share
        return seconds * (1 - computing), seconds * computing + self._besides


def _ranks(events: Events, top: Topology) -> list[Rank]:
    """Learners and workers, on their machines."""
    learners_there = 0 if top.apart else math.ceil(top.num_learners / top.machines)
    crowd = math.ceil(top.num_workers / top.machines) + learners_there
    cores = top.cores if crowd > top.cores else 0.0  # else each has one of its own
    machines = [Machine(events, cores, top.core_speed) for _ in range(top.machines)]
    vectors = top.num_envs // top.envs_per_vector // top.num_learners
    count = top.num_workers // top.num_learners
    ranks = []
    for r in range(top.num_learners):
        home = Machine(events, 0.0) if top.apart else machines[r % top.machines]
        workers = [
            Worker(machines[(r * count + i) % top.machines], list(range(i, vectors, count)))
            for i in range(count)
        ]
        ranks.append(Rank(home, workers, vectors))
    return ranks


def simulate(
    costs: Costs, topology: Topology, *, num_updates: int = 30, seed: int = 0
) -> Predicted:
    """Predict how fast training is.

    Args:
        costs: of everything that is done.
        topology: how much of it at a time, and where.
        num_updates: of which the mean is taken.
        seed: of what is drawn.
    """
    events, work = Events(), _Drawn(costs, topology, seed)
    ranks = _ranks(events, topology)
    learning = Learning(events, ranks, work.learn_s)
    schedule: Schedule
    if not topology.num_workers:
        schedule = Inline(learning, ranks, work)
    elif topology.first_ready:
        schedule = FirstReady(events, learning, ranks, work, lag=topology.lag)
    else:
        schedule = InTurns(events, learning, ranks, work, beside=topology.lag > 0)
    schedule.begin()
    updates = learning.updates
    events.run(lambda: len(updates) >= _WARM_UP + num_updates)
    update_s = (updates[-1] - updates[_WARM_UP - 1]) / num_updates
    workers = [worker for rank in ranks for worker in rank.workers]
    return Predicted(
        env_steps_per_s=topology.batch / update_s,
        learner_busy=sum(rank.busy_s for rank in ranks) / len(ranks) / events.now,
        workers_busy=sum(w.busy_s for w in workers) / len(workers) / events.now if workers else 1.0,
        update_s=update_s,
    )


def lock_step_s(costs: Costs, num_envs: int) -> float:
    """Seconds of a step of all environments that waits for the slowest, and for one inference.

    Each has a process of its own: so do the vectors of most trainers.
    """
    return costs.step.mean_of_slowest(num_envs) + costs.vector.at(num_envs)


# What limits training: by predicting it with one part after the other free.


def gains(
    costs: Costs, topology: Topology, now: float, *, num_updates: int = 30
) -> dict[str, float]:
    """By what factor training would be faster if one part cost nothing: the greatest is the limit.

    Args:
        costs: of the parts.
        topology: of what runs.
        now: env steps/s that are predicted of it.
        num_updates: see `simulate`.

    The parts are those of `Costs.without`; `cores` if each process had one of its own; and
    `waiting` if nobody waited for anybody.
    """

    def rate(costs: Costs, topology: Topology) -> float:
        return simulate(costs, topology, num_updates=num_updates).env_steps_per_s

    found = {part: rate(costs.without(part), topology) for part in PARTS}
    found["cores"] = rate(costs, replace(topology, cores=0.0))
    if topology.num_workers:
        nonstop = replace(topology, lag=max(2, topology.lag), first_ready=True)
        found["waiting"] = rate(costs, nonstop)
    return {part: faster / now for part, faster in found.items()}
