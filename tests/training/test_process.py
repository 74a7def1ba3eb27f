"""Signals that ask a run to stop."""

import os
import signal
import subprocess

from headrace.training.process import StopSignals


def test_signal_stops_the_run_when_another_rank_has_ended(capfd):
    with subprocess.Popen(["true"]) as ended:
        pass
    stop = StopSignals()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        stop.pass_on_to = [ended.pid, other.pid]
        with stop.installed():
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received == signal.SIGTERM and stop()
    assert other.returncode == -signal.SIGTERM
    assert "Stopping: saving" in capfd.readouterr().err
