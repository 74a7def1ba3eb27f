"""Starts `headrace track --follow` beside a training.

The training waits for nothing of it: the process has a session of its own, no pipe leads to it, and
it ends by itself after the run. It gives way to the training (a lower priority).
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

from headrace.tools.trackers.api import check
from headrace.tools.trackers.place import folder

_NICE = 10
_WAIT_S = 3.0


class Beside:
    """A process that sends the rows of a run while it trains.

    Args:
        tracker: its name.

    Raises:
        ConfigError: there is no such tracker.
        MissingExtraError: its package is not installed.
    """

    def __init__(self, tracker: str) -> None:
        check(tracker)
        self._tracker = tracker
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self._again = ""

    def start(self, run_dir: Path) -> None:
        """Start the process, once; a warning if that is impossible."""
        if self._process is not None:
            return
        words = ["track", str(run_dir), "--to", self._tracker]
        self._again = f"headrace {' '.join(words)}"
        try:
            log = folder(run_dir) / f"{self._tracker}.log"
            self._log = str(log)
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace", *words, "--follow"],
                    stdin=subprocess.DEVNULL,
                    stdout=fd,
                    stderr=fd,
                    start_new_session=True,
                )
            finally:
                os.close(fd)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
        except OSError as error:
            warnings.warn(
                f"No process could be started that sends metrics to {self._tracker}: "
                f"{error.strerror or error}. Training goes on. To send them: {self._again}",
                stacklevel=2,
            )

    def end(self) -> str:
        """Wait a few seconds for the process after the run; return what the user should know.

        It warns if the process has failed.
        """
        if self._process is None:
            return ""
        try:
            code = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            return (
                f"Metrics are still being sent to {self._tracker}: process {self._process.pid} "
                f"ends by itself, and writes to {self._log}"
            )
        if code:
            warnings.warn(
                f"Not all metrics were sent to {self._tracker} (exit code {code}): see "
                f"{self._log}\nTo send the rest: {self._again}",
                stacklevel=2,
            )
            return ""
        return f"All metrics were sent to {self._tracker}."
