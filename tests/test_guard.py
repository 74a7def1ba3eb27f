"""A test session that is killed leaves no process."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support import still_alive

SESSION = """
import os, signal, subprocess
from tests import guard
kept = guard.start()
waits = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
print(kept.pid, waits.pid, flush=True)
END
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)"])
def test_guard_ends_what_a_session_started(end):
    done = subprocess.run(
        [sys.executable, "-c", SESSION.replace("END", end)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode in (-signal.SIGKILL, 3)
    assert still_alive(map(int, done.stdout.split()), within_s=10) == []
