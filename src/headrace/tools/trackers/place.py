"""Files of a tracker in a run's directory: which run it is there, and who sends rows now.

    trackers/trackio.json    project, and id of the run at the tracker
    trackers/trackio.lock    locked by the process that sends rows
    trackers/trackio.log     output of the process beside a training

Which rows were sent is no part of them: the tracker is asked. So a process that was killed leaves
nothing behind that could differ from what the tracker has.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import RunDirError, quoted
from headrace.storage.files import read_capped, write_whole
from headrace.storage.run_dir import writable

_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Place:
    """The place of a run at a tracker."""

    project: str
    run_id: str


def folder(run_dir: Path) -> Path:
    """Return the folder of these files, which is made if needed; OSError."""
    path = run_dir / "trackers"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def locked(run_dir: Path, tracker: str, *, wait: bool) -> Iterator[Path]:
    """Be the only process that sends rows of a run to a tracker; yield the file of its place.

    Args:
        wait: whether to wait for another process that does so to end.

    Raises:
        RunDirError: another process does, or the directory is not writable.
    """
    with writable(run_dir):
        path = folder(run_dir) / f"{tracker}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            owner = os.read(fd, 32).decode() or "unknown"
            raise RunDirError(
                f"Process {owner} sends the rows of {run_dir} to {tracker} already.\n"
                "Wait for it or stop it; it ends when the run does."
            ) from None
        with writable(run_dir):
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
        yield path.with_suffix(".json")
    finally:
        os.close(fd)


def read(path: Path) -> Place | None:
    """Return a run's place; None if it was never opened there; RunDirError if it is damaged."""
    if not path.exists():
        return None
    try:
        place = Place(**json.loads(read_capped(path, _MAX_BYTES, RunDirError)))
        if not (isinstance(place.project, str) and isinstance(place.run_id, str)):
            raise ValueError("a project and a run's id are texts")
        return place
    except (OSError, ValueError, TypeError) as error:
        raise RunDirError(
            f"{path} is damaged: {quoted(error)}.\n"
            "Remove it: the run is then sent anew, as another one."
        ) from None


def write(path: Path, place: Place) -> None:
    """Write a run's place, completely or not at all; RunDirError if there is no room."""
    with writable(path.parent):
        write_whole(path, json.dumps(asdict(place)).encode())
