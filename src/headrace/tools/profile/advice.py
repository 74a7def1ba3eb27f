"""What to change: settings that the model predicts to be faster.

Left out: measuring (`probe.py`), predicting (`model.py`), and words about it (`result.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.resolve import Settings, cpu_cores
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import Topology, simulate
from headrace.errors import ConfigError

Resolved = Callable[[Mapping[str, Any]], Settings]
"""Settings by what is given besides."""
_LEAST_GAIN = 1.03


@dataclass(frozen=True)
class Change:
    """Something that one could change.

    Attributes:
        settings: by name.
        gain: predicted env steps/s, beside those predicted of how it is now.
    """

    settings: dict[str, Any]
    gain: float

    @property
    def flags(self) -> str:
        """As one gives them."""
        return " ".join(f"--{name.replace('_', '-')} {to}" for name, to in self.settings.items())


def topology_of(settings: Settings, *, on_device: bool = False) -> Topology:
    """What these settings run on this machine."""
    run = settings.run
    return Topology(
        num_envs=run.num_envs,
        num_steps=run.num_steps,
        envs_per_vector=run.num_envs // run.num_learners if on_device else run.envs_per_vector,
        num_workers=run.num_workers,
        num_learners=run.num_learners,
        lag=run.lag,
        asynchronous=run.lag > 0 and settings.algo_module.CORRECTS_LAG,
        cores=cpu_cores(),
    )


def changes(
    costs: Costs, settings: Settings, now: float, resolved: Resolved, *, on_device: bool
) -> list[Change]:
    """What would help most, the best first: two at most, of 3 % at least.

    Args:
        costs: measured.
        settings: as they are now.
        now: env steps/s that are predicted of these.
        resolved: the settings, if some were given besides; ConfigError if they cannot be.
        on_device: whether all environments are one vector, where the learner is.
    """
    found: list[Change] = []
    for tried in _possible(settings, on_device=on_device):
        possible = {k: v for k, v in tried.items() if getattr(settings.run, k) != v}
        try:
            changed = resolved(possible)
        except ConfigError:  # these sizes do not go together
            continue
        rate = simulate(costs, topology_of(changed, on_device=on_device)).env_steps_per_s
        found.append(Change(possible, rate / now))
    best: list[Change] = []
    for change in sorted(found, key=lambda change: -change.gain):
        # Of changes of the same settings only the best
        is_other = all(change.settings.keys() != other.settings.keys() for other in best)
        if change.gain >= _LEAST_GAIN and is_other:
            best.append(change)
    return best[:2]


def _possible(settings: Settings, *, on_device: bool) -> Iterator[dict[str, Any]]:
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
        if run.num_workers:
            yield from _lags(settings)
    for count in sorted({1, 2 * run.num_learners} - {run.num_learners}):
        if count <= cores:
            workers = {} if on_device else {"num_workers": 0}
            yield {"num_learners": count, **workers}


def _lags(settings: Settings) -> Iterator[dict[str, Any]]:
    """Other ways to wait for each other."""
    run = settings.run
    if settings.algo_module.CORRECTS_LAG:
        yield {"lag": max(2, 2 * run.lag)}
    else:
        if not run.lag:
            yield {"lag": 1}
        if run.algo == "ppo":
            yield {"algo": "appo", "lag": 2}
