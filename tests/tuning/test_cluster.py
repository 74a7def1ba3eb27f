"""Studies on a Ray cluster: the same trials, what ends, and what other machines must see.

Left out: machines that are lost (`tests/faults/test_cluster_studies.py`).
"""

import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import headrace
from headrace.config.checks import OF_CLUSTER
from headrace.errors import ConfigError, MissingExtraError, RunDirError
from headrace.storage import checkpoint, run_dir
from headrace.storage.files import write_whole
from headrace.training.job import RunRequest
from headrace.training.ray import connect
from headrace.tuning.metric import Metric
from headrace.tuning.plan import Plan, read_plan
from headrace.tuning.runners.part import Part
from headrace.tuning.runners.part_actor import TOKEN, check_sees, wait_until_free
from tests.support import Counting, children, still_alive
from tests.tuning.test_study import rows, without_clocks

SIZES = {"num_learners": 1, "num_workers": 0, "learner_threads": 1}
SEARCH = {
    "space": {"lr": {"log": [1e-4, 1e-2]}, "num_epochs": {"choice": [1, 4]}}, "trials": 3,
    "sampler": "random", "parallel": 1, "prune": "none", "final_trials": 1, "final_seeds": 1,
    "quiet": True, "seed": 3, "total_env_steps": 2000,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """One of this machine, which all tests of this file use, as a script's own."""
    before = children()
    with connect.to_cluster("local", 2):
        ours = children() - before
        yield
    assert still_alive(ours, 10) == []


def test_a_machine_sees_the_study_or_says_what_is_wrong(tmp_path):
    study, other = tmp_path / "study", tmp_path / "other"
    study.mkdir()
    other.mkdir()
    write_whole(study / TOKEN, b"ours")
    check_sees(study, "ours")
    for place, said in (
        (tmp_path / "none", f"does not see the study's directory {tmp_path / 'none'}: No such"),
        (other, "does not see the study's directory"),
    ):
        with pytest.raises(RunDirError, match=said) as refused:
            check_sees(place, "ours")
        assert "on shared storage" in str(refused.value)
    write_whole(other / TOKEN, b"another's")
    with pytest.raises(RunDirError, match=f"has another directory at {other}"):
        check_sees(other, "ours")


class _Asked(threading.Event):
    """Says when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_asked = threading.Event()

    def wait(self, timeout=None):
        self.is_asked.set()
        return super().wait(timeout)


def test_a_part_waits_for_a_lost_process_that_still_has_its_run(tmp_path):
    ending = _Asked()
    waiting = threading.Thread(target=wait_until_free, args=[tmp_path, ending, 60.0])
    with run_dir.locked(tmp_path):
        with pytest.raises(RunDirError, match="still in use by a process that the cluster has"):
            wait_until_free(tmp_path, threading.Event(), 0.0)
        waiting.start()
        assert ending.is_asked.wait(60)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_end_of_a_study_is_not_waited_for(tmp_path):
    ending = threading.Event()
    ending.set()
    with run_dir.locked(tmp_path):
        wait_until_free(tmp_path, ending, 1e9)


def test_without_ray_a_study_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"Install it with: .*ray"):
        headrace.tune("CartPole-v1", study=tmp_path / "s", cluster="auto", **SEARCH)
    assert not (tmp_path / "s").exists()


def test_going_on_elsewhere_is_asked_of_the_other_cluster_and_changes_nothing_if_refused(tmp_path):
    folder = tmp_path / "study"
    plan = Plan(
        "tune", "CartPole-v1", "ppo", {"deterministic": True}, SIZES, [],
        {"lr": {"log": [1e-4, 1e-2]}}, "random", "none", Metric(), 1, 1, 0, [0], [1000], 0, 0, [],
        0.0, headrace.__version__,
    )  # fmt: skip
    folder.mkdir()
    plan.write(folder)
    before = (folder / "study.json").read_bytes()
    with pytest.raises(ConfigError, match="cluster='localhost:1'"):
        headrace.tune(study=folder, cluster="localhost:1", quiet=True)
    with pytest.raises(ConfigError, match=r"^gamma: the study in .* goes on as it began"):
        headrace.tune(study=folder, trials=9, gamma=0.5, quiet=True)
    assert (folder / "study.json").read_bytes() == before


@pytest.mark.parametrize("name", OF_CLUSTER)
def test_a_run_of_a_study_is_on_one_machine(tmp_path, name):
    with pytest.raises(ConfigError, match="each run of a study is on one machine"):
        headrace.sweep(
            "CartPole-v1", {"lr": [1e-3]}, study=tmp_path / "s", cluster="local", **{name: 2}
        )
    assert not (tmp_path / "s").exists()


@pytest.mark.more
def test_the_same_trials_as_on_this_machine(cluster, tmp_path):
    """A file names the cluster, as a flag would. The study then goes on without it."""
    config = tmp_path / "settings.toml"
    config.write_text('cluster = "local"\n')
    there = headrace.tune("CartPole-v1", study=tmp_path / "ray", config=config, **SEARCH)
    here = headrace.tune("CartPole-v1", study=tmp_path / "here", **SEARCH)
    assert without_clocks(there.dir) == without_clocks(here.dir)
    for run in ("trials/0000", "trials/0002", "fresh/0000-s1003"):
        assert rows(there.dir / run) == rows(here.dir / run)
    without_time = [
        re.sub(r"[\d.]+ minutes", "", (study.dir / "best.toml").read_text())
        for study in (there, here)
    ]
    assert without_time[0] == without_time[1]
    assert read_plan(there.dir).cluster == "local"
    assert sorted(p.name for p in there.dir.iterdir()) == sorted(p.name for p in here.dir.iterdir())
    there = headrace.tune(study=there.dir, cluster="", trials=4, quiet=True)
    here = headrace.tune(study=here.dir, trials=4, quiet=True)
    assert without_clocks(there.dir) == without_clocks(here.dir)
    assert read_plan(there.dir).cluster == ""


@pytest.fixture
def runner(cluster, tmp_path):
    """One that runs one part at a time."""
    from headrace.tuning.runners.cluster import ClusterRunner  # Ray listens when it is imported

    before = children()
    runner = ClusterRunner(1, 1, tmp_path, print)
    yield runner
    runner.close()
    ours = [pid for pid in children() - before if os.getsid(pid) == pid]
    assert still_alive(ours, 10) == []


@pytest.mark.slow
def test_a_part_is_saved_or_ended_and_the_runner_goes_on(runner, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    settings = {
        "total_env_steps": 10**9, "num_envs": 1, "num_steps": 16, "num_workers": 0,
        "num_learners": 1, "env_kwargs": {"pipe": str(pipe)}, "checkpoint_every_s": 1e6,
    }  # fmt: skip
    request = RunRequest(settings, "tests.tuning.test_study:Announcing")
    part = Part(request, str(tmp_path / "trials/0"), 10**9, 0, 0)
    runner.start("stopped", part)
    assert runner.is_full
    pipe.read_bytes()  # until the pipe was opened and closed
    (ended,) = runner.stop()
    assert (ended.key, ended.outcome) == ("stopped", "stopped")
    saved = checkpoint.newest(tmp_path / "trials/0").manifest["counters"]["env_steps"]
    assert runner.keys == []
    runner.start("measured", replace(part, until=saved + 16))
    (ended,) = runner.wait(time.monotonic() + 100)
    assert (ended.key, ended.outcome) == ("measured", "measured")
    assert ended.measured["env_steps"] == saved + 16
    runner.start("cancelled", replace(part, run_dir=str(tmp_path / "trials/1")))
    pipe.read_bytes()
    runner.cancel("cancelled")
    assert runner.keys == []
    assert not run_dir.is_locked(tmp_path / "trials/1")


class Doomed(Counting):
    """Kills the actor that its process belongs to."""

    def step(self, action):
        server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(server[1]), signal.SIGKILL)
        threading.Event().wait()


@pytest.mark.slow
def test_a_part_that_is_lost_too_often_has_failed(runner, tmp_path, capfd):
    settings = {"num_envs": 1, "num_workers": 0, "num_learners": 1}
    request = RunRequest(settings, "tests.tuning.test_cluster:Doomed")
    runner.start("key", Part(request, str(tmp_path / "trials/0"), 64, 0, 0))
    (ended,) = runner.wait(time.monotonic() + 100)
    assert (ended.key, ended.outcome) == ("key", "crashed")
    assert ended.why.startswith("its process or machine was lost 4 times. The last time: ")
    assert capfd.readouterr().out.count("0: its process or machine was lost (") == 3
    assert runner.keys == []


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_study_ends_it_in_words(runner, tmp_path):
    """As if it were on another disk: machines made of processes have the same one."""
    (tmp_path / TOKEN).unlink()
    part = Part(RunRequest({"env": "CartPole-v1"}), str(tmp_path / "trials/0"), 64, 0, 0)
    runner.start("key", part)
    (ended,) = runner.wait(time.monotonic() + 100)
    assert ended.outcome == "disk"
    assert f"does not see the study's directory {tmp_path}" in ended.why
    assert not (tmp_path / "trials").exists()
