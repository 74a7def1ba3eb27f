"""Finds the learners, workers and vectors with which a run takes least time.

Left out: what follows without any cost (`config/derive.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, simulate

_WORTH = 1.1  # one with more processes, or a lag, has to be that many times as fast
_SLEEPS = 0.5  # an environment with a smaller share of CPU time sleeps
_MOST_WORKERS = 64  # for environments that sleep
_NUM_UPDATES = 12  # of a simulation


def fastest(
    costs: Costs,
    run: Topology,
    total_env_steps: int,
    *,
    learners: Sequence[int],
    may_have_workers: bool = True,
    overlaps: Sequence[tuple[int, bool]] = (),
) -> Topology:
    """Return the topology with which a run takes least time, the start of processes included.

    Args:
        run: its cores, environments, steps and lag; with `envs_per_vector` 0 vectors may have any
            size.
        learners: numbers of learners to choose from, the least one first.
        overlaps: more lags to choose from where there are workers, and whether these never stop.
    """
    best, least = None, float("inf")
    for num_learners in learners:
        for topology in _candidates(costs, replace(run, num_learners=num_learners), overlaps):
            if topology.num_workers and not may_have_workers:
                continue
            rate = simulate(costs, topology, num_updates=_NUM_UPDATES)
            others = topology.num_workers + num_learners - learners[0]
            starts = 1 + others / run.cores if others else 0
            seconds = total_env_steps / rate + starts * costs.start
            if seconds * _WORTH < least:
                best, least = topology, seconds
    assert best is not None  # one without workers
    return best


def _candidates(
    costs: Costs, run: Topology, overlaps: Sequence[tuple[int, bool]]
) -> Iterator[Topology]:
    """Yield topologies, the one with the fewest processes first."""
    learners, share, cores = run.num_learners, run.num_envs // run.num_learners, int(run.cores)
    counts = {cores, cores - learners}
    if costs.cpu_share < _SLEEPS:
        counts |= {min(_MOST_WORKERS, cores * 2**i) for i in range(1, 7)}
    most = run.num_envs // max(1, run.envs_per_vector)
    for workers in (0, *sorted({min(n, most) for n in counts if n >= learners})):
        each = max(1, -(-workers // learners))
        sizes = {_divisor(share, share // each), _divisor(share, share // (2 * each))}
        for size in (run.envs_per_vector,) if run.envs_per_vector else sorted(sizes, reverse=True):
            if share % size == 0 and each <= share // size:
                topology = replace(run, envs_per_vector=size, num_workers=workers)
                yield topology
                for lag, asynchronous in overlaps if workers else ():
                    yield replace(topology, lag=lag, asynchronous=asynchronous)


def _divisor(number: int, at_most: int) -> int:
    return next((d for d in range(min(at_most, number), 0, -1) if number % d == 0), 1)
