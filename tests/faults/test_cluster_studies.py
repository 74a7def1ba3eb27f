"""Studies on a cluster lose machines, actors and their own command, and go on (F12, F20).

Left out: what needs no machines of its own (`tests/tuning/test_cluster.py`).
"""

import contextlib
import json
import os
import signal
import time

import pytest

import headrace
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from headrace.tuning.plan import read_trials
from tests.faults.cluster_support import ROOT, Run, actors, machines, raylet_of, until
from tests.faults.test_cluster_ends import ancestors, group_of
from tests.faults.test_cluster_more import drain
from tests.support import still_alive
from tests.tuning.test_study import rows

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

ENV = "tests.faults.cluster_support:Paced"
GOAL = 2048
SETTINGS = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "total_env_steps": GOAL}


def study(cluster, folder, *words):
    """A study of three runs, whose steps take 20 s until they are told to hurry."""
    space = folder / "space.toml"
    space.write_text("lr = { log = [1e-4, 1e-2] }\n")
    flags = [w for name, n in SETTINGS.items() for w in (f"--{name.replace('_', '-')}", n)]
    return Run(
        folder, ENV, "--env-kwargs", f"folder={folder}", "faults=", "--cluster", cluster,
        "--space", space, "--trials", 3, "--sampler", "random", "--prune", "none", *flags,
        "--metric", "mean_return", "--final-trials", 0, *words, verb="tune",
    )  # fmt: skip


def pid_of(run, number):
    """The process of a trial, once there is one."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((run.dir / f"trials/{number:04d}/.running").read_text())["pid"]
    return None


def has_learned(run, number):
    """Whether a trial has written the metrics of an update."""
    file = run.dir / f"trials/{number:04d}/metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


def saved(run, number):
    """Env steps of a trial's newest checkpoint."""
    folder = run.dir / f"trials/{number:04d}"
    if not any(folder.glob("checkpoints/step_*")):
        return 0
    return checkpoint.newest(folder).manifest["counters"]["env_steps"]


def hurried(run, within_s=300):
    """The trials of a study that comes to its end."""
    (run.dir.parent / "hurry").touch()
    found = run.ended(within_s)["trials"]
    assert [row["state"] for row in found] == ["whole"] * 3
    return found


def assert_as_run_through(run, number, folder):
    """A trial's metrics are those of a run that nothing cut."""
    trial = read_trials(run.dir)[number]
    through = headrace.train(
        ENV, run_dir=folder / f"through{number}", quiet=True, deterministic=True,
        num_learners=1, learner_threads=1, env_kwargs={"folder": str(folder), "faults": ""},
        **SETTINGS | trial.changes,
    )  # fmt: skip
    assert rows(run.dir / f"trials/{number:04d}") == rows(through.dir)


def machine_of(cluster, pid):
    """The machine that a process is on."""
    above = ancestors(pid)
    return next(n for n in cluster.list_all_nodes() if str(raylet_of(n)) in above)


def test_f20_machines_and_actors_of_a_study_are_lost(tmp_path, measured):
    with (
        machines({"CPU": 0}, {"CPU": 1}, {"CPU": 1}) as cluster,
        study(cluster.address, tmp_path, "--checkpoint-every-s", 1) as run,
    ):
        run.heard("as many as there is room for at a time")
        until(lambda: saved(run, 0) and saved(run, 1), 150, lambda: run.text)
        pids = pid_of(run, 0), pid_of(run, 1)
        one, other = (machine_of(cluster, pid) for pid in pids)
        assert one is not other
        before = saved(run, 1)
        cluster.remove_node(other, allow_graceful=False)
        lost = time.monotonic()
        seen = run.heard(r"0001: its process or machine was lost")
        assert still_alive([pids[1]], 20) == []  # no process that nobody hears goes on
        [actor] = actors("PartActor", raylet_of(one))
        os.kill(actor, signal.SIGKILL)
        run.heard(r"0000: its process or machine was lost")
        until(lambda: pid_of(run, 0) not in (None, pids[0]), 150, lambda: run.text)
        hurried(run)
        until(lambda: not actors("PartActor"), 20, lambda: actors("PartActor"))
    again = [row["env_steps"] for row in read_metrics(run.dir / "trials/0001")]
    assert again == sorted(set(again))
    assert before > 0
    for number in (0, 1):
        assert_as_run_through(run, number, tmp_path)
    measured("F20", "a machine of a study is lost", detect_s=seen - lost, within_s=30)


def test_f20_a_part_leaves_a_machine_before_it_is_taken_away(tmp_path):
    """It makes no checkpoint by itself: what it goes on from was saved for that."""
    with (
        machines({"CPU": 0}, {"CPU": 1}, {"CPU": 1}) as cluster,
        study(cluster.address, tmp_path, "--checkpoint-every-s", 1e6, "--parallel", 1) as run,
    ):
        pid = until(lambda: pid_of(run, 0), 150, lambda: run.text)
        until(lambda: has_learned(run, 0), 150, lambda: run.text)
        drain(cluster, machine_of(cluster, pid), 60)
        run.heard("0000: its machine is about to be taken away")
        until(lambda: saved(run, 0), 60, lambda: run.text)
        assert saved(run, 0) < GOAL
        hurried(run)
    assert "was lost" not in run.text
    assert_as_run_through(run, 0, tmp_path)


def test_f12_ctrl_c_saves_a_study_on_a_cluster_of_its_own_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    words = ["--parallel", 2, "--checkpoint-every-s", 1e6]
    with study("local", tmp_path, *words) as run:
        until(lambda: has_learned(run, 0) and has_learned(run, 1), 150, lambda: run.text)
        whole = group_of(run)
        assert {pid_of(run, 0), pid_of(run, 1)} <= whole
        run.signal(signal.SIGINT, group=True)
        run.ended(code=130)
    assert still_alive(whole, 20) == []
    assert f"To go on: headrace tune {ENV} --resume {run.dir}" in run.text
    assert all(0 < saved(run, number) < GOAL for number in (0, 1))
    (tmp_path / "hurry").touch()
    headrace.tune(ENV, study=run.dir, cluster="", quiet=True)
    assert [trial.state for trial in read_trials(run.dir)] == ["whole"] * 3
    assert_as_run_through(run, 1, tmp_path)
