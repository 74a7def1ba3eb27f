"""Schedules: values at env steps, the bits of a run with points, and what is refused."""

import json

import pytest
import torch

import headrace
from headrace.algos.critics.sac import SAC
from headrace.algos.ppo import PPO
from headrace.algos.schedules import SCHEDULES, in_force, points_of, schedules_of, value_at
from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse
from headrace.config.resolve import read_config_file, resolve
from headrace.errors import ConfigError
from headrace.storage import checkpoint
from tests.support import short_cartpole

UPDATE = 4 * 16
RUN = {
    "num_envs": 4, "num_steps": 16, "envs_per_vector": 4, "num_workers": 0, "seed": 5,
    "quiet": True, "network": headrace.Network(normalize_reward=True),
}  # fmt: skip
BEFORE = {"lr": 3e-3, "gamma": 0.9, "gae_lambda": 0.8, "ent_coef": 0.1, "clip_coef": 0.3}
AFTER = {"lr": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.0, "clip_coef": 1e-3}


def steps(name, at):
    return {SCHEDULES[name]: [[0, BEFORE[name]], [at, BEFORE[name]], [at, AFTER[name]]]}


def weights(run):
    return checkpoint.newest(run.dir).tensors("policy_default")


@pytest.mark.parametrize(
    ("env_steps", "value"),
    [(0, 4.0), (9, 4.0), (10, 4.0), (15, 3.0), (19, 2.2), (20, 1.0), (30, 1.0), (40, 5.0)],
)
def test_points_are_joined_by_lines_and_two_at_once_are_a_step(env_steps, value):
    points = ((10.0, 4.0), (20.0, 2.0), (20.0, 1.0), (30.0, 1.0), (35.0, 5.0))
    assert value_at(points, env_steps) == pytest.approx(value)


def test_constant_and_linear_are_points_too():
    config = PPO(lr=0.3, clip_coef=0.7, clip_schedule="linear")
    for env_steps in (0, 7, 31, 100, 200):
        now = in_force(config, env_steps, 100)
        assert now.clip_coef == 0.7 * (1 - min(1.0, env_steps / 100))  # to the bit
        assert now.lr == 0.3
    assert points_of(config, "clip_coef", 100) == ((0.0, 0.7), (100.0, 0.0))
    assert in_force(PPO(), 50, 100) == PPO()
    assert set(schedules_of(SAC)) == {"lr"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_by_points_is_one_whose_value_was_changed_on_resume(tmp_path, name):
    """The value is in force in the next update, whatever the checkpoint was trained with."""
    whole = headrace.train(
        short_cartpole, run_dir=tmp_path / "whole", total_env_steps=4 * UPDATE,
        algo=PPO(**steps(name, 2 * UPDATE)), **RUN,
    )  # fmt: skip
    part = {"total_env_steps": 2 * UPDATE, "schedule_env_steps": 4 * UPDATE, **RUN}
    part |= {"algo": PPO(**{name: BEFORE[name]})}
    headrace.train(short_cartpole, run_dir=tmp_path / "part", **part)
    rates = []
    resumed = headrace.resume(
        tmp_path / "part", env=short_cartpole, total_env_steps=4 * UPDATE, quiet=True,
        on_update=lambda _, metrics: rates.append(metrics["lr"]), **{name: AFTER[name]},
    )  # fmt: skip
    headrace.train(short_cartpole, run_dir=tmp_path / "other", **part)
    other = headrace.resume(
        tmp_path / "other", env=short_cartpole, total_env_steps=4 * UPDATE, quiet=True
    )
    assert rates == pytest.approx([AFTER["lr"] if name == "lr" else PPO().lr] * 2)
    for key, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[key]), key
    assert not all(torch.equal(v, weights(other)[key]) for key, v in weights(resumed).items())


def test_running_returns_begin_anew_when_gamma_changes(tmp_path):
    run = RUN | {"num_steps": 2, "algo": PPO(gamma=0.9, num_minibatches=1), "lr_scale": "none"}
    for gamma, expected in ((0.5, 1.5), (0.9, ((0.9 + 1) * 0.9 + 1) * 0.9 + 1)):
        folder = tmp_path / str(gamma)
        headrace.train(short_cartpole, run_dir=folder, total_env_steps=8, **run)
        run_2 = headrace.resume(
            folder, env=short_cartpole, total_env_steps=16, gamma=gamma, quiet=True
        )
        saved = checkpoint.newest(run_2.dir).tensors("learner_default")["return_so_far"]
        assert saved.tolist() == pytest.approx([expected] * 4)  # each reward is 1


