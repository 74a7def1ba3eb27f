"""The end of `metrics.jsonl`, read without the rest."""

import json
import os

import pytest

import headrace
from headrace.errors import RunDirError
from headrace.storage.metrics import read_last_metrics, read_metrics, starts, total_seconds


@pytest.fixture
def run_dir(tmp_path):
    return headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", num_envs=4, envs_per_vector=4, num_steps=16,
        num_workers=0, total_env_steps=256, quiet=True,
    ).dir  # fmt: skip


def test_the_last_rows_are_those_of_the_file(run_dir):
    rows = read_metrics(run_dir)
    assert read_last_metrics(run_dir) == rows
    assert len(rows) == 4
    file = run_dir / "metrics.jsonl"
    whole = file.read_bytes()
    half = whole.splitlines(keepends=True)[-1][:-30]
    file.write_bytes(whole + half)  # while a row is written
    assert read_last_metrics(run_dir) == read_metrics(run_dir) == rows
    file.write_bytes(half)
    assert read_last_metrics(run_dir) == []
    file.unlink()
    assert read_last_metrics(run_dir) == []
    with pytest.raises(RunDirError, match="no update has been made"):
        read_metrics(run_dir)


def test_only_the_end_of_a_file_is_read(run_dir):
    file = run_dir / "metrics.jsonl"
    whole, rows = file.read_bytes(), read_metrics(run_dir)
    with file.open("wb") as written:  # 8 GiB of nothing, then the rows
        written.seek(1 << 33)
        written.write(b"\n" + whole)
    assert read_last_metrics(run_dir) == rows
    os.truncate(file, 0)
    file.write_bytes(whole + (json.dumps(rows[0] | {"note": "x" * 300_000}) + "\n").encode())
    (last,) = read_last_metrics(run_dir)[-1:]  # longer than what is read at first
    assert last["note"].startswith("xx")


def test_seconds_are_added_up_over_processes():
    rows = [{"wall_s": s} for s in (1.0, 2.0, 0.5, None, 1.5)]  # the second began at 0.5
    assert starts(rows) == [True, False, True, False, False]
    assert total_seconds(rows) == [1.0, 2.0, 2.5, 2.0, 3.5]
    rows[4]["seconds/learner/start"] = 0.1  # a third one, which took longer to start
    assert starts(rows)[4]
    assert total_seconds([]) == []
