"""Predicts how fast training would be with other sizes or machines, by discrete events.

Durations are drawn from measured distributions. Not modelled: faults, starting up, inference in the
learner's process, and queues in the network (`Costs.hand_over` and `Costs.latency` stand for them).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headrace.cost_model.costs import PARTS, Costs
from headrace.cost_model.events import EventQueue, Machine
from headrace.cost_model.schedules import (
    AsynchronousSchedule,
    InlineSchedule,
    Schedule,
    SimulatedRank,
    SimulatedWorker,
    SynchronousSchedule,
    WorkTimes,
)
from headrace.distributed.ranks import share_of

_WARM_UP = 3  # updates that are not counted
_DRAW_SIZE = 256  # fragments


@dataclass(frozen=True)
class Topology:
    """The sizes of a run, as in `RunConfig` and `SamplingPlan`, and its machines.

    Attributes:
        num_workers: over all learners; 0: learners step the environments themselves.
        cores: of one machine; 0: as many as it has processes.
        machines: number of machines that share the workers; learners are on the first ones.
        learners_apart: True if learners have machines of their own.
    """

    num_envs: int
    num_steps: int
    envs_per_vector: int
    num_workers: int = 0
    num_learners: int = 1
    lag: int = 0
    asynchronous: bool = False
    cores: float = 0.0
    machines: int = 1
    learners_apart: bool = False

    @property
    def batch(self) -> int:
        """Env steps of one update, over all learners."""
        return self.num_envs * self.num_steps


def _work_times(costs: Costs, topology: Topology, seed: int) -> WorkTimes:
    learn_s = costs.learn.at(topology.batch / topology.num_learners)
    if topology.num_learners > 1:
        learn_s += costs.allreduce.at(topology.num_learners)
    if topology.asynchronous:  # the learner receives fragments between updates
        vectors = topology.num_envs // topology.envs_per_vector // topology.num_learners
        learn_s += vectors * costs.hand_over
    fragments = _draw_fragments(costs, topology, np.random.default_rng(seed))
    return WorkTimes(fragments, learn_s, costs.hand_over, costs.latency)


def _draw_fragments(
    costs: Costs, topology: Topology, rng: np.random.Generator
) -> Iterator[tuple[float, float]]:
    """Draw idle and computing seconds of fragments, without end."""
    count = topology.num_steps * topology.envs_per_vector
    vector_s = topology.num_steps * costs.vector.at(topology.envs_per_vector)
    reset_probability, computing = min(1.0, costs.resets_per_step), costs.cpu_share
    while True:
        steps = costs.step.sample_sums(rng, count, _DRAW_SIZE)
        resets = rng.binomial(count, reset_probability, _DRAW_SIZE)
        for step_s, num_resets in zip(steps.tolist(), resets, strict=True):
            seconds = step_s + float(costs.reset.sample_sums(rng, int(num_resets), 1)[0])
            yield seconds * (1 - computing), seconds * computing + vector_s


def _make_ranks(events: EventQueue, top: Topology) -> list[SimulatedRank]:
    """Place learners and workers on their machines."""
    learners = 0 if top.learners_apart else math.ceil(top.num_learners / top.machines)
    processes = math.ceil(top.num_workers / top.machines) + learners
    cores = top.cores if processes > top.cores else 0.0  # else each has a core of its own
    machines = [Machine(events, cores) for _ in range(top.machines)]
    vectors = top.num_envs // top.envs_per_vector // top.num_learners
    ranks, placed = [], 0
    for r in range(top.num_learners):
        count = share_of(top.num_workers, r, top.num_learners)
        machine = Machine(events, 0.0) if top.learners_apart else machines[r % top.machines]
        workers = [
            SimulatedWorker(machines[(placed + i) % top.machines], list(range(i, vectors, count)))
            for i in range(count)
        ]
        ranks.append(SimulatedRank(machine, workers, vectors))
        placed += count
    return ranks


def simulate(costs: Costs, topology: Topology, *, num_updates: int = 30, seed: int = 0) -> float:
    """Predict the env steps/s of training as the mean over `num_updates` simulated updates."""
    kind: type[Schedule] = SynchronousSchedule if topology.num_workers else InlineSchedule
    if topology.num_workers and topology.asynchronous:
        kind = AsynchronousSchedule
    events, times = EventQueue(), _work_times(costs, topology, seed)
    schedule = kind(events, _make_ranks(events, topology), times, topology.lag)
    schedule.begin()
    updates = schedule.updates
    events.run(lambda: len(updates) >= _WARM_UP + num_updates)
    return topology.batch / ((updates[-1] - updates[_WARM_UP - 1]) / num_updates)


def lock_step_s(costs: Costs, num_envs: int) -> float:
    """Return the seconds of a lock-step of all environments and one inference.

    Each environment has a process of its own, as in the vectors of most trainers. The step waits
    for the slowest.
    """
    return costs.step.mean_of_slowest(num_envs) + costs.vector.at(num_envs)


def gains(
    costs: Costs, topology: Topology, now: float, *, num_updates: int = 30
) -> dict[str, float]:
    """Return how many times as fast training would be if one part cost nothing.

    The part with the greatest gain is the limit. Parts are those of `Costs.without`, `cores` (each
    process has one of its own), and with workers `waiting` (no process waits for another).
    """
    cases = {part: (costs.without(part), topology) for part in PARTS}
    cases["cores"] = costs, replace(topology, cores=0.0)
    if topology.num_workers:
        nonstop = replace(topology, lag=max(2, topology.lag), asynchronous=True)
        cases["waiting"] = costs, nonstop
    return {part: simulate(*case, num_updates=num_updates) / now for part, case in cases.items()}
