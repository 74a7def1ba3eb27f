"""Tests of the processes of a study: memory, and what is left."""

import threading
import time

import numpy as np

from headrace.distributed import child_process
from headrace.training.job import RunRequest
from headrace.tuning.runners.local import LocalRunner
from headrace.tuning.runners.part import Part
from tests.support import Counting, children, leaders, still_alive

LIMIT = 1 << 30


class Hoarding(Counting):
    """Takes half as much again as a trial may have, and stays until it is found."""

    def step(self, action):
        hoarded = np.ones(LIMIT * 3 // 2, np.uint8)
        threading.Event().wait()
        return hoarded


def test_a_part_that_takes_too_much_memory_is_ended(tmp_path):
    child_process.warm_up()
    before = children()
    runner = LocalRunner(1, max_bytes=LIMIT)
    settings = {"total_env_steps": 64, "num_workers": 0, "num_learners": 1}
    part = Part(RunRequest(settings, Hoarding), str(tmp_path / "run"), 64, 0, 0)
    runner.start("key", part)
    assert runner.is_full
    (ended,) = runner.wait(time.monotonic() + 100)
    assert (ended.key, ended.outcome) == ("key", "memory")
    assert "of 1.0 GiB" in ended.why
    assert runner.keys == []
    assert still_alive(leaders(children() - before), 10) == []
