"""How runs on a cluster end: by errors, by signals, and with their driver (F03, F12, F20).

Left out: faults that they survive (`test_cluster.py`, `test_cluster_more.py`).
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from headrace.storage import checkpoint
from tests.faults.cluster_support import (
    GOAL,
    LEARNER,
    PPO,
    ROOT,
    WORKER,
    Run,
    actors,
    machines,
    paced,
    until,
    workers,
)
from tests.faults.test_env import assert_balanced
from tests.support import children, still_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

OWN = """
import os, pathlib, time
from headrace.envs.faulty import Faulty
HERE = pathlib.Path(__file__).parent

class OwnError(Exception):
    def __init__(self, what, number):  # two arguments: it cannot be pickled as it is
        super().__init__(f"{what}: {number}")

class Env(Faulty):
    def step(self, action):
        if self._t == 20:
            (HERE / "raised").touch()
            raise OwnError("no step", 21)
        return super().step(action)

def there_only():
    # Fails where it is not made by the one that the user has started
    import __main__
    if "headrace" not in getattr(__main__, "__file__", ""):
        raise OwnError("no simulator", 7)
    return Faulty()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a module that is there on all machines."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def local(*words):
    """Words of a short run on a cluster of its own."""
    return [*words, "--cluster", "local", "--num-workers", 2, "--num-envs", 4, "--num-steps", 16]


def test_f03_an_environment_s_exception_is_its_own(own, measured):
    with Run(own, *local("own:Env", *PPO)) as run:
        until((own / "raised").exists, 150, lambda: run.text)
        raised = time.monotonic() - (time.time() - (own / "raised").stat().st_mtime)
        run.process.wait()
        ended = time.monotonic()
        run.ended(code=1)
    seen = next(when for when, line in run.err if line.startswith("headrace train: "))
    first = next(line for _, line in run.err if line.startswith("headrace train: "))
    assert first == "headrace train: Traceback (most recent call last):", run.text
    assert "own.py" in run.text and re.search(r"^own\.OwnError: no step: 21$", run.text, re.M)
    assert re.search(r"The environment failed in step 21 with action [01], env \d of", run.text)
    measured(
        "F03",
        "exception in a step, cluster",
        detect_s=seen - raised,
        within_s=2,
        recover_s=ended - seen,
    )


def test_f03_an_environment_that_cannot_be_made_there(own):
    with Run(own, *local("own:there_only", *PPO)) as run:
        run.ended(code=1)
    first = next(line for _, line in run.err if line.startswith("headrace train: "))
    assert first == "headrace train: Traceback (most recent call last):", run.text
    assert re.search(r"^own\.OwnError: no simulator: 7$", run.text, re.M)
    assert not run.dir.exists()  # it never came to be a run


LACKS = """
import multiprocessing
from headrace.envs.faulty import Faulty as Env

if multiprocessing.parent_process():  # a worker's process, which a host has forked
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
"""


def test_f03_package_that_a_worker_s_machine_lacks_is_named(tmp_path):
    """As if it were not there: machines made of processes have the same files."""
    (tmp_path / "mine.py").write_text(LACKS)
    with (
        machines({"CPU": 1} | LEARNER, {"CPU": 2} | WORKER) as cluster,
        Run(
            tmp_path, "mine:Env", "--cluster", cluster.address, "--num-workers", 2, *PPO,
            "--learner-resources", "learner=1", "--worker-resources", "worker=1",
        ) as run,
    ):  # fmt: skip
        run.ended(code=1)
    assert "There is no module 'mine'" in run.text
    assert "must be installed there" in run.text


def anywhere(words):
    """On machines that have nothing special."""
    return words[: words.index("--learner-resources")] + words[words.index("worker=1") + 1 :]


def group_of(run):
    """All processes of a run, and of the Ray that it has started."""
    of_run = str(run.process.pid)
    found = set()
    for pid in {run.process.pid} | children():
        if of_run in ancestors(pid):
            found.add(pid)
    return found


