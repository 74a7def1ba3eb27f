"""Tests of the verbs `tune` and `sweep`, as they are typed."""

import json
import shutil

import pytest

from headrace.cli.tuning_commands import parse_grid
from headrace.errors import ConfigError
from tests import python

SIZES = [
    "--total-env-steps", 512, "--num-envs", 4, "--num-steps", 16, "--num-workers", 0,
    "--parallel", 1, "--metric", "mean_return",
]  # fmt: skip


def run(*words, rc=0):
    done = python.run(python.command(*words))
    assert done.returncode == rc, done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study that the command line made."""
    folder = tmp_path_factory.mktemp("studies") / "a"
    space = folder.with_name("space.toml")
    space.write_text("lr = { log = [1e-4, 1e-2] }")
    words = ["--space", space, "--trials", 2, "--sampler", "random", "--final-seeds", 1]
    done = run("tune", "CartPole-v1", *words, *SIZES, "--study", folder, "--json")
    result = json.loads(done.stdout)
    assert [trial["is_preset"] for trial in result["trials"]] == [True, False]
    assert f"headrace train CartPole-v1 --config {folder / 'best.toml'}" in done.stderr
    assert "fresh seed 1000 (1 of 2)" in done.stderr
    assert "fresh seed 1000 (2 of 2)" in done.stderr
    return folder


def test_show_writes_a_page(folder):
    done = run("tune", "--show", folder)
    page = (folder / "study.html").read_text()
    assert f"Page: {folder / 'study.html'}" in done.stdout
    assert page.count("<svg") == 2  # curves, and parallel coordinates
    assert "Too few trials were trained to the end" in page
    assert "Best on 1 fresh seed" in page


def test_show_of_a_study_that_was_cut_writes_the_best_so_far(folder, tmp_path):
    """The command that it prints must find its file."""
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    (cut / "best.toml").unlink()
    done = run("tune", "--show", cut)
    assert f"--config {cut / 'best.toml'}" in done.stdout
    assert (cut / "best.toml").read_text() == (folder / "best.toml").read_text()


@pytest.mark.more
def test_go_on_with_more_trials(folder):
    done = run("tune", "--resume", folder, "--trials", 3, "--json")
    assert len(json.loads(done.stdout)["trials"]) == 3
    again = run("tune", "--resume", folder, "--json")  # as many as it has
    assert len(json.loads(again.stdout)["trials"]) == 3


@pytest.mark.parametrize("words", [["--sampler", "grid"], ["--seeds", "2"], ["--lr", "1e-3"]])
def test_what_cannot_change_is_refused(folder, words):
    done = run("tune", "--resume", folder, *words, rc=2)
    assert "Leave these out" in done.stderr


def test_a_study_with_code_goes_on_by_the_command_that_it_prints(tmp_path):
    wrapper = ["--wrapper", "gymnasium.wrappers:FlattenObservation"]
    words = ["--trials", 1, "--final-seeds", 0, *SIZES, "--study", tmp_path / "s", *wrapper]
    run("tune", "CartPole-v1", *words)
    refused = run("tune", "--resume", tmp_path / "s", "--trials", 2, rc=2)
    command = refused.stderr.strip().splitlines()[-1].partition(": ")[2].split()
    assert command[0] == "headrace"
    assert json.loads(run(*command[1:], "--json").stdout)


@pytest.mark.parametrize("verb", ["resume", "eval", "report"])
def test_a_study_is_no_run(folder, verb):
    done = run(verb, folder, rc=1)
    assert f"It is a study. To see it: headrace tune --show {folder}" in done.stderr


def test_best_toml_is_a_config_file(folder, tmp_path):
    config = ["--config", folder / "best.toml", "--run-dir", tmp_path / "r"]
    assert f"config {folder / 'best.toml'}: " in run("train", "CartPole-v1", *config).stdout


def test_sweep(tmp_path):
    words = ["--grid", "lr=1e-3,1e-4", "--seeds", "1", "--study", tmp_path / "s", "--json"]
    result = json.loads(run("sweep", "CartPole-v1", *words, *SIZES).stdout)
    assert [trial["values"] for trial in result["trials"]] == [{"lr": 1e-3}, {"lr": 1e-4}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "--trials", "5"], "No environment was given"),
        (["tune", "CartPole-v1", "--metric", "steps_to"], "expected a return after it"),
        (["tune", "CartPole-v1", "--space", "none.toml"], "cannot be read"),
        (["tune", "--show", "."], "is no study"),
        (["tune", "--show", ".", "--trials", "5"], "--trials: no effect beside --show"),
        (["tune", "CartPole-v1", "--no-deterministic"], "deterministic=False: a study chooses"),
        (["sweep", "CartPole-v1"], "--grid lr=1e-3,3e-4"),
    ],
)
def test_mistakes_are_told(words, said):
    done = python.run(python.command(*words))
    assert done.returncode in (1, 2)
    assert said in done.stderr


def test_grids():
    assert parse_grid(("lr=1e-3,3e-4", "hidden-sizes=[64,64],[256]", "lr_schedule=linear")) == {
        "lr": [1e-3, 3e-4],
        "hidden_sizes": [[64, 64], [256]],
        "lr_schedule": ["linear"],
    }
    assert parse_grid(("normalize_obs=true,false",)) == {"normalize_obs": [True, False]}
    for word in ("lr", "lr=", "=3", "l r=3"):
        with pytest.raises(ConfigError, match="expected name=value"):
            parse_grid((word,))
    with pytest.raises(ConfigError, match="twice"):
        parse_grid(("lr=1", "lr=2"))