def test_what_comes_later_replaces_points_and_values(tmp_path):
    sizes = RUN | {"algo": PPO(lr=1e-3)}
    headrace.train(short_cartpole, run_dir=tmp_path / "run", total_env_steps=UPDATE, **sizes)

    def resumed(updates, **changes):
        seen = []
        headrace.resume(
            tmp_path / "run", env=short_cartpole, total_env_steps=updates * UPDATE, quiet=True,
            on_update=lambda _, metrics: seen.append(metrics["lr"]), **changes,
        )  # fmt: skip
        return seen

    assert resumed(2, lr_schedule=[[0, 1e-4]]) == pytest.approx([1e-4])
    assert resumed(3) == pytest.approx([1e-4])
    with pytest.raises(ConfigError, match=r"so far points .*\n.*--lr VALUE"):
        resumed(4, lr_schedule="constant")
    assert resumed(4, lr=1e-2) == pytest.approx([1e-2])
    config = json.loads((tmp_path / "run/config.json").read_text())
    for part in ("settings", "origin"):  # an older version's, without this schedule
        del config[part]["ent_schedule"]
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    assert resumed(5, ent_coef=0.1) == pytest.approx([1e-2])


def test_a_later_layer_replaces_points_and_values(tmp_path):
    path = tmp_path / "config.toml"
    for text, flags, lr, schedule in (
        ("lr_schedule = [[0, 1e-4]]", {"lr": 1e-2}, 1e-2, "constant"),
        ("lr = 1e-2", {"lr_schedule": [[0, 1e-4]]}, None, ((0.0, 1e-4),)),
        ("lr = 1e-2", {"lr_schedule": "linear"}, 1e-2, "linear"),
    ):
        path.write_text(text)
        algo = resolve({"env": "Something-v3"} | flags, read_config_file(path)).algo
        assert algo.lr_schedule == schedule
        assert lr is None or algo.lr == lr


def test_a_policy_s_own_value_replaces_the_points_of_all_and_its_points_their_value():
    given = {"env": "Something-v3", "policies": {"one": {"lr": 0.5}, "other": {"lr": 0.25}}}
    settings = resolve(given | {"lr_schedule": [[0, 1e-4]]})
    assert in_force(settings.of("one").algo, 5, 10).lr == 0.5
    given["policies"] = {"one": {"lr_schedule": [[0, 1e-4]]}, "other": {}}
    settings = resolve(given | {"lr": 0.5})  # as all is given, on resume
    assert in_force(settings.of("one").algo, 5, 10).lr == 1e-4
    assert in_force(settings.of("other").algo, 5, 10).lr == 0.5
    with pytest.raises(ConfigError, match=r"lr=0\.1 and lr_schedule with points"):
        resolve(given | {"policies": {"one": {"lr": 0.1, "lr_schedule": [[0, 1e-4]]}}})


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("linear", "linear"),
        ("0:3e-4,500k:1e-4", ((0.0, 3e-4), (500_000.0, 1e-4))),
        ("[[0, 3e-4], [5e5, 1e-4]]", ((0.0, 3e-4), (500_000.0, 1e-4))),
    ],
)
def test_a_schedule_is_typed_as_one_word(words, schedule):
    flags = parse("train", "", FLAGS["train"], ["--lr-schedule", words, "CartPole-v1"])
    given = explicit(["--lr-schedule", words, "CartPole-v1"], flags)
    assert resolve(given).algo.lr_schedule == schedule
    assert given["env"] == "CartPole-v1"


@pytest.mark.parametrize("words", ["0:x", "0:1:2", "[0", "cosine"])
def test_a_schedule_that_is_typed_wrongly_is_refused(words, capsys):
    with pytest.raises((ConfigError, SystemExit)):
        given = ["--lr-schedule", words, "CartPole-v1"]
        resolve(explicit(given, parse("train", "", FLAGS["train"], given)))
    assert words == "cosine" or "expected constant, linear, or points" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_schedule": [[0, 1e-3]], "lr_scale": "sqrt"}, "lr_scale='sqrt' multiplies lr"),
        ({"lr_schedule": "cosine"}, "lr_schedule='cosine'.*'constant', 'linear', or points"),
        ({"lr_schedule": []}, "or points"),
        ({"lr_schedule": [[0, 1e-3, 2]]}, "or points"),
        ({"lr_schedule": [[5, 1e-3], [4, 1e-3]]}, "do not decrease"),
        ({"lr_schedule": [[-1, 1e-3]]}, "from 0 on"),
        ({"lr_schedule": [[0, float("nan")]]}, "or points"),
        ({"gamma_schedule": "linear"}, "'constant', or points"),
        ({"gamma_schedule": [[0, 1.5]]}, r"gamma=1.5 \(gamma_schedule\): expected at least 0"),
        ({"lr": 1e-3, "lr_schedule": [[0, 1e-3]]}, "Leave --lr out, or use --lr-schedule constant"),
        (
            {"gamma_schedule": [[0, 0.9], [9, 0.99]], "normalize_reward": True},
            "Use steps, which are two points",
        ),
    ],
)
def test_schedules_are_refused_in_words(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve({"env": "Something-v3"} | settings)


def test_a_temperature_that_is_in_the_checkpoint_is_not_changed(tmp_path):
    headrace.train(
        "Pendulum-v1", algo=SAC(ent_coef=0.1, learning_starts=16, replay_size=100),
        total_env_steps=32, num_envs=1, num_steps=8, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a run of sac keeps the ent_coef that it has"):
        headrace.resume(tmp_path / "run", total_env_steps=64, ent_coef=0.2, quiet=True)
