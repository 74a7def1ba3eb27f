"""When a run is saved, and what goes into a checkpoint. Left out: how it is written."""

import time
from dataclasses import asdict
from typing import Any

import headrace
from headrace.collect.api import Collector
from headrace.ranks import Ranks
from headrace.run import checkpoint
from headrace.run.learner import Learner
from headrace.run.task import Task
from headrace.run.train import Counters


class Saver:
    """Writes checkpoints of the parts."""

    def __init__(
        self,
        task: Task,
        counters: Counters,
        learner: Learner,
        collector: Collector,
        ranks: Ranks,
    ) -> None:
        self._task, self._settings, self._ranks = task, task.settings, ranks
        self._counters, self._learner, self._collector = counters, learner, collector
        self._saved_at = time.monotonic()
        self._saved_version = -1 if task.saved is None else learner.version

    def is_due(self) -> bool:
        """Whether `checkpoint_every_s` have passed."""
        return time.monotonic() - self._saved_at >= self._settings.run.checkpoint_every_s

    def __call__(self) -> None:
        """Write one, unless nothing was learned since the last; called on all ranks at once."""
        if self._learner.version == self._saved_version:
            return
        files: dict[str, dict[str, Any]] = dict(self._learner.state())
        files["samplers"] = checkpoint.gathered(self._ranks, self._collector.state())
        if self._ranks.rank == 0:
            self._write("checkpoints", files)
        self._saved_at, self._saved_version = time.monotonic(), self._learner.version

    def best(self) -> None:
        """Keep the policy as it is now as the best one, in place of the one before."""
        self._write("best", {"policy_default": dict(self._learner.policy.state_dict())})

    def _write(self, where: str, files: dict[str, dict[str, Any]]) -> None:
        manifest = {
            "headrace": headrace.__version__,
            "counters": self._counters.to_json(),
            "learner": {
                "version": self._learner.version,
                "learner_steps": self._learner.learner_steps,
            },
            # No generator has a state: all random numbers follow from the seed and the counters.
            "seed": self._settings.run.seed,
            "policies": {
                "default": {
                    "algo": self._settings.run.algo,
                    "network": asdict(self._settings.network),
                    "model": self._settings.run.model,
                    "spec": self._task.spec.to_json(),
                }
            },
        }
        parent = self._task.run_dir / where
        path = checkpoint.write(parent, self._counters.env_steps, files, manifest)
        checkpoint.prune(self._settings.run.keep if where == "checkpoints" else 1, path)
