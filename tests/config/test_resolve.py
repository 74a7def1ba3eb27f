"""Settings: where they come from, and what is refused."""

import dataclasses
import itertools
import os
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace import APPO, PPO, Network
from headrace.cli.commands import RunVerb
from headrace.cli.flags import with_changes
from headrace.config.algorithms import ALGORITHMS
from headrace.config.preset_tables import preset_table, preset_tables
from headrace.config.presets import GROUPS, preset
from headrace.config.resolve import MAY_CHANGE, read_config_file, resolve
from headrace.config.run_config import KeyValues, RunConfig
from headrace.configclass import explicit_values
from headrace.errors import ConfigError, flags_of


def test_precedence_flag_config_preset_default(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\ngamma = 0.5\nhidden_sizes = [32, 32]\nseed = 7\nactivation = "relu"')
    settings = resolve({"env": "CartPole-v1", "lr": 0.25}, read_config_file(file))
    assert settings.algo.lr == 0.25
    assert settings.source["lr"] == "given"
    assert settings.algo.gamma == 0.5
    assert settings.source["gamma"] == f"config {file}"
    assert settings.algo.gae_lambda == 0.9
    assert settings.source["gae_lambda"] == "preset classic_control"
    assert settings.algo.max_grad_norm == 0.5
    assert settings.source["max_grad_norm"] == "default"
    assert settings.network.hidden_sizes == (32, 32)
    assert set(settings.source) == set(settings.flat())


def test_environment_and_algorithm_may_stand_in_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('env = "Pendulum-v1"\nalgo = "ppo"')
    assert resolve({}, read_config_file(file)).run.env == "Pendulum-v1"


def test_without_a_preset_the_class_defaults_apply():
    settings = resolve({"env": "Something-v3"})
    assert {o for o in settings.source.values() if o.startswith("preset")} == set()
    assert dataclasses.replace(settings.algo, minibatch_size=0) == PPO()


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0"])
def test_every_preset_resolves(env):
    name, values = preset(env, "ppo")
    settings = resolve({"env": env})
    assert (name == "none") == (not values)
    for key, value in values.items():
        assert settings.flat()[key] == value


def test_every_preset_serves_every_algorithm():
    known = {f.name for group in (RunConfig, Network, APPO) for f in dataclasses.fields(group)}
    for pattern, (_, table) in preset_tables().items():
        tables = {name for name, value in table.items() if isinstance(value, dict)}
        assert tables <= {*GROUPS, *ALGORITHMS, "env_kwargs"}, pattern  # no name is misspelled
        for name in tables - {"env_kwargs"}:
            own = ALGORITHMS[name].Config if name in ALGORITHMS else APPO
            assert set(table[name]) <= known | {f.name for f in dataclasses.fields(own)}, pattern
        assert set(table) - tables <= known, pattern
        for algo in ALGORITHMS:
            given = {"env": pattern.replace("*", "Empty-5x5-v0"), "algo": algo}
            settings = resolve(given | ({"data": "recorded"} if algo == "bc" else {}))
            assert any(source.startswith("preset") for source in settings.source.values())


def test_a_presets_table_may_name_several_patterns():
    same = [preset_tables()[pattern] for pattern in ("highway-*", "merge-*")]
    assert same == [same[0]] * 2 and same[0][1]["total_env_steps"] == 20_480


def test_no_pattern_of_a_preset_stands_twice():
    """The later table would replace the first one."""
    folder = Path(headrace.__file__).parent / "config/presets"
    named = [
        pattern
        for file in folder.glob("*.toml")
        for patterns in tomllib.loads(file.read_text())
        for pattern in patterns.split()
    ]
    assert sorted(named) == sorted(preset_tables())


def test_tables_of_presets_that_match_are_merged():
    short, long = (
        preset_table(f"MiniGrid-{name}-v0")[1] for name in ("Unlock", "LavaCrossingS9N1")
    )
    assert short["total_env_steps"] == 198_656 and long["total_env_steps"] == 499_712
    assert long["ppo"] == short["ppo"] | {"ent_coef": 0.03} and short["ppo"]["num_envs"] == 16
    assert preset_table("ALE/Pong-v5")[0] == "atari"
    assert preset_table("Nothing-v0") == ("none", {})


def test_names_are_unique_over_all_groups():
    for algo in (algorithm.Config for algorithm in ALGORITHMS.values()):
        groups = (RunConfig, Network, algo)
        names = [f.name for group in groups for f in dataclasses.fields(group)]
        assert len(names) == len(set(names))


def test_settings_know_what_was_given_even_if_it_equals_the_default():
    assert explicit_values(PPO(lr=PPO().lr, gamma=0.5)) == {"gamma": 0.5, "lr": 3e-4}
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPO().lr = 3
    with pytest.raises(ConfigError, match="PPO has no setting 'learning_rate'"):
        PPO(learning_rate=3)


def test_the_number_of_workers_changes_no_other_setting():
    """What decides bits must not follow from it."""

    def others(workers):
        flat = resolve({"env": "X", "num_envs": 32, "num_workers": workers}).flat()
        return {k: v for k, v in flat.items() if k != "num_workers"}

    most = 32 // resolve({"env": "X", "num_envs": 32, "num_workers": 0}).run.envs_per_vector
    for a, b in itertools.pairwise(range(most + 1)):
        assert others(a) == others(b)


def test_more_workers_than_cores_each_have_a_vector():
    cores = len(os.sched_getaffinity(0))
    run = resolve({"env": "X", "num_envs": 8 * cores, "num_workers": 2 * cores}).run
    assert (run.num_workers, run.envs_per_vector) == (2 * cores, 4)
    run = resolve({"env": "CartPole-v1", "num_envs": 24, "num_workers": 24}).run  # over a preset
    assert (run.num_workers, run.envs_per_vector) == (24, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_workers": 24}, {"num_envs": 24, "envs_per_vector": 1}),
        ({"num_workers": 4, "envs_per_vector": 3}, {"num_envs": 12}),
        ({"envs_per_vector": 3}, {"num_envs": 9}),
        ({"num_learners": 3}, {"num_envs": 9}),
        ({"num_learners": 2, "num_workers": 3, "num_envs": 8}, {"num_envs": 8, "num_workers": 3}),
        ({"num_learners": 2, "num_workers": 9}, {"num_envs": 10, "envs_per_vector": 1}),
        ({"num_workers": -1}, {"num_envs": 8}),
    ],
)
def test_what_is_not_given_follows_what_is(given, expected):
    settings = resolve({"env": "X", **given})
    assert expected.items() <= settings.flat().items()
    assert given.items() <= settings.flat().items() or given["num_workers"] == -1
    for name in ("num_envs", "envs_per_vector"):
        assert name in given or settings.source[name].startswith(("follows", "default"))


