"""Sends the rows of a run to a tracker, during the run or after it."""

import contextlib
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError, TrackerError
from headrace.storage import run_dir as rundir
from headrace.storage.metrics import Row
from headrace.tools.trackers import place as places
from headrace.tools.trackers.api import End, Tracker, check
from headrace.tools.trackers.place import Place
from headrace.tools.trackers.rows import RowReader

PROJECT = "headrace"
_ROWS_AT_ONCE = 100
_POLL_EVERY_S = 1.0  # a run writes its rows about once a second


def track(run_dir: Path, name: str, project: str = "", *, follow: bool = False) -> tuple[int, int]:
    """Send the rows of a run to a tracker, but for those that it has.

    Args:
        name: of the tracker.
        project: where the run is shown; "": where it was before, else "headrace".
        follow: go on until the run has ended, and wait for another process that sends its rows.

    Returns:
        The number of rows that were sent, and the env steps of the last one that the tracker has.

    Raises:
        ConfigError: there is no such tracker, or the run is in another project.
        MissingExtraError: the tracker's package is not installed.
        RunDirError: it is no run, or another process sends its rows.
        TrackerError: the tracker cannot be reached, or refuses something.
    """
    check(name)
    settings = rundir.read_config(run_dir)["settings"]
    with places.locked(run_dir, name, wait=follow) as path:
        before = places.read(path)
        if before is not None and project not in ("", before.project):
            raise ConfigError(
                f"--project {project}: the rows of {run_dir} are in the project {before.project} "
                f"of {name}.\nLeave it out. To send the run anew, as another one, remove {path}."
            )
        project = before.project if before else project or PROJECT
        with _asking(name):
            tracker = _open(
                name, project, run_dir.resolve().name, settings, before.run_id if before else ""
            )
        places.write(path, Place(project, tracker.run_id))
        count, last, end = 0, tracker.sent, _state(run_dir)
        try:
            for rows in _batches(run_dir, tracker.sent, follow=follow):
                with _asking(name):
                    tracker.log(rows)
                count, last = count + len(rows), int(rows[-1]["env_steps"])
            end = _state(run_dir)
        finally:
            with _asking(name):
                tracker.close(end)
        return count, last


def _batches(run_dir: Path, after: int, *, follow: bool) -> Iterator[list[Row]]:
    """Yield new rows, to the end of the run if it is to be followed."""
    with contextlib.closing(RowReader(run_dir / "metrics.jsonl", after)) as reader:
        while True:
            # First this: what is read after the run's end is all that there will be.
            is_last = not (follow and rundir.is_locked(run_dir))
            while rows := list(islice(reader.read(), _ROWS_AT_ONCE)):
                yield rows
            if is_last:
                return
            time.sleep(_POLL_EVERY_S)  # another process writes: nothing wakes this one


def _state(run_dir: Path) -> End:
    if rundir.is_locked(run_dir):
        return "running"
    if rundir.left_mark(run_dir) is not None:
        return "vanished"
    return "failed" if rundir.error_of(run_dir) else "ended"


def _open(name: str, project: str, run: str, settings: dict[str, Any], run_id: str) -> Tracker:
    """Open a run at a tracker: the one of that id, or a new one if the tracker has none such."""
    if name == "trackio":
        from headrace.tools.trackers.to_trackio import TrackioRun

        return TrackioRun(project, run, settings, run_id)
    if name == "mlflow":
        from headrace.tools.trackers.to_mlflow import MlflowRun

        return MlflowRun(project, run, settings, run_id)
    from headrace.tools.trackers.to_wandb import WandbRun

    return WandbRun(project, run, settings, run_id)


@contextlib.contextmanager
def _asking(name: str) -> Iterator[None]:
    """Raise TrackerError for what a tracker's package raises within the `with`."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # each package has classes of its own
        raise TrackerError(
            f"{name} failed: {type(error).__name__}: {error}\n"
            "The run is as it was. Begin again when that is mended: only what is missing is sent."
        ) from error
