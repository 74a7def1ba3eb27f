"""When a run is saved, and what goes into a checkpoint. Left out: how it is written."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import headrace
from headrace.collect.api import Collector
from headrace.run import checkpoint
from headrace.run.config import Settings
from headrace.run.learner import Learner
from headrace.run.train import Counters
from headrace.spec import EnvSpec


class Saver:
    """Writes checkpoints of the parts."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        spec: EnvSpec,
        counters: Counters,
        learner: Learner,
        collector: Collector,
        *,
        resumed: bool,
    ) -> None:
        self._settings, self._run_dir, self._spec = settings, run_dir, spec
        self._counters, self._learner, self._collector = counters, learner, collector
        self._saved_at = time.monotonic()
        self._saved_version = learner.version if resumed else -1

    def is_due(self) -> bool:
        """Whether `checkpoint_every_s` have passed."""
        return time.monotonic() - self._saved_at >= self._settings.run.checkpoint_every_s

    def __call__(self) -> None:
        """Write one, unless nothing was learned since the last."""
        if self._learner.version == self._saved_version:
            return
        self._write("checkpoints", self._learner.state() | {"samplers": self._collector.state()})
        self._saved_at, self._saved_version = time.monotonic(), self._learner.version

    def best(self) -> None:
        """Keep the policy as it is now as the best one, in place of the one before."""
        state = self._learner.state()
        self._write("best", {"policy_default": state["policy_default"]})

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
                    "spec": self._spec.to_json(),
                }
            },
        }
        parent = self._run_dir / where
        path = checkpoint.write(parent, self._counters.env_steps, files, manifest)
        checkpoint.prune(self._settings.run.keep if where == "checkpoints" else 1, path)
