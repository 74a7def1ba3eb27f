"""The benchmark of defaults: real runs of few steps, what is run again, and what passes."""

import json

import pytest

from benchmarks.defaults import __main__ as defaults
from benchmarks.defaults import runs
from benchmarks.defaults.cases import PARTS, Case
from benchmarks.defaults.page import Figures, beats, keeps_up, render
from headrace.config import resolve


@pytest.mark.slow
def test_a_run_has_no_preset_is_kept_and_is_repeated_only_if_something_changed(tmp_path, capsys):
    def bench():
        words = ["--part", "appo", "--only", "CartPole", "--seeds", "1", "--at-once", "1"]
        defaults.main([*words, "--env-steps", "1024", "--results", str(tmp_path)])
        return capsys.readouterr().out.splitlines()

    # A run that took the preset would fail: `train_headrace` looks where settings come from.
    assert resolve.preset("CartPole-v1", "ppo")[0] != "none"
    first = bench()
    assert [line.partition(":")[0] for line in first] == [
        "CartPole-v1 headrace ppo, seed 1",
        "CartPole-v1 headrace appo --num-workers 2, seed 1",
    ]
    path = tmp_path / Case("CartPole-v1").file_name(1024)
    saved = json.loads(path.read_text())
    run = saved["runs"]["1"]
    assert run["env_steps"] >= 1024
    assert 5 < run["mean_return"] < 60
    assert 5 < run["eval_return"] <= 500
    assert "| CartPole-v1 | 2" in (tmp_path / "README.md").read_text()
    assert [line.endswith("there already") for line in bench()] == [True, True]
    saved["settings"]["num_workers"] = 5  # speed is not learning
    path.write_text(json.dumps(saved))
    assert [line.endswith("there already") for line in bench()] == [True, True]
    saved["settings"]["lr"] = 1.0  # as if a default had changed since
    saved["runs"]["2"] = run
    path.write_text(json.dumps(saved))
    assert [line.endswith("there already") for line in bench()] == [False, True]
    assert set(json.loads(path.read_text())["runs"]) == {"1"}  # seed 2 was of other settings


@pytest.mark.more
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    house = "benchmarks.own_envs:House"
    cases = [Case(house, flags=("--no-such-flag",)), Case(house)]
    monkeypatch.setitem(PARTS, "own", cases)
    words = ["--part", "own", "--seeds", "1", "--env-steps", "1024", "--results", str(tmp_path)]
    failed = "House headrace ppo --no-such-flag, seed 1"
    with pytest.raises(SystemExit, match=rf"Failed: {failed}\. The others"):
        defaults.main(words)
    assert f"{failed} failed: ended with 2:" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("House*")] == [cases[1].file_name(1024)]


def test_other_env_steps_leave_the_page_of_the_documents_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(defaults, "PAGE", tmp_path / "defaults.md")
    with pytest.raises(SystemExit):
        defaults.main(["--env-steps", "5000", "--render"])
    assert "--env-steps 5000: docs/defaults.md is of 500000" in capsys.readouterr().err
    assert not defaults.PAGE.exists()


def test_random_returns_are_measured_again_if_asked_for(tmp_path):
    house, path = "benchmarks.own_envs:House", tmp_path / "random.json"
    path.write_text(json.dumps({house: 1e9}))
    runs.measure_random(tmp_path, [house])
    assert json.loads(path.read_text()) == {house: 1e9}
    runs.measure_random(tmp_path, [house], again=True)
    assert json.loads(path.read_text())[house] < 1e9


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ((10, 11, 12), (9, 10, 11), "yes"),
        ((10, 11, 12), (11, 11, 12), "**no**"),
        ((10, 11, 12), (10, 11, 12), "yes"),
        ((10, 11), (9, 10, 11), "open"),
        ((10, 11, 12), (9, 10), "yes"),
        ((10, 11, 12), (13,), "**no**"),
        ((10, 11, 12), None, "open"),
        (None, (1, 2, 3), "open"),
    ],
)
def test_a_row_passes_if_it_is_as_good_as_the_peer(ours, theirs, verdict):
    assert beats(*(each and Figures(each) for each in (ours, theirs))) == verdict


@pytest.mark.parametrize(
    ("appo", "random", "cells"),
    [
        ((90, 90, 90, 90, 80), -100, ["94%", "90%", "yes"]),
        ((100, 100, 100, 100, -1), -100, ["90%", "50%", "**no**"]),  # the worst is 49.5 % of it
        ((70, 70, 70, 70, 60), -100, ["84%", "80%", "**no**"]),
        ((90, 90, 90, 90), -100, ["-", "-", "open"]),
        ((90, 90, 90, 90, 90), 100, ["-", "-", "**no**: PPO is no better than random"]),
        ((90, 90, 90, 90, 90), None, ["-", "-", "open"]),
    ],
)
def test_appo_is_measured_from_the_return_of_random_actions(appo, random, cells):
    assert keeps_up(Figures(appo), Figures((100,) * 5), random) == cells


def test_the_page_shows_each_result_where_it_belongs(tmp_path):
    def result(case, *returns):
        keys = ("mean_return", "eval_return", "seconds")
        where = {"cores": 2, "cpu": "a CPU", "date": "2026-11-24T", "git_commit": "abcdef1234"}
        runs = {
            str(seed): dict.fromkeys(keys, value) | {"machine": where}
            for seed, value in enumerate(returns)
        }
        (tmp_path / case.file_name(500_000)).write_text(json.dumps({"runs": runs}))

    result(Case("Hopper-v5"), 2400.0, 2500.0, 2600.0)
    result(Case("Hopper-v5", "sb3"), 1100.0, 1200.0, 1300.0)
    result(Case("Hopper-v5", flags=("--num-envs", "64")), 1000.0, 1000.0, 1000.0)
    result(Case("Hopper-v5", flags=("--num-epochs", "4")), 500.0)
    (tmp_path / "random.json").write_text('{"Hopper-v5": 17.0}')
    lines = render(tmp_path, 500_000).splitlines()
    theirs = "1,200 ± 57.7 (3) | 1,200 | 1,200"
    row = f"| Hopper-v5 | 17 | 2,500 ± 57.7 (3) | 2,500 | 2,500 | {theirs} | yes |"
    assert row in lines
    row = f"| 1,000 ± 0 (3) | 1,000 | 1,000 | {theirs} | **no** |"
    assert f"| Hopper-v5 | `--num-envs 64` {row}" in lines
    assert "| none | 2,500 ± 57.7 (3) | - | - | - |" in lines
    assert "| 4 epochs | 500 (1) | - | - | - |" in lines
    assert lines[-1] == "Measured: 2 cores, a CPU, 2026-11-24, commit abcdef1 (10 runs)."
