"""Sizes of batches and minibatches follow the number of environments, unless they are given."""

import math
from dataclasses import replace

import pytest

from headrace.config.batches import fitting_minibatches, fitting_steps
from headrace.config.derive import derive
from headrace.config.preset_tables import preset_tables
from headrace.config.presets import defaults, kind_of, preset
from headrace.config.resolve import read_config_file, read_settings
from headrace.envs.factory import EnvMaker, env_spec
from headrace.errors import ConfigError
from headrace.spec import EnvSpec, Space
from headrace.training.job import RunRequest, inspect_request

CONTINUOUS = EnvSpec(
    "Mine-v0", Space("box", (3,), "float32"), Space("box", (1,), "float32", (-1.0,), (1.0,))
)


def sizes(spec=CONTINUOUS, **given):
    settings = derive(read_settings({"env": spec.id, **given}, spec=spec))
    run, algo = settings.run, settings.algo
    assert run.num_envs * run.num_steps == algo.num_minibatches * algo.minibatch_size
    return run.num_envs, run.num_steps, algo.minibatch_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, 256, 64)),
        ({"num_envs": 1}, (1, 2_048, 64)),
        ({"num_envs": 64}, (64, 64, 64)),
        ({"num_envs": 24}, (24, 84, 72)),  # three steps of each in a minibatch
        ({"num_envs": 128}, (128, 64, 128)),  # no fewer steps: the batch grows
        ({"num_envs": 64, "num_steps": 128}, (64, 128, 64)),
        ({"num_steps": 100}, (8, 100, 80)),
        ({"num_minibatches": 4}, (8, 256, 512)),
        ({"minibatch_size": 100}, (8, 256, 128)),
        ({"minibatch_size": 512, "num_envs": 4}, (4, 512, 512)),
        ({"core": "lstm"}, (8, 256, 256)),
        ({"core": "lstm", "num_envs": 32}, (32, 64, 64)),
        ({"core": "lstm", "algo": "appo"}, (8, 128, 128)),
    ],
)
def test_rows_stay_when_only_the_number_of_environments_is_given(given, expected):
    assert sizes(**given) == expected


@pytest.mark.parametrize("num_envs", [1, 3, 8, 24, 64, 100])
def test_minibatches_of_a_recurrent_core_are_whole_runs_of_environments(num_envs):
    envs, steps, rows = sizes(num_envs=num_envs, core="lstm")
    assert rows % steps == 0
    assert envs % (rows // steps) == 0


def test_a_preset_keeps_its_rows_too():
    spec = EnvSpec("CartPole-v1", CONTINUOUS.observation, Space("discrete", nvec=(2,)))
    assert sizes(spec) == (8, 64, 64)
    assert sizes(spec, num_envs=16) == (16, 32, 64)
    # With both sizes given, the number of minibatches is the preset's.
    assert sizes(spec, num_envs=64, num_steps=128) == (64, 128, 1_024)


def test_sizes_that_were_derived_once_stay_when_read_again():
    spec = CONTINUOUS
    for given in ({}, {"num_envs": 24}, {"num_envs": 24, "core": "gru"}, {"minibatch_size": 100}):
        settings = derive(read_settings({"env": spec.id, **given}, spec=spec))
        again = derive(read_settings(settings.flat(), spec=spec))
        assert again.flat() == settings.flat()


def test_the_batch_of_each_learner_keeps_its_minibatches():
    given = {"num_learners": 2, "num_envs_per_learner": 8}
    assert sizes(**given) == (16, 256, 128)


def test_environments_in_all_and_per_learner_are_refused_together(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text("env = 'CartPole-v1'\nnum_envs = 32\nnum_envs_per_learner = 8\n")
    with pytest.raises(ConfigError, match="num_envs=32 and num_envs_per_learner=8: expected one"):
        derive(read_settings({}, read_config_file(file)))
    assert (
        derive(read_settings({"num_envs_per_learner": 4, "env": "CartPole-v1"})).run.num_envs == 4
    )


def test_number_and_size_of_minibatches_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="expected one of the two"):
        sizes(num_minibatches=4, minibatch_size=64)
    assert sizes(num_minibatches=32, minibatch_size=64) == (8, 256, 64)


def test_a_run_says_what_became_of_its_sizes():
    settings = derive(read_settings({"env": "Mine-v0", "num_envs": 128}, spec=CONTINUOUS))
    assert settings.source["num_steps"] == (
        "follows num_envs, a batch of 8,192 rows in place of 2,048"
    )
    assert settings.source["minibatch_size"].endswith("64 rounded to fit the batch")
    settings = derive(read_settings({"env": "Mine-v0", "core": "lstm"}, spec=CONTINUOUS))
    assert settings.source["minibatch_size"].endswith("64 rounded to whole sequences of 256 steps")
    assert settings.source["normalize_obs"] == "defaults for continuous control"


def test_one_policy_may_have_minibatches_of_its_own():
    policies = {"a": {"minibatch_size": 512}, "b": {"num_minibatches": 2}}
    settings = derive(read_settings({"env": "Mine-v0", "policies": policies}, spec=CONTINUOUS))
    assert settings.of("a").algo.num_minibatches == 4
    assert settings.of("b").algo.minibatch_size == 1_024
    assert settings.of("c").algo.minibatch_size == 64


def test_fitted_sizes_are_the_nearest():
    for envs in (1, 2, 3, 7, 50, 300):
        steps = fitting_steps(envs, 2_048, 256, 1)
        assert steps == max(64, round(2_048 / envs))
    assert fitting_steps(40, 1_024, 128, 6) == 36  # a multiple, and not below 32
    assert fitting_steps(8, 2_048, 256, 8) == 256
    for whole, others, wanted in ((100, 8, 64), (31, 7, 64), (256, 8, 3)):
        count = fitting_minibatches(whole, others, wanted)
        size = whole * others // count
        counts = [n for n in range(1, whole + 1) if whole % n == 0]
        best = min(abs(math.log(whole * others / n / wanted)) for n in counts)
        assert abs(math.log(size / wanted)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ("Pendulum-v1", "continuous control"),
        ("CartPole-v1", "discrete actions"),
        ("FrozenLake-v1", "discrete observations"),
        ("Blackjack-v1", "discrete observations"),
        ("MiniGrid-Empty-8x8-v0", "observations with images"),
        ("ALE/Breakout-v5", "images"),
        ("headrace/TagGridWorld-v0", "several agents"),
    ],
)
def test_the_kind_of_an_environment_follows_from_its_spaces(env, kind):
    spec = env_spec(EnvMaker(env, native="/" in env))
    assert kind_of(spec) == kind
    assert defaults(spec, "ppo")[0] == kind


