"""Signals that ask a run to stop."""

import itertools
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from headrace.distributed.process import SAME_WITHIN_S, StopSignals, freed_memory_kept


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


def test_two_signals_at_once_are_one_request():
    """`timeout` sends one to its command, and one to the group that the command is in."""
    stop = StopSignals()
    with stop.installed():
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # would end pytest
                pytest.fail("The second one interrupts.")
        assert stop.received == signal.SIGINT
        time.sleep(SAME_WITHIN_S)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def pages_of_an_array_used_again():
    """How many pages the system makes for an array of 64 MiB where others were freed: the least."""
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(10):  # the first ones find the memory in pieces
        torch.ones(2**24)
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return min(after - before for before, after in itertools.pairwise(counts))


def resident_pages():
    """Pages of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_freed_memory_is_kept_for_the_next_array_until_the_end():
    of_an_array = 2**26 // resource.getpagesize()
    assert pages_of_an_array_used_again() >= of_an_array
    with freed_memory_kept():
        assert pages_of_an_array_used_again() < of_an_array / 10
        kept = resident_pages()
    assert resident_pages() < kept - of_an_array / 2
