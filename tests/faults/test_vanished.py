"""A learner's process that ends without a word, and what the next one says of it."""

import os
import signal

import pytest

from headrace.envs.faulty import Faulty
from headrace.storage import checkpoint, run_dir
from tests.faults.support import FLAGS, run
from tests.python import command

pytestmark = pytest.mark.fault_a

ENV = "headrace.envs.faulty:Faulty"
FIRST_UPDATE = 4 * 16


class Interrupted(Faulty):
    """Signals its own process at its N-th step, once or twice."""

    def __init__(self, at=0, times=0):
        super().__init__()
        self.at, self.times = at, times

    def step(self, action):
        if self._total_steps == self.at:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def train(folder, *more, env=ENV):
    words = ("train", env, *FLAGS, "--run-dir", "run", "--checkpoint-every-s", 0)
    return run(command(*words, "--total-env-steps", 20 * FIRST_UPDATE, *more), folder)


def resume(folder, *more, env=ENV):
    return run(command("resume", "run", "--env", env, *more), folder)


def test_the_next_start_says_that_the_last_process_vanished(tmp_path):
    kinds = {"exit": 3, "segv": -signal.SIGSEGV}
    for kind, code in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()
        died = train(folder, "--env-kwargs", f"faults={kind}@100", f"once={folder}")
        assert died.returncode == code
        saved = checkpoint.newest(folder / "run")
        steps = saved.manifest["counters"]["env_steps"]
        assert steps > FIRST_UPDATE
        expected = [
            "The last process of the run in run vanished: process ",
            f", after {steps:,} env steps; its last checkpoint is "
            f"run/checkpoints/{saved.path.name}.",
            "With --num-workers 1 or more",
            "Python's stack in the standard error of that process.",
        ]
        again = train(folder)
        assert again.returncode == 1
        assert again.stderr.startswith("headrace train: The run directory run holds a run already")
        resumed = resume(folder, "--num-workers", 1)
        assert resumed.returncode == 0, resumed.stderr
        for words in expected:
            assert words in again.stderr
            assert words in resumed.stderr
        quiet = resume(folder)
        assert quiet.returncode == 0
        assert quiet.stderr == ""
        assert "vanished" not in train(folder).stderr


def test_a_process_that_vanishes_in_its_first_update_had_saved_nothing(tmp_path):
    assert train(tmp_path, "--env-kwargs", "faults=kill@5").returncode == -signal.SIGKILL
    assert "after 0 env steps; it had saved no checkpoint." in train(tmp_path).stderr
    resumed = resume(tmp_path)
    assert resumed.returncode == 1
    assert "vanished" in resumed.stderr
    assert "What ended before its first one can only be begun again" in resumed.stderr


def test_workers_are_not_suggested_where_they_are(tmp_path):
    words = ["--num-workers", 1, "--on-worker-loss", "fail"]
    killed = "tests.faults.test_vanished:KillsTheLearner"
    assert train(tmp_path, *words, env=killed).returncode == -signal.SIGKILL
    said = train(tmp_path, env=killed).stderr
    assert "vanished" in said
    assert "--num-workers" not in said


class KillsTheLearner(Faulty):
    """Kills the learner of its worker at its 200th step."""

    def step(self, action):
        if self._total_steps == 200:
            os.kill(self.learner, signal.SIGKILL)
        return super().step(action)

    @property
    def learner(self):
        """The process that holds the run's directory; the worker's parent is the fork server."""
        with open("run/.lock") as lock:
            return int(lock.read())


@pytest.mark.parametrize(
    ("env", "kwargs", "code"),
    [
        (ENV, ["faults=crash@100"], 1),
        ("tests.faults.test_vanished:Interrupted", ["at=100", "times=1"], 130),
        ("tests.faults.test_vanished:Interrupted", ["at=100", "times=2"], 130),
    ],
    ids=["exception", "Ctrl-C", "Ctrl-C twice"],
)
def test_what_ends_with_a_word_leaves_no_mark(tmp_path, env, kwargs, code):
    ended = train(tmp_path, "--env-kwargs", *kwargs, env=env)
    assert ended.returncode == code, ended.stderr
    assert run_dir.left_mark(tmp_path / "run") is None
    refused = train(tmp_path).stderr
    assert "holds a run already" in refused
    assert "vanished" not in refused
