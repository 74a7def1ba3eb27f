"""The benchmarks of searches: what is made of their figures."""

import json
import sys

import pytest

from benchmarks import table
from benchmarks.harness.machine import ROOT
from benchmarks.tune import cartpole, commands, helped, population
from headrace.tuning.metric import Metric
from headrace.tuning.plan import Plan, Trial, write_trial

MACHINE = {
    "date": "2026-11-27", "git_commit": "0cd447a", "git_uncommitted_changes": False, "cores": 2,
    "cpu": "some",
}  # fmt: skip


def searched(folder, name, seconds, trials=3):
    size = cartpole.Size(3, 1000, 2, folder=str(folder), output=str(folder / "out.json"))
    about = {
        "machine": MACHINE, "size": [3, 1000, 2], "seconds": seconds, "trials": trials,
        "whole": trials - 2, "pruned": 2, "failed": 0, "env_steps": 2000,
        "best": {"is_preset": name == "headrace"},
        "best_again": {
            "seeds": [{}, {}], "mean": 400.0, "interval": [300.0, 500.0], "least": 300.0,
            "reached": 1, "mean_steps_to": 900.0,
        },
    }  # fmt: skip
    (folder / name).mkdir(parents=True)
    (folder / name / "about.json").write_text(json.dumps(about))
    return size


def test_searches_that_were_made_are_compared_with_the_zoo_s(tmp_path):
    searched(tmp_path, "headrace", 4.0)
    searched(tmp_path, "zoo_processes", 100.0)
    size = searched(tmp_path, "zoo", 200.0)
    cartpole.main(size, only=None, render=True)
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["searches"]) == [
        cartpole.SEARCHES[name] for name in ("headrace", "zoo", "zoo_processes")
    ]
    lines = cartpole.tables(result).splitlines()
    assert "| Headrace | 4 | 50.0 x | - | 1, 2, 0 | 2,000 | 500 | 0cd447a |" in lines
    assert "| Headrace (the preset) | 400.0 | 300.0 to 500.0 | 300.0 | 1 of 2 | 900 |" in lines
    assert "| RL Zoo, two processes | 100 | 2.0 x | - | 1, 2, 0 | 2,000 | 20 | 0cd447a |" in lines


def test_a_search_that_was_cut_bounds_the_ratio(tmp_path):
    searched(tmp_path, "headrace", 4.0)
    searched(tmp_path, "zoo_processes", 100.0, trials=2)
    size = searched(tmp_path, "zoo", 200.0, trials=2)
    cartpole.main(size, only=None, render=True)
    lines = cartpole.tables(json.loads((tmp_path / "out.json").read_text())).splitlines()
    assert "| Headrace | 4 | ≥ 50.0 x | - | 1, 2, 0 | 2,000 | 500 | 0cd447a |" in lines
    cut = "RL Zoo, `--n-jobs 2`, cut after 2 trials"
    assert f"| {cut} | 200 | - | - | 0, 2, 0 | 2,000 | 10 | 0cd447a |" in lines


def test_a_command_that_is_cut_ends_though_it_would_go_on(tmp_path):
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('began', flush=True)\n"
        "signal.sigtimedwait([], 60)\n"
        "print('ended')"
    )
    _, lines = commands.run([sys.executable, "-c", script], tmp_path, "cut", cut_s=3.0)
    assert [text for _, text in lines] == ["began"]


def test_a_command_that_fails_before_it_is_cut_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="ended with 3"):
        commands.run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, "failed", cut_s=60.0)


def test_a_search_s_first_trial_stands_beside_the_best_on_fresh_seeds(tmp_path):
    plan = Plan(
        "tune", "CartPole-v1", "ppo", {}, {}, [], {"lr": {"log": [1e-4, 1e-2]}}, "random", "none",
        Metric(), 3, 1, 0, [0], [1000], 20, 2, [1000, 1001], 60.0, "0.1.0",
    )  # fmt: skip
    plan.write(tmp_path)
    fresh = {0: (100, 110), 1: (90, 100), 2: (140, 160)}  # the preset, the search's first, the best
    for number, (score, values) in enumerate(zip((95, 90, 80), fresh.values(), strict=True)):
        runs = [{"env_steps": 1000, "eval_return": value} for value in (score, *values)]
        changes = {"lr": number * 1e-3} if number else {}
        trial = Trial(number, changes, changes, "whole", measured=[{"0": runs[0]}], spent_s=40.0)
        trial.fresh = {"1000": runs[1], "1001": runs[2]}
        write_trial(tmp_path, trial)
    about = helped.of_study(tmp_path, "CartPole-v1")
    assert (about["best"], about["first_of_search"], about["runs_missing_then"]) == (2, 1, 0)
    assert about["finalists"][2]["gain"] == 45.0
    assert about["finalists"][1]["gain"] == -10.0
    written = json.loads(json.dumps({"envs": {"CartPole-v1": about}}))
    assert "trial 2: 150.0 | 45.0" in helped.tables(written)
    assert "trial 1: -10.0" in helped.tables(written)


def test_the_page_has_places_for_all_tables():
    page = (ROOT / "benchmarks/README.md").read_text()
    for part in (cartpole, helped, population):
        assert "some text" in table.filled_in(page, "some text", part.NAME)
