"""Runs sent to real trackers, and read back from what each has written.

A tracker whose package is not installed is skipped: `make test-trackers` installs all.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.catalog import extras
from headrace.errors import install_command
from headrace.storage import run_dir as rundir
from headrace.tools.trackers.api import TRACKERS
from headrace.tools.trackers.beside import Beside
from headrace.training.log import MetricsLog, read_metrics
from tests import python

TINY = {"num_envs": 4, "num_steps": 8, "envs_per_vector": 4, "num_workers": 0, "quiet": True}
WITHIN_S = 60
SPEEDS = ("wall_s", "env_steps_per_s")
UNSTABLE = ("seconds/", "ledger/")  # in the rows of one update a second


class Trackio:
    """What Trackio has."""

    def __init__(self, folder):
        self._file = folder / "trackio/headrace.db"
        self.env = {"TRACKIO_DIR": str(folder / "trackio")}

    def rows(self):
        """All rows of all runs: run, step, metrics."""
        if not self._file.exists():
            return []
        query = "select run_name, step, metrics from metrics order by id"
        return [(name, step, json.loads(text)) for name, step, text in _query(self._file, query)]

    def settings(self):
        [(text,)] = _query(self._file, "select config from configs")
        return json.loads(text)


class Mlflow:
    """What MLflow has, in SQLite."""

    def __init__(self, folder):
        self._file = folder / "mlflow.db"
        self.env = {"MLFLOW_TRACKING_URI": f"sqlite:///{self._file}"}

    def rows(self):
        rows = {}
        query = (
            "select name, step, key, value from metrics join runs using (run_uuid) order by step"
        )
        for name, step, key, value in _query(self._file, query) if self._file.exists() else []:
            rows.setdefault((name, step), []).append((key, value))
        assert all(len(dict(pairs)) == len(pairs) for pairs in rows.values()), (
            "a row is twice there"
        )
        return [(name, step, dict(pairs)) for (name, step), pairs in rows.items()]

    def settings(self):
        return dict(_query(self._file, "select key, value from params"))

    def ids(self):
        return [run_id for (run_id,) in _query(self._file, "select run_uuid from runs")]

    def status(self):
        return [status for (status,) in _query(self._file, "select status from runs")]


class Wandb:
    """What W&B has on this machine, in its own reader's words."""

    def __init__(self, folder):
        self._folder = folder
        self.env = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}

    def rows(self):
        from headrace.tools.trackers.to_wandb import records_of

        rows, name = [], None
        for file in sorted(self._folder.glob("wandb/offline-run-*/*.wandb")):
            for record in records_of(file):
                if record.HasField("run"):
                    name = record.run.display_name
                if record.HasField("history"):
                    items = record.history.item
                    values = {
                        "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items
                    }
                    values = {k: v for k, v in values.items() if not k.startswith("_")}
                    rows.append((name, record.history.step.num, values))
        return rows

    def settings(self):
        from headrace.tools.trackers.to_wandb import records_of

        [file, *_] = self._folder.glob("wandb/offline-run-*/*.wandb")
        run = next(record.run for record in records_of(file) if record.HasField("run"))
        return {item.key: json.loads(item.value_json) for item in run.config.update}


def _query(file, query):
    try:
        connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()
    except sqlite3.OperationalError as error:  # its tables are being made
        assert any(words in str(error) for words in ("no such table", "no such column", "locked"))
        return []


KINDS = {"trackio": Trackio, "mlflow": Mlflow, "wandb": Wandb}


