"""New rows of a metrics file that another process writes. No tracker's package is needed."""

import contextlib
import json

import pytest

from headrace.errors import RunDirError
from headrace.tools.trackers import place
from headrace.tools.trackers.place import Place
from headrace.tools.trackers.rows import RowReader
from headrace.training.log import MetricsLog


@pytest.fixture
def read_after(tmp_path):
    """Makes a reader of the folder's metrics.jsonl, and closes it in the end."""
    with contextlib.ExitStack() as opened:
        path = tmp_path / "metrics.jsonl"
        yield lambda after: opened.enter_context(contextlib.closing(RowReader(path, after)))


def row(update):
    return {"iteration": update, "env_steps": 10 * update, "loss": 0.5}


def write(log, *updates):
    for update in updates:
        log.write(row(update))
    log.flush()


def updates(reader):
    return [each["iteration"] for each in reader.read()]


def test_each_row_is_read_once(tmp_path, read_after):
    reader = read_after(0)
    assert updates(reader) == []  # there is no file yet
    log = MetricsLog(tmp_path, 0, 0)
    assert updates(reader) == []
    write(log, 1, 2)
    assert updates(reader) == [1, 2]
    assert updates(reader) == []
    write(log, 3)
    assert updates(reader) == [3]
    assert updates(read_after(20)) == [3]
    log.close()


def test_a_line_without_an_end_is_waited_for(tmp_path, read_after):
    path = tmp_path / "metrics.jsonl"
    lines = "".join(f"{json.dumps(row(update))}\n" for update in (1, 2))
    reader = read_after(0)
    for end in range(len(lines)):
        path.write_text(lines[:end])
        assert updates(read_after(0)) == [1] * (lines[:end].count("\n"))
    path.write_text(lines[:-5])
    assert updates(reader) == [1]
    with path.open("a") as file:
        file.write(lines[-5:])
    assert updates(reader) == [2]


@pytest.mark.parametrize("resumes", [1, 2])
def test_updates_that_a_resumed_run_makes_again_are_left_out(tmp_path, read_after, resumes):
    """After two resumes in a row a new file could have the number of the first, were it closed."""
    log = MetricsLog(tmp_path, 0, 0)
    write(log, 1, 2, 3, 4, 5)
    reader = read_after(0)
    assert updates(reader) == [1, 2, 3, 4, 5]
    write(log, 6)  # it was never read, and is made again
    log.close()
    for _ in range(resumes):
        log = MetricsLog(tmp_path, 3, 30)
        write(log, 4, 5, 6, 7)
        log.close()
    assert updates(reader) == [6, 7]
    assert updates(reader) == []


def test_a_file_that_was_cut_in_place_is_read_again(tmp_path, read_after):
    log = MetricsLog(tmp_path, 0, 0)
    write(log, 1, 2, 3, 4)
    log.close()
    reader = read_after(0)
    assert updates(reader) == [1, 2, 3, 4]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (tmp_path / "metrics.jsonl").open("r+") as file:
        file.truncate(len("".join(lines[:2])))
    assert updates(reader) == []
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(row(5))}\n")
    assert updates(reader) == [5]


def test_a_damaged_line_is_left_out(tmp_path, read_after):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(row(2)).encode()
    path.write_bytes(b"\xff\n[]\n{}\n" + b'{"iteration": 1, "env_steps": null}\n' + good + b"\n")
    assert updates(read_after(0)) == [2]


def test_one_process_sends_the_rows_of_a_run(tmp_path):
    with (
        place.locked(tmp_path, "trackio", wait=False) as path,
        place.locked(tmp_path, "mlflow", wait=False),
        pytest.raises(RunDirError, match=r"Process \d+ sends the rows of .* to trackio already"),
        place.locked(tmp_path, "trackio", wait=False),
    ):
        pass
    with place.locked(tmp_path, "trackio", wait=False) as path:
        assert place.read(path) is None
        place.write(path, Place("mine", "42"))
        assert place.read(path) == Place("mine", "42")
        for damaged in ("", "[]", "{}", '{"project": "mine", "run_id": 42}'):
            path.write_text(damaged)
            with pytest.raises(RunDirError, match=r"trackio.json is damaged: .*\nRemove it"):
                place.read(path)
