"""Ends every process that a test session has started, as soon as the session itself has ended.

It may end in any way: a killed session cannot do this itself. Run as a script, this is the guard.
"""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

NAME = "HEADRACE_TEST_SESSION"
"""An environment variable: all that a session starts inherits it, in whatever session or group."""


def start():
    """Start a guard of this process. Return it; it works when its standard input is closed."""
    os.environ[NAME] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
    )


def marked(session):
    """Return the process ids of a session, without this process."""
    found, word = [], f"{NAME}={session}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if word in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


if __name__ == "__main__":
    sys.stdin.read()  # until the session has ended
    while pids := marked(os.environ[NAME]):  # again: they may be about to start others
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
