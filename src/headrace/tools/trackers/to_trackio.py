"""Sends rows to Trackio, by `trackio.init` and its run. Left out: its system metrics.

Trackio names a run that goes on by its project and name, not by its id.
"""

from collections.abc import Sequence
from typing import Any

import trackio

from headrace.errors import TrackerError
from headrace.storage.metrics import Row
from headrace.tools.trackers.api import End, Tracker, numbers


class TrackioRun(Tracker):
    """A run of Trackio, which writes rows in a thread of its own.

    Raises:
        TrackerError: a later run of the project has the same name.
    """

    def __init__(self, project: str, name: str, settings: dict[str, Any], run_id: str) -> None:
        self._run = trackio.init(
            project,
            name,
            config=settings,
            resume="allow" if run_id else "never",
            auto_log_cpu=False,
            auto_log_gpu=False,
            embed=False,
        )
        self.run_id = self._run.id
        # The step of the next row that has none: one above the last of the store, local or remote.
        self.sent = max(0, self._run._next_step - 1) if run_id else 0
        if self.sent and run_id != self.run_id:
            trackio.finish()
            raise TrackerError(
                f"The newest run {name!r} in Trackio's project {project!r} is not the one that has "
                f"this run's rows ({run_id}): two run directories have the same name.\nRename the "
                "other run there (headrace track --project gives a new run a project of its own)."
            )

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(numbers(row), step=int(row["env_steps"]))

    def close(self, end: End) -> None:
        trackio.finish()
