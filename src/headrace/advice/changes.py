"""Changes of settings that may make a run faster.

Left out: which of them does, by a run's own meters (`advice/limits.py`) or by the cost model
(`tools/profile/advice.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.config.checks import largest_divisor
from headrace.config.settings import Settings
from headrace.errors import flags_of


@dataclass(frozen=True)
class Change:
    """A change of settings; `gain` is its predicted speed, relative to the present settings."""

    settings: dict[str, Any]
    gain: float

    @property
    def flags(self) -> str:
        """The change as flags of the command line."""
        return flags_of(self.settings)


def candidates(settings: Settings, cores: int, *, on_device: bool) -> Iterator[dict[str, Any]]:
    """Yield changes that are worth a prediction: settings by name, only those that change.

    Some may not fit together. Some change what is learned: `num_envs`, `lag` and `algo`.

    Args:
        on_device: True if all environments are one vector on the learner's device.
    """
    for values in _values(settings, cores, on_device=on_device):
        if changed := {k: v for k, v in values.items() if getattr(settings.run, k) != v}:
            yield changed


def _values(settings: Settings, cores: int, *, on_device: bool) -> Iterator[dict[str, Any]]:
    run = settings.run
    follows = not settings.source["envs_per_vector"].startswith(("given", "config "))
    if on_device:
        yield {"num_envs": 2 * run.num_envs}
    else:
        counts = {0, cores, run.num_workers // 2, 2 * run.num_workers, run.num_envs}
        for count in sorted(counts - {run.num_workers}):
            size = largest_divisor(run.num_envs, max(1, run.num_envs // max(1, count)))
            yield {"num_workers": count} | ({} if follows else {"envs_per_vector": size})
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
    most = cores if settings.algorithm.learners_help else 1
    for count in sorted({1, 2 * run.num_learners} - {run.num_learners}):
        if count <= most:
            workers = {} if on_device else {"num_workers": 0}
            yield {"num_learners": count, **workers}