# MLflow takes many seconds to make its database.
@pytest.fixture(params=["trackio", "wandb", pytest.param("mlflow", marks=pytest.mark.slow)])
def tracker(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def store(tracker, tmp_path):
    return KINDS[tracker](tmp_path)


@pytest.fixture
def trackio(tmp_path):
    pytest.importorskip("trackio")
    return Trackio(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real run of 64 updates."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    headrace.train("CartPole-v1", run_dir=run_dir, total_env_steps=2048, seed=1, **TINY)
    assert len(read_metrics(run_dir)) == 64
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of that run, to be sent under a name of its own."""
    return shutil.copytree(trained, tmp_path / "my_run")


def track(run_dir, tracker, store, *more):
    command = python.command("track", run_dir, "--to", tracker, "--json", *more)
    done = python.run(command, cwd=run_dir.parent, env=os.environ | store.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextlib.contextmanager
def started(*words, cwd, store):
    """A `headrace` process, with its output; it is killed if it has not ended by then."""
    process = python.Python(
        python.command(*words), cwd=cwd, env=os.environ | store.env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_until(condition, what):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {WITHIN_S} s: {what}"
        select.select([], [], [], 0.05)


def assert_all_there(store, run_dir, name=None):
    """Each row once, in order, with its numbers by their names."""
    expected = [
        (name or run_dir.name, row["env_steps"], {k: v for k, v in row.items() if v is not None})
        for row in read_metrics(run_dir)
    ]
    found = store.rows()
    assert [(run, step) for run, step, _ in found] == [(run, step) for run, step, _ in expected]
    for (_, _, there), (_, _, here) in zip(found, expected, strict=True):
        assert there == pytest.approx(here)


def test_a_finished_run_is_sent_once(tracker, store, run_dir):
    assert any(None in row.values() for row in read_metrics(run_dir))  # these are left out
    assert track(run_dir, tracker, store) == {"tracker": tracker, "rows": 64, "env_steps": 2048}
    assert_all_there(store, run_dir)
    settings = store.settings()
    assert str(settings["seed"]) == "1"
    assert settings["env"] == "CartPole-v1"
    assert float(settings["lr"]) == 0.001
    assert track(run_dir, tracker, store) == {"tracker": tracker, "rows": 0, "env_steps": 2048}
    assert_all_there(store, run_dir)


def waits_for_lock(pid):
    return re.search(rf"-> FLOCK +ADVISORY +WRITE +{pid} ", Path("/proc/locks").read_text())


def test_a_run_is_followed_and_a_killed_tracker_begun_again(tracker, store, run_dir):
    """A second process waits for the first to end, and goes on where that was killed."""
    rows = read_metrics(run_dir)
    command = ["track", run_dir, "--to", tracker, "--follow"]
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(contextlib.ExitStack())
        lock.enter_context(rundir.locked(run_dir))
        log = MetricsLog(run_dir, 32, 1024)
        with started(*command, cwd=run_dir.parent, store=store) as first:
            wait_until(store.rows, "rows of a run that goes on")
            second = stack.enter_context(started(*command, cwd=run_dir.parent, store=store))
            wait_until(lambda: waits_for_lock(second.pid), "the second process at the lock")
            first.send_signal(signal.SIGKILL)
            assert first.wait(WITHIN_S) == -signal.SIGKILL
        before = len(store.rows())
        assert 0 < before <= 32
        for row in rows[32:48]:
            log.write(row)
        log.flush()
        wait_until(lambda: len(store.rows()) > before, "more rows of the run")
        assert second.poll() is None
        for row in rows[48:]:
            log.write(row)
        log.close()
        lock.close()
        out, _ = second.communicate(timeout=WITHIN_S)
    assert second.returncode == 0, out
    assert read_metrics(run_dir) == rows
    assert_all_there(store, run_dir)


def test_a_signal_ends_it_when_the_tracker_is_closed(trackio, run_dir):
    command = ["track", run_dir, "--to", "trackio", "--follow"]
    with (
        rundir.locked(run_dir),
        started(*command, cwd=run_dir.parent, store=trackio) as tracker,
    ):
        wait_until(trackio.rows, "rows of a run that goes on")
        tracker.send_signal(signal.SIGTERM)
        out, _ = tracker.communicate(timeout=WITHIN_S)
    assert tracker.returncode == 128 + signal.SIGTERM
    assert "* Run finished." in out  # says Trackio
    assert "Interrupted." in out
    assert_all_there(trackio, run_dir)


def test_a_resumed_run_goes_on_in_the_tracker(tracker, store, tmp_path):
    run_dir = tmp_path / "resumed"
    run = headrace.train("CartPole-v1", run_dir=run_dir, total_env_steps=320, seed=1, **TINY)
    assert track(run_dir, tracker, store)["rows"] == 10
    run.resume(total_env_steps=480, quiet=True)
    assert track(run_dir, tracker, store) == {"tracker": tracker, "rows": 5, "env_steps": 480}
    assert_all_there(store, run_dir)


def test_a_run_is_tracked_beside_its_training(trackio, tmp_path):
    """The tracker is stopped before it does anything: training goes on, and makes the same bits.

    Then it goes on, when the run has long ended, and sends all rows.
    """
    args = ["--deterministic", "--num-workers", 0, "--total-env-steps", 4096, "--seed", 3]
    command = ["train", "CartPole-v1", *args, "--run-dir"]
    env = os.environ | trackio.env
    alone = python.run(python.command(*command, "alone"), cwd=tmp_path, env=env)
    assert alone.returncode == 0, alone.stderr
    with started(
        *command, "tracked", "--track", "trackio", cwd=tmp_path, store=trackio
    ) as training:
        wait_until(lambda: tracker_of(training.pid), "a tracker beside the training")
        pid = tracker_of(training.pid)
        os.kill(pid, signal.SIGSTOP)
        assert training.poll() is None, "the training had ended before the tracker was stopped"
        out, _ = training.communicate(timeout=WITHIN_S)
    assert training.returncode == 0, out
    assert f"process {pid} ends by itself" in out
    assert trackio.rows() == []
    rows = {name: read_metrics(tmp_path / name) for name in ("alone", "tracked")}
    assert len(rows["alone"]) > 2
    assert learned(rows["alone"]) == learned(rows["tracked"])
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGCONT)
    wait_for_end(fd)
    log = (tmp_path / "tracked/trackers/trackio.log").read_text()
    assert "which has" in log, log
    assert_all_there(trackio, tmp_path / "tracked")


def test_a_resumed_run_is_tracked_beside_its_training(trackio, run_dir):
    assert track(run_dir, "trackio", trackio)["rows"] == 64
    command = ["resume", run_dir, "--total-env-steps", 2560, "--track", "trackio"]
    with started(*command, cwd=run_dir.parent, store=trackio) as training:
        wait_until(lambda: tracker_of(training.pid), "a tracker beside the training")
        fd = os.pidfd_open(tracker_of(training.pid))
        out, _ = training.communicate(timeout=WITHIN_S)
    assert training.returncode == 0, out
    wait_for_end(fd)
    assert_all_there(trackio, run_dir)
    assert len(trackio.rows()) == 80


def wait_for_end(pidfd):
    assert select.select([pidfd], [], [], WITHIN_S)[0], "the tracker did not end by itself"
    os.close(pidfd)


def learned(rows):
    """The rows without what depends on time."""
    return [
        {k: v for k, v in row.items() if k not in SPEEDS and not k.startswith(UNSTABLE)}
        for row in rows
    ]


def tracker_of(pid):
    """The process beside a training, by its command; None if there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"track" in words:
            return int(child)
    return None


def test_a_tracker_that_refuses_is_an_error_with_its_words(trackio, run_dir):
    env = os.environ | trackio.env | {"TRACKIO_SERVER_URL": "nonsense"}
    done = python.run(python.command("track", run_dir, "--to", "trackio"), cwd="/", env=env)
    assert done.returncode == 1
    assert "trackio failed: ValueError: `server_url` must be a full URL" in done.stderr
    assert "only what is missing is sent" in done.stderr


def test_a_failed_tracker_is_told_after_the_training(trackio, run_dir, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "nonsense")
    beside = Beside("trackio")
    beside.start(run_dir)
    log = run_dir / "trackers/trackio.log"
    wait_until(lambda: "trackio failed: ValueError" in log.read_text(), "the error in the log")
    expected = r"exit code 1\): see .*trackio.log\nTo send the rest: headrace track .* --to trackio"
    with pytest.warns(UserWarning, match=expected):
        assert beside.end() == ""


def test_a_process_that_cannot_be_started_is_a_warning(trackio, run_dir):
    beside = Beside("trackio")
    (run_dir / "trackers").write_text("no folder")
    with pytest.warns(UserWarning, match="File exists. Training goes on. To send them: headrace"):
        beside.start(run_dir)
    assert beside.end() == ""


def test_another_project_is_refused_for_a_run_that_has_one(trackio, run_dir):
    assert track(run_dir, "trackio", trackio, "--project", "headrace")["rows"] == 64
    command = python.command("track", run_dir, "--to", "trackio", "--project", "other")
    done = python.run(command, env=os.environ | trackio.env)
    assert done.returncode == 2
    assert "are in the project headrace of trackio.\nLeave it out." in done.stderr


def test_of_two_runs_of_one_name_trackio_finds_the_newer(trackio, run_dir, tmp_path):
    newer = shutil.copytree(run_dir, tmp_path / "elsewhere" / run_dir.name)
    assert track(run_dir, "trackio", trackio)["rows"] == 64
    assert track(newer, "trackio", trackio)["rows"] == 64
    assert track(newer, "trackio", trackio)["rows"] == 0
    command = python.command("track", run_dir, "--to", "trackio")
    done = python.run(command, env=os.environ | trackio.env)
    assert done.returncode == 1
    assert "two run directories have the same name" in done.stderr
    assert len(trackio.rows()) == 128


@pytest.mark.slow
def test_a_run_that_was_deleted_in_mlflow_is_sent_anew(run_dir, tmp_path):
    pytest.importorskip("mlflow")
    store = Mlflow(tmp_path)
    track(run_dir, "mlflow", store)
    (run_id,) = store.ids()
    program = "import sys, mlflow; mlflow.MlflowClient().delete_run(sys.argv[1])"
    command = [sys.executable, "-c", program, run_id]
    assert python.run(command, env=os.environ | store.env).returncode == 0
    track(run_dir, "mlflow", store)
    assert len(store.ids()) == 2


@pytest.mark.slow
def test_a_run_that_vanished_has_failed_in_mlflow(run_dir, tmp_path):
    pytest.importorskip("mlflow")
    store = Mlflow(tmp_path)
    track(run_dir, "mlflow", store)
    assert store.status() == ["FINISHED"]
    mark = rundir.Mark(1, "host", "", may_have_workers=False)
    (run_dir / ".running").write_text(json.dumps(vars(mark)))
    track(run_dir, "mlflow", store)
    assert store.status() == ["FAILED"]
    with rundir.locked(run_dir):
        track(run_dir, "mlflow", store)
    assert store.status() == ["RUNNING"]


def test_a_missing_package_is_said_before_the_training(tmp_path):
    lacking = [name for name in TRACKERS if extras.version(name) is None]
    if not lacking:
        pytest.skip("the packages of all trackers are installed")
    command = python.command("train", "CartPole-v1", "--run-dir", "run", "--track", lacking[0])
    done = python.run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert f"To send metrics to {lacking[0]}, its package is needed" in done.stderr
    assert f"To install it: {install_command(lacking[0])}" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["train", "CartPole-v1", "--track"], ["track", "run", "--to"]])
def test_an_unknown_tracker_is_refused(verb, tmp_path):
    done = python.run(python.command(*verb, "mlfow"), cwd=tmp_path)
    assert done.returncode == 2
    assert "'mlfow' is no tracker: expected one of trackio, mlflow, wandb." in done.stderr
    assert "Did you mean mlflow?" in done.stderr


def test_every_tracker_has_an_extra():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for name in TRACKERS:
        assert f'\n{name} = ["{name}>=' in project
