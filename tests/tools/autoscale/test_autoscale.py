"""Tests of `headrace autoscale` and `train --auto-scale`: fixed sizes, cache, origins."""

import functools
import json
import os

import pytest

import headrace
from headrace.cli import main
from headrace.cli.tool_commands import _train_words
from headrace.config.resolve import read_config_file, resolve
from headrace.errors import ConfigError
from headrace.tools.autoscale import autoscale, result
from headrace.tools.autoscale.autoscale import find_sizes
from headrace.tools.autoscale.result import AutoscaleResult
from headrace.tools.autoscale.trial import TrialSetup
from headrace.training.job import RunRequest
from tests.support import Counting

ONE = {"num_workers": 0, "num_learners": 1, "num_envs": 4, "num_steps": 32}
"""Only `envs_per_vector` is left: a trial or two."""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(autoscale, "TrialSetup", functools.partial(TrialSetup, measure_s=0.3))


@pytest.fixture
def headrace_(capsys):
    """Runs a verb: its exit code, standard output, standard error."""

    def run(*words):
        capsys.readouterr()
        return main._run_verb(words[0], list(words[1:])), *capsys.readouterr()

    return run


@pytest.mark.more
def test_result_is_cached_and_reused(monkeypatch):
    said = []

    def found(**more):
        said.clear()
        request = RunRequest({"env": "CartPole-v1", "envs_per_vector": 4, **ONE})
        return find_sizes(request, say=said.append, **more)

    first = found()
    assert first.settings == {}  # all was fixed
    assert first.env_steps_per_s > 100
    assert not first.reused
    assert first.path.is_relative_to(os.environ["HOME"])
    again = found()
    assert (again.reused, again.trials) == (True, first.trials)
    assert ["Measured before on this machine" in line for line in said] == [True]
    assert not found(again=True).reused
    assert found().env_steps_per_s != first.env_steps_per_s  # the newer one
    machine = result.fingerprint()
    monkeypatch.setattr(result, "fingerprint", lambda: machine | {"cores": 77})
    assert result.read_cache({"machine": result.fingerprint()}) is None
    assert not found().reused


def test_damaged_or_foreign_cache_file_is_ignored():
    key = {"machine": "this"}
    path = result.write_cache(key, AutoscaleResult({"num_envs": 4}, 1.0, []))
    assert result.read_cache(key)["settings"] == {"num_envs": 4}
    assert result.read_cache({"machine": "that"}) is None
    path.write_text(path.read_text()[:-10])
    assert result.read_cache(key) is None
    path.write_text(json.dumps({"key": {"machine": "that"}, "found": {"settings": {}}}))
    assert result.read_cache(key) is None


@pytest.mark.more
def test_result_of_unnamed_environment_is_not_cached(tmp_path):
    found = headrace.autoscale(lambda: Counting(terminate_at=20), quiet=True, seed=3, **ONE)
    assert found.path is None
    assert not (tmp_path / ".cache").exists()
    assert set(found.settings) == {"envs_per_vector"}
    assert {(of["num_workers"], of["num_envs"], of["num_steps"]) for of in found.trials} == {
        (0, 4, 32)
    }
    run = headrace.train(
        Counting, run_dir=tmp_path / "run", total_env_steps=128, quiet=True, **ONE, **found.settings
    )
    assert run.summary["env_steps"] == 128


def test_run_records_measured_sizes_and_their_origin(tmp_path, headrace_):
    flags = [f"--{name.replace('_', '-')}={n}" for name, n in ONE.items()]
    words = ["train", "CartPole-v1", *flags, "--total-env-steps", "256", "--auto-scale"]
    code, out, err = headrace_(*words, "--run-dir", str(tmp_path / "run"), "--json")
    assert code == 0, err
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["origin"]["envs_per_vector"] == "auto-scale"
    assert config["origin"]["num_envs"] == "given"
    assert config["settings"]["num_envs"] == 4
    size = config["settings"]["envs_per_vector"]
    assert f"auto-scale: envs_per_vector={size}" in err
    assert "Measuring sizes" in err
    assert "env steps/s" in err  # the table
    assert json.loads(out)["env_steps"] == 256
    _, out, _ = headrace_(*words, "--run-dir", str(tmp_path / "again"))
    assert "Measured before on this machine" in out
    assert f"auto-scale: envs_per_vector={size}" in out
    code, out, err = headrace_(*words, "--run-dir", str(tmp_path / "run"))
    assert (code, out) == (1, "")  # it is another run's: nothing was measured for it
    # and the verb has the same, for the same machine and settings
    _, out, err = headrace_("autoscale", "CartPole-v1", *flags, "--json", "--budget-s", "60")
    assert json.loads(out)["settings"] == {"envs_per_vector": size}
    assert "Measured before" in err
    command = f"headrace train CartPole-v1 {' '.join(flags)} --envs-per-vector {size}"
    assert f"To use it: {command}\n" in err


