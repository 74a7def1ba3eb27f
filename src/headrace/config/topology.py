"""Chooses the processes of a run: its workers, its vectors, and the threads of its learner.

The choice changes how fast a run is; what it learns changes by rounding only, but for algorithms
that correct for lag, which always have workers. Left out: measuring (`training/calibration.py`).
"""

import sys
from collections.abc import Iterator

from headrace.config.checks import largest_divisor
from headrace.config.run_config import AUTO_THREADS, AUTO_WORKERS, RunConfig
from headrace.config.settings import Settings
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, simulate
from headrace.spec import Interface

SHORT_ENV_STEPS = 4_096
"""A run of no more env steps is a trial: it has one process, and nothing is measured for it."""
START_S = 3.0  # of worker processes: a fresh Python, and its imports
_WORTH = 1.1  # a topology with more processes has to be that many times as fast
_SLEEPS = 0.5  # an environment with a smaller share of CPU time sleeps
_MOST_WORKERS = 64  # for environments that sleep
_NUM_UPDATES = 12  # of a simulation


def is_plain(settings: Settings, interface: Interface, cores: int) -> bool:
    """Return whether the choice follows without measuring."""
    run = settings.run
    return (
        run.num_workers != AUTO_WORKERS
        or run.deterministic
        or _plain_workers(settings, interface, cores) is not None
    )


def choose_topology(
    settings: Settings, interface: Interface, cores: int, measured: Costs | None
) -> Settings:
    """Return the settings with numbers where they are auto.

    Args:
        settings: with numbers of learners, environments and steps.
        cores: CPU cores for all processes.
        measured: None: the numbers follow from the cores alone.
    """
    run = settings.run
    if run.learner_threads == AUTO_THREADS:
        settings = settings.follow("default", learner_threads=1)
    if run.num_workers != AUTO_WORKERS:
        return settings
    if (workers := _plain_workers(settings, interface, cores)) is not None:
        return settings.follow("default", num_workers=workers)
    if measured is None or run.deterministic:
        workers = cores if run.deterministic else 0
        return settings.follow(_reason(None, cores), num_workers=workers)
    best = _fastest(settings, cores, measured)
    chosen = {"num_workers": best.num_workers}
    if not run.envs_per_vector:
        chosen["envs_per_vector"] = best.envs_per_vector
    return settings.follow(_reason(measured, cores), **chosen)


def _plain_workers(settings: Settings, interface: Interface, cores: int) -> int | None:
    """Return the number of workers where it does not depend on any cost; else None."""
    run = settings.run
    if run.cluster:
        return -1 if interface == "gym" else 0
    if interface != "gym" or settings.is_native() or not sys.platform.startswith("linux"):
        return 0  # native vectors have threads of their own
    is_short = run.total_env_steps <= SHORT_ENV_STEPS or cores == 1
    if run.lag > 0 or run.inference == "learner":
        return max(run.num_learners, cores)
    if is_short:
        return 0
    return max(run.num_learners, cores) if settings.algorithm.accepts_any_lag else None


def _candidates(run: RunConfig, cores: int, costs: Costs) -> Iterator[Topology]:
    """Yield topologies, the one with the fewest processes first."""
    learners, share = run.num_learners, run.num_envs // run.num_learners
    counts = {cores, cores - learners}
    if costs.cpu_share < _SLEEPS:
        counts |= {min(_MOST_WORKERS, share * learners, cores * 2**i) for i in range(1, 7)}
    counts = {n for n in counts if learners <= n <= learners * share}
    for workers in (0, *sorted(counts)):
        each = max(1, -(-workers // learners))
        sizes = {largest_divisor(share, share // each), largest_divisor(share, share // (2 * each))}
        for size in {run.envs_per_vector} if run.envs_per_vector else sorted(sizes, reverse=True):
            if share % size == 0 and each <= share // size:
                yield Topology(
                    run.num_envs, run.num_steps, size, workers, learners, max(0, run.lag),
                    cores=cores,
                )  # fmt: skip


def _fastest(settings: Settings, cores: int, costs: Costs) -> Topology:
    """Return the topology with which the whole run, its start included, takes least time."""
    run = settings.run
    best, least = None, float("inf")
    for topology in _candidates(run, cores, costs):
        rate = simulate(costs, topology, num_updates=_NUM_UPDATES)
        seconds = run.total_env_steps / rate + (START_S if topology.num_workers else 0.0)
        if best is None or seconds * _WORTH < least:
            best, least = topology, seconds
    assert best is not None  # one without workers
    return best


def _reason(measured: Costs | None, cores: int) -> str:
    step = "" if measured is None else f", a step of {1e6 * measured.env_s:,.0f} µs"
    return f"auto, {cores} cores{step}"
