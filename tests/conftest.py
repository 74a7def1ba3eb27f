"""One torch thread everywhere: these nets are small, and the suite shares two cores."""

import os
import re
import signal
import subprocess

# A shell ignores SIGINT for what runs in the background, and nohup SIGHUP; tests send both.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

# Two processes of this suite share two cores; idle threads of the math libraries would spin.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # these two as `headrace` sets them, before
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # torch is imported

from pathlib import Path

import pytest

# Without a GPU, Numba's simulator of one; asked when Numba is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

import torch

from headrace.distributed import local_ranks
from tests import guard, python
from tests.faults.table import FaultTable

_TABLE = pytest.StashKey[FaultTable]()
_GUARD = pytest.StashKey[subprocess.Popen]()


SLOW = re.compile(r"tests/(training/ray|faults|distributed|ladder|collectors|tools/(auto|prof))")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
    """Begin with what takes long, so that at the end no process waits long for another.

    What repeats a repeat is `slow`: a later case of two `repeats`, or of a test that is `more`.
    """
    items.sort(key=lambda item: not SLOW.match(item.nodeid))
    for item in items:
        if len(list(item.iter_markers("more"))) > 1:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    """Let runs of several learners in this process start the others by a fork."""
    monkeypatch.setattr(local_ranks, "subprocess", python.forked_subprocess())


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--fault-table", type=Path, help="write what the fault tests measured into this page"
    )


def pytest_configure(config):
    config.stash[_TABLE] = FaultTable()
    if not hasattr(config, "workerinput"):  # the process that has started all others
        config.stash[_GUARD] = guard.start()


@pytest.fixture
def measured(pytestconfig):
    """Where a fault test records what it saw: see `FaultTable.add`."""
    return pytestconfig.stash[_TABLE].add


def pytest_sessionfinish(session, exitstatus):
    page = session.config.getoption("fault_table")
    if page is not None and exitstatus == pytest.ExitCode.OK:
        session.config.stash[_TABLE].write(page)
    elif page is not None:
        print(f"\n\nNot written into {page}:\n\n{session.config.stash[_TABLE].table()}")


def pytest_unconfigure(config):
    if _GUARD in config.stash:
        config.stash[_GUARD].communicate()