def test_measured_sizes_override_preset_but_not_file(tmp_path):
    (tmp_path / "my.toml").write_text("num_steps = 16\n")
    found = {"num_envs": 16, "envs_per_vector": 16, "num_steps": 8}
    settings = resolve(
        {"env": "CartPole-v1"}, read_config_file(tmp_path / "my.toml"), measured=found
    )
    assert (settings.run.num_envs, settings.run.num_steps) == (16, 16)
    assert settings.source["num_envs"] == "auto-scale"
    assert settings.source["num_steps"].startswith("config ")
    assert settings.source["num_epochs"] == "preset classic_control"


@pytest.mark.parametrize(
    ("given", "more", "words"),
    [
        ({"cluster": "local"}, {}, "measured on this machine alone"),
        ({}, {"memory_gib": 0.0}, "memory_gib=0.0: expected more than 0"),
        ({}, {"budget_s": -1.0}, "budget_s=-1.0: expected more than 0"),
        (
            ONE,
            {"env_steps_per_update": 100},
            "env_steps_per_update=100 cannot be made of num_envs=4 and num_steps=32",
        ),
        ({"num_envs": 24}, {"env_steps_per_update": 100}, "of which num_steps may change"),
    ],
)
def test_invalid_searches_are_refused(given, more, words):
    with pytest.raises(ConfigError, match=words):
        find_sizes(RunRequest({"env": "CartPole-v1", **given}), **more)


def test_torchrun_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="Run it without torchrun: headrace autoscale ENV"):
        find_sizes(RunRequest({"env": "CartPole-v1"}))


def test_train_command_leaves_out_autoscale_flags():
    words = [
        "CartPole-v1",
        "--lr",
        "1e-3",
        "--budget-s",
        "9",
        "--json",
        "--memory_gib=2",
        "--again",
    ]
    assert _train_words([*words, "--num-envs=4"]) == ["CartPole-v1", "--lr", "1e-3", "--num-envs=4"]


def test_table_is_sorted_by_rate_and_shows_failures():
    sizes = {"num_learners": 1, "num_workers": 0, "num_envs": 8, "num_steps": 32}
    sizes |= {"envs_per_vector": 8, "memory_bytes": 1 << 29, "gpu_bytes": 0, "why": ""}
    trials = [
        sizes | {"rate": 1000.0, "outcome": "measured"},
        sizes | {"rate": None, "outcome": "crashed", "why": "died (SIGKILL)"},
        sizes | {"rate": 2500.0, "outcome": "measured"},
        sizes | {"rate": 50.0, "outcome": "slow", "why": "no update in its time"},
    ]
    lines = AutoscaleResult({"num_envs": 8}, 2500.0, trials).describe().splitlines()
    assert [line.split()[5:7] for line in lines[1:3]] == [["2,500", "0.50"], ["1,000", "0.50"]]
    assert lines[3].endswith("< 50  0.50 GiB  slow: no update in its time")
    assert lines[4].endswith("-  0.50 GiB  crashed: died (SIGKILL)")
    assert lines[5] == "Found: num_envs=8 (2,500 env steps/s)"


def test_auto_learners_are_one_per_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    settings = resolve({"env": "CartPole-v1", "num_learners": -1})
    assert settings.run.num_learners == 4
    assert settings.source["num_learners"] == "given, follows 4 GPUs"
    on_cpu = resolve({"env": "CartPole-v1", "num_learners": -1, "device": "cpu"})
    assert on_cpu.run.num_learners == 1
    assert on_cpu.source["num_learners"] == "default"  # or by a measurement
    with pytest.raises(ConfigError, match="counts the GPUs of this machine"):
        resolve({"env": "CartPole-v1", "num_learners": -1, "cluster": "local"})
    with pytest.raises(ConfigError, match=r"num_learners=-2 .*expected at least 1, or auto"):
        resolve({"env": "CartPole-v1", "num_learners": -2})


def test_num_learners_accepts_auto(tmp_path, headrace_):
    run_dir = str(tmp_path / "run")
    words = ["--num-learners", "auto", "--device", "cpu", "--total-env-steps", "512"]
    code, out, err = headrace_("train", "CartPole-v1", *words, "--run-dir", run_dir)
    assert code == 0, err
    assert "learners over" not in out, "so short a run has one"
    resumed = headrace.resume(run_dir, num_learners=-1, total_env_steps=1024, quiet=True)
    assert resumed.summary["env_steps"] == 1024