def ancestors(pid):
    """It, its parent, ..."""
    found = []
    while str(pid) not in ("0", "1"):
        found.append(str(pid))
        try:
            pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            break
    return found


@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)]
)
def test_f12_a_signal_to_a_run_with_a_ray_of_its_own(
    tmp_path, measured, monkeypatch, number, times
):
    """SIGINT as a terminal sends it: to all processes of the group."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    words = anywhere(paced("local", tmp_path, *PPO, "--checkpoint-every-s", 1))
    with Run(tmp_path, *words) as run:
        run.updates(5)
        whole = group_of(run)
        assert len(whole) > 5
        sent = time.monotonic()
        run.signal(number, times, group=number == signal.SIGINT)
        summary = run.ended(code=128 + number)
        ended = time.monotonic() - sent
    assert still_alive(whole, 10) == []
    found = checkpoint.newest(run.dir).manifest["counters"]["env_steps"]
    if times == 1:
        assert_balanced(summary)
        assert found == summary["env_steps"] > 0
    measured(
        "F12", f"{number.name}{' twice' * (times > 1)}, on a cluster of its own", recover_s=ended,
        recover_within_s=10,
    )  # fmt: skip


@pytest.mark.parametrize("where", ["local", "there"])
def test_f20_the_driver_is_killed_and_the_run_resumed(tmp_path, measured, where):
    with machines({"CPU": 1} | LEARNER, {"CPU": 2} | WORKER) as cluster:
        address = "local" if where == "local" else cluster.address
        words = paced(address, tmp_path, *PPO, "--checkpoint-every-s", 1)
        words = anywhere(words) if where == "local" else words
        with Run(tmp_path, *words) as run:
            run.updates(5)
            theirs = (
                group_of(run)
                if where == "local"
                else {*workers(), *actors("HostActor"), *actors("LearnerActor")}
            )
            assert len(theirs) >= 3, theirs
            os.kill(run.process.pid, signal.SIGKILL)
            killed = time.monotonic()
            assert still_alive(theirs, 50) == []
            gone = time.monotonic() - killed
        assert not any([*workers(), *actors("HostActor"), *actors("LearnerActor")])
        (tmp_path / "hurry").touch()
        env = "tests.faults.cluster_support:Paced"
        with Run(tmp_path, "--env", env, "--cluster", address, verb="resume") as resumed:
            summary = resumed.ended()
    assert summary["env_steps"] == GOAL
    assert_balanced(summary)
    what = "Ray of its own" if where == "local" else "Ray that was there"
    measured(
        "F20", f"kill -9 of the driver, {what}: nothing is left", recover_s=gone,
        recover_within_s=10,
    )  # fmt: skip


def test_f20_the_cluster_itself_is_lost_and_the_run_resumed_without_it(
    tmp_path, measured, monkeypatch
):
    """Ray waits a minute for its head, and then ends who needs it."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with machines({"CPU": 1} | LEARNER, {"CPU": 2} | WORKER) as cluster:
        words = paced(cluster.address, tmp_path, *PPO, "--checkpoint-every-s", 1)
        with Run(tmp_path, *words) as run:
            run.updates(5)
            theirs = {*workers(), *actors("HostActor"), *actors("LearnerActor")}
            [head] = cluster.head_node.all_processes["gcs_server"]
            head.process.kill()
            killed = time.monotonic()
            run.process.wait(300)
            ended = time.monotonic() - killed
            assert run.process.returncode != 0
            run.heard("Failed to connect to GCS")
            for node in cluster.list_all_nodes():  # who finds that its machine's has ended, ends
                [raylet] = node.all_processes["raylet"]
                raylet.process.wait(300)
            assert still_alive(theirs, 50) == []
    (tmp_path / "hurry").touch()
    env = "tests.faults.cluster_support:Paced"
    with Run(tmp_path, "--env", env, "--cluster", "", verb="resume") as resumed:
        summary = resumed.ended()
    assert summary["env_steps"] == GOAL
    assert_balanced(summary)
    measured("F20", "kill -9 of Ray's head", recover_s=ended, recover_within_s=70)