def test_a_batch_keeps_its_rows_where_the_environments_follow_the_workers():
    settings = resolve({"env": "CartPole-v1", "num_workers": 16})
    assert (settings.run.num_envs, settings.run.num_steps) == (16, 32)  # of 8 x 64
    assert settings.source["num_envs"] == "follows num_workers"


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"num_steps": 10, "num_minibatches": 4}, (5, 16)),  # as near to 4 as any
        ({"num_steps": 30, "num_minibatches": 7}, (6, 40)),
        ({"num_steps": 8, "num_minibatches": 100}, (8, 8)),
        ({"num_envs": 6, "num_steps": 16, "num_minibatches": 4, "core": "gru"}, (3, 32)),
    ],
)
def test_minibatches_that_do_not_divide_are_the_nearest_that_do(given, sizes):
    settings = resolve({"env": "X", **given})
    assert (settings.algo.num_minibatches, settings.algo.minibatch_size) == sizes
    wanted = given["num_minibatches"]
    assert settings.source["num_minibatches"] == f"given, {wanted} rounded to fit the batch"


@pytest.mark.parametrize(("parts", "fitted"), [(3, 4), (5, 8), (8, 8), (100, 128), (999, 256)])
def test_a_minibatch_is_cut_into_no_fewer_parts_than_were_asked_for(parts, fitted):
    given = {"num_envs": 8, "num_steps": 32, "num_minibatches": 1}
    run = resolve({"env": "X", **given, "num_accumulation_steps": parts}).run
    assert run.num_accumulation_steps == fitted


