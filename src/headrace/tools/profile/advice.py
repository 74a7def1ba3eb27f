"""Finds changes of settings that the cost model predicts to be faster."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.advice.changes import Change, candidates
from headrace.config.settings import Settings
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, simulate
from headrace.errors import ConfigError
from headrace.machine.limits import cpu_cores

ResolveChanged = Callable[[Mapping[str, Any]], Settings]
"""Resolves the settings of a run with some changed; ConfigError if they do not fit together."""
_MIN_GAIN = 1.03


def topology_of(settings: Settings, *, on_device: bool = False) -> Topology:
    """Return the topology of these settings on this machine."""
    run = settings.run
    return Topology(
        num_envs=run.num_envs,
        num_steps=run.num_steps,
        envs_per_vector=run.num_envs // run.num_learners if on_device else run.envs_per_vector,
        num_workers=run.num_workers,
        num_learners=run.num_learners,
        lag=run.lag,
        asynchronous=settings.algorithm.is_asynchronous(run.lag),
        cores=cpu_cores(),
    )


def find_changes(
    costs: Costs, settings: Settings, now: float, resolve: ResolveChanged, *, on_device: bool
) -> list[Change]:
    """Find the two best changes with a gain of at least 3 %, the best first.

    Args:
        now: predicted env steps/s of the present settings.
        on_device: True if all environments are one vector on the learner's device.
    """
    predicted: list[Change] = []
    for changed in candidates(settings, cpu_cores(), on_device=on_device):
        try:
            topology = topology_of(resolve(changed), on_device=on_device)
        except ConfigError:  # these sizes do not fit together
            continue
        predicted.append(Change(changed, simulate(costs, topology) / now))
    best: dict[frozenset[str], Change] = {}  # of several changes of the same settings
    for change in sorted(predicted, key=lambda change: -change.gain):
        if change.gain >= _MIN_GAIN:
            best.setdefault(frozenset(change.settings), change)
    return list(best.values())[:2]
