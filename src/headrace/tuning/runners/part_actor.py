"""A place on a machine of a cluster where parts run, one after the other: a Ray actor.

A part runs in a process of its own there, exactly as on the machine of the study: `local.py`
starts it, watches its memory, and ends it with its children. Left out: the study's end of it
(`cluster.py`).
"""

import contextlib
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from headrace.collectors.backends.ray_host import work_in
from headrace.distributed import child_process
from headrace.distributed.local_ranks import environment
from headrace.errors import RunDirError
from headrace.storage import run_dir as rundir
from headrace.tuning.runners.api import Ended
from headrace.tuning.runners.local import MEMORY_SHARE, LocalRunner
from headrace.tuning.runners.part import run_part

TOKEN = ".token"
"""File in the study's directory, by which other machines know that they see the same one."""
_LOOK_EVERY_S = 0.5
_FREE_WITHIN_S = 120.0  # a process that is cut off from the cluster ends after a minute


class PartActor:
    """Runs parts of a study's runs, one after the other.

    Args:
        folder: the study's directory.
        token: what its file `TOKEN` says.
        working_dir: of the study's process.
        cores: CPUs, in Ray's terms, that a part takes.
    """

    def __init__(self, folder: str, token: str, working_dir: str, cores: int) -> None:
        self._folder, self._token, self._cores = Path(folder), token, cores
        self._max_bytes = 0
        self._ending, self._saves = threading.Event(), False
        work_in(working_dir)
        with environment({"CUDA_VISIBLE_DEVICES": ""}):  # without a GPU, Ray lets it see all
            child_process.warm_up(run_part.__module__)

    def arrive(self) -> str:
        """Return the id of the machine; from now on a part may take its share of the memory."""
        import ray  # only here: the rest runs in any process

        nodes: Any = ray.nodes  # it has no types
        node = str(ray.get_runtime_context().get_node_id())
        [has] = (each["Resources"] for each in nodes() if each["NodeID"] == node)
        # Ray counts what was free when it started there.
        self._max_bytes = int(MEMORY_SHARE * has["memory"] * self._cores / has["CPU"])
        return node

    def run(self, orders: bytes, run_dir: str) -> Ended:
        """Run a part, and return how it ended.

        Args:
            orders: the pickled `Part`.
            run_dir: its directory.
        """
        try:
            check_sees(self._folder, self._token)
            wait_until_free(Path(run_dir), self._ending, _FREE_WITHIN_S)
        except RunDirError as error:
            return Ended(None, "disk", why=str(error))
        with contextlib.closing(LocalRunner(1, self._max_bytes)) as runner:
            runner.start_pickled(None, orders)
            while not self._ending.is_set():
                if ended := runner.wait(time.monotonic() + _LOOK_EVERY_S):
                    return ended[0]
            ended = runner.stop() if self._saves else []
        return ended[0] if ended else Ended(None, "stopped")

    def end(self, *, saves: bool) -> None:
        """End the part that runs, and save it before, or not."""
        self._saves = saves
        self._ending.set()


def check_sees(folder: Path, token: str) -> None:
    """Raise RunDirError, in words for the user, unless this machine sees the study's directory."""
    try:
        found = (folder / TOKEN).read_text()
    except OSError as error:
        why = f"does not see the study's directory {folder}: {error.strerror}"
    else:
        if found == token and os.access(folder, os.W_OK):
            return
        other = f"has another directory at {folder} than the study"
        why = other if found != token else f"cannot write to the study's directory {folder}"
    raise RunDirError(
        f"The machine {platform.node()} {why}.\n"
        "All machines of the cluster need it under the same path, on shared storage, for the same "
        "user: choose such a place with --study, or copy the study there."
    )


def wait_until_free(run_dir: Path, ending: threading.Event, within_s: float) -> None:
    """Wait until no process has locked a run, or until `ending` is set.

    A machine that was given up for lost may only be cut off. Its process then holds the run until
    it notices.

    Raises:
        RunDirError: the run is still locked after so many seconds.
    """
    deadline = time.monotonic() + within_s
    while rundir.is_locked(run_dir) and time.monotonic() < deadline:
        if ending.wait(_LOOK_EVERY_S):
            return
    if rundir.is_locked(run_dir):
        raise RunDirError(
            f"{run_dir} is still in use by a process that the cluster has lost, after "
            f"{within_s:.0f} s.\nEnd that process: its machine may be cut off from the cluster "
            "without being down."
        )
