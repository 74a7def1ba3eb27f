"""Sends rows to MLflow, by its client. Left out: artifacts, and the model registry.

A run's params cannot change: they are those with which the run was first sent.
"""

import time
from collections.abc import Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
)

from headrace.storage.metrics import Row
from headrace.tools.trackers.api import End, Tracker, numbers

_STATUS = {"ended": "FINISHED", "failed": "FAILED", "vanished": "FAILED", "running": "RUNNING"}


class MlflowRun(Tracker):
    """A run of an MLflow experiment, at the tracking URI that MLflow's own rules give."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], run_id: str) -> None:
        self._client = MlflowClient()
        found = self._find(run_id) if run_id else None
        if found is None:
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = (
                self._client.create_experiment(project)
                if experiment is None
                else experiment.experiment_id
            )
            self.run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            self.sent = 0
            params = [
                Param(key, str(value)[:MAX_PARAM_VAL_LENGTH]) for key, value in settings.items()
            ]
            for i in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
                self._client.log_batch(
                    self.run_id, params=params[i : i + MAX_PARAMS_TAGS_PER_BATCH]
                )
        else:
            self.run_id = run_id
            self.sent = int(found.data.metrics.get("env_steps", 0))
            self._client.update_run(run_id, status="RUNNING")

    def _find(self, run_id: str) -> Any:
        """Return a run; None if there is no such one, or it was deleted, which only hides it."""
        try:
            found = self._client.get_run(run_id)
            return found if found.info.lifecycle_stage == LifecycleStage.ACTIVE else None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def log(self, rows: Sequence[Row]) -> None:
        # A request is one transaction of MLflow's database, and holds whole rows: so `sent` says
        # of each row that all of it is there, or nothing.
        waiting: list[Metric] = []
        for row in rows:
            now_ms, step = int(time.time() * 1000), int(row["env_steps"])
            metrics = [Metric(key, value, now_ms, step) for key, value in numbers(row).items()]
            if len(waiting) + len(metrics) > MAX_METRICS_PER_BATCH:
                self._client.log_batch(self.run_id, metrics=waiting)
                waiting = []
            waiting += metrics
        self._client.log_batch(self.run_id, metrics=waiting)

    def close(self, end: End) -> None:
        self._client.update_run(self.run_id, status=_STATUS[end])
