"""The benchmarks' runner: real processes that take turns, and what it makes of their figures."""

import json
import os
import select
import shlex
import sys

import pytest

from benchmarks import atari, cartpole, turns
from benchmarks.peers import install


def python(name, code, **more):
    return turns.Contestant(name, [sys.executable, "-c", code], **more)


def rates(name, log, *of_turns, **more):
    """One that writes its name to a file at each turn, and prints that turn's rate."""
    return python(
        name,
        f"with open({str(log)!r}, 'a+') as log:\n"
        f"    log.write({name!r}); log.seek(0); turn = log.read().count({name!r}) - 1\n"
        f"rate = {of_turns!r}[turn]\n"
        'print(\'RESULT {"env_steps": 100, "env_steps_per_s": %s, "mean_return": 7}\' % rate)',
        **more,
    )


def by_name(results):
    return {row["name"]: row for row in results["contestants"]}


def test_contestants_alternate_and_their_medians_are_compared_with_the_best_peer(tmp_path):
    log = tmp_path / "log"
    results = turns.compare(
        [
            rates("A", log, 30, 10, 50),
            rates("B", log, 20, 25, 15, is_peer=True, packages=("numpy", "not-there")),
            rates("C", log, 5, 6, 7, is_peer=True),
        ],
        turns=3,
        env_steps=100,
    )
    assert log.read_text() == "ABCABCABC"
    rows = by_name(results)
    assert rows["A"]["turns"] == [30, 10, 50]
    assert [rows["A"][key] for key in ("median", "min", "max", "of_best_peer")] == [30, 10, 50, 1.5]
    assert (rows["B"]["median"], rows["B"]["of_best_peer"]) == (20, 1.0)
    assert (rows["C"]["median"], rows["C"]["of_best_peer"]) == (6, 0.3)
    assert rows["C"]["mean_returns"] == [7, 7, 7]
    assert rows["B"]["versions"]["numpy"]
    assert rows["B"]["versions"]["not-there"] is None
    assert "1.50" in turns.table("Title", results)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; print('so far', file=sys.stderr); sys.exit('no such game')", "no such game"),
        ("print('no figure')", "printed no result"),
        ("", "printed no result"),
        ("print('[1]')", "printed no result"),
        ('print(\'{"env_steps": 100, "env_steps_per_s": null}\')', "printed no result"),
        ('print(\'{"env_steps": 99, "env_steps_per_s": 5}\')', "99 env steps; expected 100"),
        ('print(\'{"env_steps": 200, "env_steps_per_s": 5}\')', "200 env steps; expected 100"),
    ],
)
def test_a_failure_is_shown_and_the_others_go_on(tmp_path, capsys, code, says):
    results = turns.compare(
        [python("bad", code, is_peer=True), rates("A", tmp_path / "log", 3, 4)],
        turns=2,
        env_steps=100,
    )
    rows = by_name(results)
    assert rows["bad"]["failed"].startswith("turn 1: ")
    assert says in rows["bad"]["failed"]
    assert says in capsys.readouterr().out
    assert rows["bad"]["median"] is None
    assert (rows["A"]["median"], rows["A"]["of_best_peer"]) == (3.5, None)
    assert "FAILED in turn 1" in turns.table("Title", results)


def test_a_figure_of_other_work_than_was_meant_is_a_failure():
    result = '{"env_steps": 100, "env_steps_per_s": 5}'
    code = f"import sys; print('observation Box(2,)', file=sys.stderr); print({result!r})"
    assert turns.take_turn(python("A", code, must_say="Box(2,)"), 100, 30)["env_steps_per_s"] == 5
    with pytest.raises(turns.TurnError, match="did other work: expected 'Box\\(4, 84, 84\\)' in"):
        turns.take_turn(python("A", code, must_say="Box(4, 84, 84)"), 100, 30)


def test_a_turn_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    endless = f"tail -f /dev/null & echo $! > {shlex.quote(str(pid_file))}; wait"
    slow = turns.Contestant("slow", ["/bin/sh", "-c", endless])
    with pytest.raises(turns.TurnError, match="took longer than 1 s"):
        turns.take_turn(slow, env_steps=100, limit_s=1.0)
    try:
        child = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:  # ended, and its new parent has looked
        return
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended


def test_run_writes_json_and_prints_the_table_last(tmp_path, capsys, monkeypatch):
    output = tmp_path / "new" / "name.json"
    monkeypatch.setattr(sys, "argv", ["name", "--turns", "2", "--output", str(output)])
    good = turns.Comparison("Good", [rates("A", tmp_path / "log", 3, 4)], 100)
    assert turns.run("name", "What it is.", [good], turns=5) == 0
    written = json.loads(output.read_text())
    assert written["turns"] == 2
    assert written["tables"]["Good"]["contestants"][0]["turns"] == [3, 4]
    machine = written["machine"]
    assert machine["cores"] >= 1
    assert machine["load_average_at_start"] >= 0
    assert len(machine["git_commit"]) == 40
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("A ")

    bad = turns.Comparison("Bad", [python("B", "raise SystemExit(3)")], 100)
    assert turns.run("name", "What it is.", [bad], turns=5) == 1


def test_a_peer_without_its_environment_is_missing_not_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "VENVS", tmp_path)
    peer = turns.driver("SB3", "sb3", "sb3_bench", [])
    results = turns.compare([peer], turns=1, env_steps=100)
    (row,) = results["contestants"]
    assert row["missing"] == "not installed: python benchmarks/peers/install.py sb3"
    assert row["failed"] is None
    assert "not installed" in turns.table("Title", results)
    assert "not installed" in capsys.readouterr().out


def test_commands_are_written_down_without_what_is_particular_to_this_checkout():
    comparisons = [cartpole.contestants(), atari.training().contestants]
    comparisons += [atari.stepping(n).contestants for n in (8, 32)]
    for contestant in [contestant for some in comparisons for contestant in some]:
        command = turns._row(contestant)["command"]
        assert str(turns.ROOT) not in command
        assert not command.startswith("/")
