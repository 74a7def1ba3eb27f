"""Finds changes of settings that the cost model predicts to be faster."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.derive import cpu_cores
from headrace.config.settings import Settings
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, simulate
from headrace.errors import ConfigError, flag

ResolveChanged = Callable[[Mapping[str, Any]], Settings]
"""Resolves the settings of a run with some changed; ConfigError if they do not fit together."""
_MIN_GAIN = 1.03


@dataclass(frozen=True)
class Change:
    """A change of settings; `gain` is its predicted speed, relative to the present settings."""

    settings: dict[str, Any]
    gain: float

    @property
    def flags(self) -> str:
        """The change as flags of the command line."""
        return " ".join(f"{flag(name)} {value}" for name, value in self.settings.items())


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
        asynchronous=run.lag > 0 and settings.algorithm.accepts_any_lag,
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
    candidates: list[Change] = []
    for values in _candidates(settings, on_device=on_device):
        changed = {k: v for k, v in values.items() if getattr(settings.run, k) != v}
        try:
            topology = topology_of(resolve(changed), on_device=on_device)
        except ConfigError:  # these sizes do not fit together
            continue
        candidates.append(Change(changed, simulate(costs, topology) / now))
    best: dict[frozenset[str], Change] = {}  # of several changes of the same settings
    for change in sorted(candidates, key=lambda change: -change.gain):
        if change.gain >= _MIN_GAIN:
            best.setdefault(frozenset(change.settings), change)
    return list(best.values())[:2]


def _candidates(settings: Settings, *, on_device: bool) -> Iterator[dict[str, Any]]:
    run, cores = settings.run, cpu_cores()
    if on_device:
        yield {"num_envs": 2 * run.num_envs}
    else:
        counts = {0, cores, run.num_workers // 2, 2 * run.num_workers, run.num_envs}
        for count in sorted(counts - {run.num_workers}):
            yield {"num_workers": count, "envs_per_vector": max(1, run.num_envs // max(1, count))}
        for n in sorted({max(1, run.envs_per_vector // 2), 2 * run.envs_per_vector, run.num_envs}):
            if n != run.envs_per_vector:
                yield {"envs_per_vector": n}
        if run.num_workers and settings.algorithm.accepts_any_lag:
            yield {"lag": max(2, 2 * run.lag)}
        elif run.num_workers:
            if not run.lag:
                yield {"lag": 1}
            if asynchronous := settings.algorithm.asynchronous_form:
                yield {"algo": asynchronous, "lag": 2}
    for count in sorted({1, 2 * run.num_learners} - {run.num_learners}):
        if count <= cores:
            workers = {} if on_device else {"num_workers": 0}
            yield {"num_learners": count, **workers}