def test_an_action_with_a_continuous_part_is_continuous_control():
    wheel = Space("box", (1,), "float32", (-1.0,), (1.0,))
    gear = Space("discrete", (), "int64", nvec=(5,), start=(0,))
    action = Space("tuple", parts=(("0", gear), ("1", Space("dict", parts=(("wheel", wheel),)))))
    assert kind_of(EnvSpec("Mine-v0", CONTINUOUS.observation, action)) == "continuous control"


def test_a_run_takes_the_defaults_of_its_environment_s_kind(tmp_path):
    request = RunRequest({"env": "examples.cartpole_without_velocities:make"})
    settings = inspect_request(request).job(tmp_path).settings
    assert settings.source["ent_coef"] == "defaults for discrete actions"
    assert (settings.algo.ent_coef, settings.run.num_steps) == (0.003, 256)


def test_what_is_for_an_algorithm_overrides_what_is_for_all():
    images = replace(CONTINUOUS, observation=Space("box", (84, 84, 3), "uint8"))
    assert [defaults(images, algo)[1]["num_steps"] for algo in ("ppo", "appo", "a2c")] == [
        128, 128, 8,
    ]  # fmt: skip
    # APPO has PPO's settings, and takes what is for them; what is for APPO itself comes first.
    assert preset("MountainCar-v0", "appo") == preset("MountainCar-v0", "ppo")
    assert "num_steps" not in preset("MountainCar-v0", "a2c")[1]
    mixed = preset("CartPole-v1", "appo")[1]
    assert (mixed["num_epochs"], mixed["lr"]) == (5, 1e-3)


def test_what_was_found_with_ppo_reaches_no_algorithm_that_learns_from_replay():
    own = {"total_env_steps", "env_kwargs", "image_net", "clip_reward", "hidden_sizes"}
    for env, (_, table) in preset_tables().items():
        for algo in ("dqn", "rainbow", "sac", "tqc", "droq", "td3", "ddpg", "bc", "cql", "iql"):
            # TQC has SAC's table as well, and so on
            of_some = {key for name in ("dqn", "sac", "td3", algo) for key in table.get(name, {})}
            assert preset(env, algo)[1].keys() <= own | of_some, (env, algo)
    assert preset("HalfCheetah-v5", "ppo")[1]["gamma"] == 0.98
    assert preset("HalfCheetah-v5", "examples.own_algorithm:Reinforce")[1].keys() == {
        "total_env_steps", "initial_log_std",
    }  # fmt: skip
    assert preset("Pendulum-v1", "sac")[1] == {"total_env_steps": 19_968}
    choices = replace(CONTINUOUS, action=Space("discrete", (), "int64", nvec=(5,), start=(0,)))
    assert "ent_coef" in defaults(choices, "ppo")[1]
    assert "ent_coef" not in defaults(choices, "sac")[1]  # of SAC it would fix the temperature


def test_rainbow_has_dqn_s_defaults_but_for_its_parts():
    images = replace(CONTINUOUS, observation=Space("box", (84, 84, 3), "uint8"))
    for spec, own in (
        (CONTINUOUS, {"distribution": "qr"}),
        (images, {"distribution": "c51", "hidden_sizes": [512]}),
    ):
        assert defaults(spec, "rainbow")[1] == defaults(spec, "dqn")[1] | own
    assert preset("LunarLander-v3", "rainbow") == preset("LunarLander-v3", "dqn")


def test_only_algorithms_with_minibatches_have_more_environments_with_a_core():
    assert defaults(CONTINUOUS, "a2c", "lstm") == defaults(CONTINUOUS, "a2c")
    game = replace(CONTINUOUS, roles=(("player", 2),))
    assert defaults(game, "ppo", "lstm") == ("several agents", {})


def test_an_algorithm_of_one_s_own_has_its_own_defaults():
    assert defaults(CONTINUOUS, "examples.own_algorithm:Reinforce") == ("continuous control", {})
