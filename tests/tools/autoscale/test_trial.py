"""Tests of trials as real processes: rate, slowness, memory, crashes, signals."""

import os
import select
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

import headrace
from headrace.distributed import child_process, sessions
from headrace.errors import ConfigError, EnvError
from headrace.tools.autoscale.trial import Progress, TrialSetup, run_trial
from headrace.training.job import RunRequest
from tests import python
from tests.marks import repeats
from tests.support import Counting, children, leaders, still_alive

SIZES = {"num_envs": 4, "num_steps": 16, "envs_per_vector": 4, "num_workers": 0}
BATCH = 64


@pytest.fixture(autouse=True, scope="module")
def _server():
    child_process.warm_up()


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    """Check that a trial leaves no files behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert [path for path in tmp_path.iterdir() if path.name.startswith("headrace-")] == []


def trial(env, *, seconds=60.0, measure_s=0.3, to_beat=0.0, max_bytes=None, **sizes):
    setup = TrialSetup(RunRequest(env=env), 10**6, max_bytes=max_bytes, measure_s=measure_s)
    before = children()
    try:
        return run_trial(setup, SIZES | sizes, BATCH, seconds=seconds, to_beat=to_beat)
    finally:
        assert leaders(children() - before) == []


class OnStep(Counting):
    """Does something at its 40th step."""

    def __init__(self, do):
        super().__init__()
        self.do = do

    def step(self, action):
        if self.t == 40:
            self.do()
        return super().step(action)


def hoard():
    hoarded = np.ones(1 << 29, np.uint8)  # and stays until it is found
    threading.Event().wait()
    return hoarded


def want_too_much():
    return np.zeros(1 << 60, np.uint8)


@repeats("sizes", [{}, {"num_workers": 2, "envs_per_vector": 1}])
def test_rate_memory_and_cores_are_measured(sizes):
    found = trial(Counting, **sizes)
    assert (found.outcome, found.why) == ("measured", "")
    assert found.rate > 100
    assert 1 << 25 < found.memory_bytes < 1 << 33
    assert found.busy_cores > 0.2  # it computes


def test_sleeping_environments_use_few_cores():
    found = trial(lambda: Sleeping(0.005))
    assert found.outcome == "measured"
    assert found.rate < 200
    assert 0 < found.busy_cores < 0.5


class Sleeping(Counting):
    def __init__(self, step_s):
        super().__init__()
        self.step_s = step_s

    def step(self, action):
        time.sleep(self.step_s)
        return super().step(action)


@pytest.mark.more
def test_trial_without_updates_is_slow_with_upper_bound():
    found = trial(lambda: Sleeping(0.5), seconds=4.0, measure_s=2.0)
    assert (found.outcome, found.why) == ("slow", "no update in its time")
    assert found.rate is None or found.rate > 2


@pytest.mark.more
def test_clearly_slower_trial_ends_early():
    found = trial(lambda: Sleeping(0.02), measure_s=0.5, to_beat=1e6)
    assert found.rate < 1e6
    assert found.took_s < 30


@pytest.mark.more
def test_trial_over_memory_limit_is_ended():
    found = trial(
        lambda: OnStep(hoard), seconds=20.0, measure_s=2.0, max_bytes=512 << 20,
        num_workers=2, envs_per_vector=2,
    )  # fmt: skip
    assert found.outcome == "memory"
    assert found.memory_bytes > 512 << 20
    assert "of 0.50 GiB" in found.why


def test_memory_error_is_no_crash():
    found = trial(lambda: OnStep(want_too_much))
    assert found.outcome == "memory"
    assert "MemoryError: Unable to allocate" in found.why


@repeats("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killed_trial_is_a_crash(number):
    before, done = children(), threading.Event()

    def kill():
        while not done.wait(0.05):
            for pid in leaders(children() - before):
                done.wait(0.5)  # it has set up its own handlers, or not yet: both must do
                os.kill(pid, number)
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = trial(lambda: Sleeping(0.01), seconds=30.0, measure_s=20.0)
    finally:
        done.set()
        killer.join()
    assert found.outcome == "crashed"
    assert number.name in found.why


@pytest.mark.more
def test_killed_worker_is_a_crash():
    found = trial(
        lambda: OnStep(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        num_workers=2, envs_per_vector=2,
    )  # fmt: skip
    assert found.outcome == "crashed"
    assert "SIGKILL" in found.why


def test_environment_error_is_raised_to_caller():
    def fail():
        raise RuntimeError("the user's own message")

    with pytest.raises(EnvError, match="the user's own message"):
        trial(lambda: OnStep(fail))


def test_invalid_sizes_are_refused():
    found = trial(Counting, envs_per_vector=3)
    assert found.outcome == "refused"
    assert "does not divide into vectors" in found.why


def test_unpicklable_run_is_refused():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        trial(lambda: Counting() if lock else None)


@repeats("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_process_and_no_directory(tmp_path, number):
    before = children()
    search = python.Python(
        python.command("autoscale", "CartPole-v1", "--again"),
        env=os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (theirs := children() - before) or not set(leaders(theirs)) - {search.pid}:
            assert search.poll() is None
            time.sleep(0.05)  # there is no event of a trial's start to be seen from here
        search.send_signal(number)
        said = search.communicate(timeout=30)[1]
    finally:
        search.kill()
        search.wait()
    assert (search.returncode, said) == (128 + number, "Interrupted.\n")
    assert still_alive(theirs, 10.0) == []
    assert [path for path in tmp_path.iterdir() if path.name.startswith("headrace-")] == []


def test_shared_memory_counts_once():
    ready, ready_w = os.pipe()
    stop, stop_w = os.pipe()
    shared = np.ones(1 << 27, np.uint8)
    alone = sessions.own_bytes([os.getpid()])
    child = os.fork()
    if not child:
        os.write(ready_w, bytes([shared[::4096].min()]))
        select.select([stop], [], [], 60)
        os._exit(0)
    os.read(ready, 1)
    try:
        both = [os.getpid(), child]
        assert sessions.own_bytes(both) < alone + (1 << 26)
        assert sessions.resident_bytes(both) > alone + (1 << 26)
    finally:
        os.close(stop_w)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def seen(*updates, up=0.0, compiles=False, batch=100, measure_s=2.0):
    progress = Progress(batch, compiles, measure_s, up)
    progress.updates += [(at, (i + 1) * batch) for i, at in enumerate(updates)]
    return progress


def test_rate_counts_from_end_of_first_update():
    assert seen(1.0, 2.0, 2.5).verdict(2.6, late=False) is None
    assert seen(1.0, 2.0, 2.5, 3.0).verdict(3.0, late=False) == ("measured", 150.0)
    # of fewer, if they take longer
    assert seen(2.0, 5.0).verdict(5.0, late=False) == ("measured", pytest.approx(100 / 3))
    assert seen(1.0, 2.0).verdict(2.0, late=True) == ("measured", 100.0)


def test_long_first_update_counts():
    assert seen(10.0).verdict(10.0, late=False) == ("measured", 10.0)
    assert seen(10.0, compiles=True).verdict(10.0, late=False) is None
    assert seen(10.0, 13.0, compiles=True).verdict(13.0, late=False) == (
        "measured", pytest.approx(100 / 3),
    )  # fmt: skip


def test_no_update_gives_bound_or_unknown_rate():
    assert seen().verdict(13.0, late=True) == ("slow", 10.0)  # 100 in 13 s, of which 3 for a start
    assert seen(up=None).verdict(13.0, late=True) == ("slow", None)
    assert seen(compiles=True).verdict(13.0, late=True) == ("slow", None)
    assert seen(1.0, compiles=True).verdict(11.0, late=True) == ("slow", 10.0)


def test_hopeless_trial_ends_early():
    assert seen(1.0).verdict(2.9, late=False, to_beat=1000) is None
    assert seen(1.0).verdict(3.0, late=False, to_beat=1000) == ("slow", 50.0)
    assert seen(1.0).verdict(3.0, late=False, to_beat=60) is None  # it may still come near
    assert seen(1.0, 2.0).verdict(3.0, late=False, to_beat=1000) == ("measured", 100.0)


@pytest.mark.more
def test_memory_budget_too_small_for_any_training_is_an_error():
    with pytest.raises(ConfigError, match=r"memory budget is too small.*of 0\.05 GiB"):
        headrace.autoscale(
            Counting, num_workers=0, num_learners=1, num_envs=4, memory_gib=0.05, quiet=True
        )
