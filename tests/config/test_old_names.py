"""Former spellings of settings are read from flags, keywords, files and old runs."""

import json
import re
import shutil
from pathlib import Path

import pytest

import headrace
from headrace.cli.argv import rename_flags
from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse
from headrace.cli.main import VERBS, _main
from headrace.cli.tool_commands import FLAGS as SCALE_FLAGS
from headrace.config.old_names import NAMES, VALUES, rename_settings
from headrace.config.resolve import MAY_CHANGE, read_config_file, resolve
from headrace.configclass import PEER_NAMES
from headrace.errors import ConfigError
from headrace.storage.run_dir import read_config

OLD = {"on_sampler_loss": "fail", "max_sampler_restarts": 7, "inference": "sampler"}
NEW = {"on_worker_loss": "fail", "max_worker_restarts": 7, "inference": "worker"}
TINY = {"num_envs": 1, "envs_per_vector": 1, "num_steps": 8, "num_minibatches": 1}
TINY |= {"total_env_steps": 8}
OLD_RUN = Path(__file__).parent / "old_run"
"""The directory of a run that was made before the names changed."""


def settings_in(run_dir):
    """The renamed settings as config.json has them, and no former name."""
    settings = json.loads((run_dir / "config.json").read_text())["settings"]
    assert not set(NAMES) & set(settings)
    return {name: settings[name] for name in NEW}


def test_table_names_settings_that_exist():
    flat = resolve({"env": "X"}).flat()
    assert set(NAMES.values()) <= set(flat) and not set(NAMES) & set(flat)
    assert {name for name, _ in VALUES} <= set(flat)


@pytest.mark.parametrize("joined", [False, True])
def test_former_flags_set_the_new_settings(joined, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "CartPole-v1", "--run-dir", "run"]
    for name, value in (TINY | OLD).items():
        flag = f"--{name.replace('_', '-')}"
        words += [f"{flag}={value}"] if joined else [flag, str(value)]
    assert _main(words) == 0
    assert settings_in(tmp_path / "run") == NEW


def test_words_that_are_no_flags_stay():
    words = ["sampler", "--run-dir", "on-sampler-loss", "--env-kwargs", "inference=sampler"]
    assert rename_flags(words) == words


def test_a_flag_of_another_library_is_refused_with_its_name_here(capsys):
    flat = resolve({"env": "X", "algo": "appo"}).flat()
    of_dqn, of_td3 = (set(resolve({"env": "X", "algo": algo}).flat()) for algo in ("dqn", "td3"))
    assert set(PEER_NAMES.values()) <= set(flat) | of_dqn | of_td3
    assert not set(PEER_NAMES) & set(flat)
    assert set(PEER_NAMES) & of_dqn == {"batch_size"}
    assert _main(["train", "CartPole-v1", "--learning-rate", "3"]) == 2
    assert "Did you mean --lr?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"no --learning-rate\. Did you mean --lr\?"):
        parse("train", "", FLAGS["train"], ["CartPole-v1", "--learning-rate=3"])


def test_a_setting_of_another_algorithm_names_it():
    with pytest.raises(
        ConfigError, match=r"--priority-alpha is a setting of dqn, .*sac,.*: exp.*--algo dqn\."
    ):
        parse("train", "", FLAGS["train"], ["CartPole-v1", "--priority-alpha", "0.5"])
    with pytest.raises(ConfigError, match=r"--double-q is a setting of dqn, rainbow"):
        parse("train", "", FLAGS["train"], ["CartPole-v1", "--no-double-q"])


@pytest.mark.parametrize("name", ["replay-ratio", "batch-size", "num-steps", "hidden-sizes"])
def test_a_setting_that_is_fixed_is_refused_by_resume(name):
    with pytest.raises(ConfigError, match=f"--{name} is fixed when a run begins"):
        parse("resume", "", FLAGS["resume"], ["runs/x", f"--{name}", "4"])


def test_a_flag_that_another_library_has_too_is_read_where_it_exists():
    dqn = ["X-v0", "--algo", "dqn", "--batch-size", "64"]
    assert explicit(dqn, parse("autoscale", "", SCALE_FLAGS["autoscale"], dqn))["batch_size"] == 64
    own = ["X-v0", "--algo=tests.algos.replay_toy:ToyReplay", "--batch-size=7"]
    assert explicit(own, parse("train", "", FLAGS["train"], own))["batch_size"] == 7


def test_former_keywords_set_the_new_settings(tmp_path):
    run = headrace.train("CartPole-v1", run_dir=tmp_path / "run", quiet=True, **TINY, **OLD)
    assert settings_in(run.dir) == NEW
    again = headrace.resume(
        run.dir, quiet=True, total_env_steps=16, on_sampler_loss="restart", max_sampler_restarts=1
    )
    changed = {"on_worker_loss": "restart", "max_worker_restarts": 1}
    assert settings_in(again.dir) == NEW | changed


def test_former_names_in_a_config_file_set_the_new_settings(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in OLD.items()))
    settings = resolve({"env": "X"}, read_config_file(file))
    assert {name: settings.flat()[name] for name in NEW} == NEW
    assert {settings.source[name] for name in NEW} == {f"config {file}"}


def test_a_removed_setting_is_left_out_of_files_and_refused_elsewhere(tmp_path, old_run):
    file = tmp_path / "mine.toml"
    file.write_text("algo = 'appo'\nis_clip = 3.0\n")
    assert "is_clip" not in resolve({"env": "X"}, read_config_file(file)).flat()
    config = json.loads((old_run / "config.json").read_text())
    for part, value in (("settings", 3.0), ("origin", "given")):
        config[part]["is_clip"] = value
    (old_run / "config.json").write_text(json.dumps(config))
    found = read_config(old_run)
    assert "is_clip" not in found["settings"] | found["origin"]
    with pytest.raises(ConfigError, match="Unknown setting 'is_clip'"):
        resolve({"env": "X", "algo": "appo", "is_clip": 3.0})


def test_a_setting_under_both_names_is_refused():
    with pytest.raises(ConfigError, match=r"on_sampler_loss is the former name of on_worker_loss"):
        rename_settings({"on_sampler_loss": "fail", "on_worker_loss": "fail"})


@pytest.fixture
def old_run(tmp_path):
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def test_an_old_run_is_resumed_with_its_settings(old_run):
    before = read_config(old_run)
    assert {name: before["settings"][name] for name in NEW} == NEW
    assert {before["origin"][name] for name in NEW} == {"given"}
    run = headrace.resume(old_run, total_env_steps=320, quiet=True)
    assert run.summary["env_steps"] == 320
    assert settings_in(old_run) == NEW


def test_an_old_run_is_evaluated(old_run, capsys):
    assert _main(["eval", str(old_run), "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_no_former_name(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        _main([verb, "--help"])
    out = capsys.readouterr().out
    assert "usage" in out
    for name in NAMES:
        assert name.replace("_", "-") not in out
    if verb != "tune":  # there it is the field's word for what chooses settings
        assert not re.search(r"\bsampler\b", out)
    if verb == "resume":
        assert all(f"--{name.replace('_', '-')}" in out for name in MAY_CHANGE)


def test_name_of_another_library_is_answered_where_settings_are_made():
    with pytest.raises(
        ConfigError, match=r"PPO has no setting 'learning_rate'\. Did you mean lr\?"
    ):
        headrace.PPO(learning_rate=1e-3)