def test_default_vectors_are_a_share_of_the_envs_for_each_core():
    cores = len(os.sched_getaffinity(0))
    run = resolve({"env": "X", "num_envs": 12, "num_workers": 0}).run
    assert 12 % run.envs_per_vector == 0
    assert run.envs_per_vector <= max(1, 12 // cores)


def test_numpy_s_numbers_will_do():
    settings = resolve({"env": "X", "lr": np.float64(0.1), "num_envs": np.int64(4), "gamma": 1})
    assert (type(settings.algo.lr), type(settings.run.num_envs)) == (float, int)
    assert (settings.algo.lr, settings.run.num_envs, settings.algo.gamma) == (0.1, 4, 1.0)


def test_schedules_run_over_the_first_total():
    assert resolve({"env": "X", "total_env_steps": 77}).run.schedule_env_steps == 77
    given = {"env": "X", "total_env_steps": 77, "schedule_env_steps": 99}
    assert resolve(given).run.schedule_env_steps == 99


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["No environment", "headrace train CartPole-v1"]),
        ({"env": "X", "num_env": 3}, ["Unknown setting 'num_env'", "num_envs"]),
        ({"env": "X", "learning_rate": 3}, ["Unknown setting 'learning_rate'", "Did you mean lr?"]),
        ({"env": "X", "algo": "sac", "gae_lambda": 0.9}, ["It is a setting of ppo, a2c,"]),
        ({"env": "X", "ppo": {"lr": 3}}, ["Unknown setting 'ppo'", "leave the section [ppo] out"]),
        ({"env": "X", "algo": "none"}, ["algo='none'", "ppo"]),
        ({"env": "X", "lr": "fast"}, ["lr='fast'", "expected float"]),
        ({"env": "X", "num_envs": 2.5}, ["num_envs=2.5", "expected int"]),
        ({"env": "X", "num_envs": True}, ["num_envs=True"]),
        ({"env": "X", "hidden_sizes": [64, "a"]}, ["hidden_sizes"]),
        ({"env": "X", "activation": "gelu"}, ["activation='gelu'", "'tanh'"]),
        ({"env": "X", "num_envs": 0}, ["num_envs=0", "at least 1"]),
        ({"env": "X", "lr": -1.0}, ["lr=-1.0", "at least 0"]),
        ({"env": "X", "lr": float("inf")}, ["lr=inf"]),
        ({"env": "X", "gamma": 5.0}, ["gamma=5.0", "at most 1"]),
        ({"env": "X", "hidden_sizes": (64, -3)}, ["hidden_sizes=(64, -3)"]),
        (
            {"env": "X", "num_envs": 1, "num_steps": 4, "num_minibatches": 4},
            ["1 * 4 rows leave 1 "],
        ),
        ({"env": "X", "env_kwargs": {"size": (1, 2)}}, ["env_kwargs", "tuple", "callable"]),
        ({"env": "X", "env_kwargs": {"size": object()}}, ["env_kwargs", "config.json"]),
        ({"env": "X", "seed": -1}, ["seed=-1"]),
        (
            {"env": "X", "num_envs": 10, "envs_per_vector": 4},
            ["10 = 2 x 4 + 2", "--envs-per-vector 2, or leave it out"],
        ),
        (
            {"env": "X", "num_envs": 8, "envs_per_vector": 4, "num_workers": 3},
            ["only 2 vectors", "envs_per_vector=4", "Leave --envs-per-vector out"],
        ),
        (
            {"env": "X", "num_envs": 2, "envs_per_vector": 1, "num_workers": 3},
            ["only 2 vectors", "--num-envs 3"],
        ),
        ({"env": "X", "num_envs": 2, "num_workers": 3}, ["only 2 vectors", "--num-envs 3"]),
        (
            {"env": "X", "num_envs": 9, "num_learners": 2},
            ["9 = 2 x 4 + 1", "--num-envs 8"],
        ),
        (
            {"env": "X", "num_envs": 8, "num_learners": 4, "num_workers": 3},
            ["at least one worker for each learner", "--num-workers 4"],
        ),
    ],
)
def test_contradictions_are_refused_with_the_sums(given, words):
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    for word in words:
        assert word in str(caught.value)


def test_a_config_file_without_settings_is_read_with_a_warning(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("# lr = 0.5\n")
    with pytest.warns(UserWarning, match=rf"{file} has no settings\."):
        empty = read_config_file(file)
    assert resolve({"env": "X"}, empty) == resolve({"env": "X"})


def test_a_config_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_config_file(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("cores", "given", "workers"),
    [
        (4, {"num_envs": 16, "envs_per_vector": 2}, 4),  # as many as cores
        (4, {"num_envs": 8, "envs_per_vector": 4}, 2),  # as many as vectors
        (1, {"num_envs": 8}, 1),
        (4, {"num_envs": 16, "envs_per_vector": 2, "num_learners": 2}, 4),  # two of each learner
        (2, {"num_envs": 12, "envs_per_vector": 2, "num_learners": 3}, 3),  # one at least
    ],
)
def test_one_worker_for_each_core(monkeypatch, cores, given, workers):
    monkeypatch.setattr("headrace.config.derive.cpu_cores", lambda: cores)
    settings = resolve({"env": "Something-v3", "num_workers": -1} | given)
    assert settings.run.num_workers == workers
    assert settings.source["num_workers"] == f"given, {cores} cores"


def test_no_preset_names_what_is_found_for_each_machine():
    for _, table in preset_tables().values():
        for part in (table, *(value for value in table.values() if isinstance(value, dict))):
            assert not {"num_workers", "envs_per_vector", "learner_threads"} & set(part)


def test_resume_has_a_flag_for_all_that_may_change():
    flags = {f.name for f in dataclasses.fields(with_changes(RunVerb))}
    assert set(MAY_CHANGE) <= flags
    assert flags - set(MAY_CHANGE) == {
        "run_dir", "env", "eval_env", "wrapper", "model", "algo", "json",
    }  # fmt: skip


def test_a_limit_that_nothing_watches_is_refused():
    with pytest.raises(ConfigError, match=r"env_timeout_s=5.0, but with --no-guards"):
        resolve({"env": "CartPole-v1", "env_timeout_s": 5.0, "guards": False})


def test_arguments_that_are_typed_as_a_flag_are_read_alike():
    given = {"limit": 7, "word": "a b", "digits": "7", "sizes": [1, 2], "none": None}
    _, *words = shlex.split(flags_of({"env_kwargs": given}))
    assert KeyValues.instance_from_str(words) == given
