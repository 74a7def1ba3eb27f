"""Sizes of a replay: what follows by itself, and what is refused."""

import pytest

from headrace.config.resolve import resolve
from headrace.errors import ConfigError


def resolved(**settings):
    return resolve({"env": "CartPole-v1", "algo": "dqn", "num_workers": 0} | settings)


def test_a_short_run_begins_to_learn_in_time_and_keeps_room_for_its_rows_alone():
    algo = resolved(total_env_steps=5_000).algo
    assert (algo.learning_starts, algo.replay_size) == (500, 5_000)
    algo = resolved(total_env_steps=5_000_000).algo
    assert (algo.learning_starts, algo.replay_size) == (1_000, 1_000_000)


def test_a_default_may_be_given_where_it_has_no_effect():
    assert resolved(total_env_steps=5_000, v_min=-10.0, num_atoms=51).algo.distribution == "none"


def test_what_is_given_is_kept():
    algo = resolved(total_env_steps=5_000, learning_starts=900, replay_size=20_000).algo
    assert (algo.learning_starts, algo.replay_size) == (900, 20_000)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_starts": 5_000}, "nothing would be learned"),
        ({"replay_ratio": 0.0}, "replay_ratio=0: not one gradient step would follow"),
        ({"replay_ratio": 1e-4}, "not one gradient step would follow from total_env_steps=5000"),
        (
            {"v_max": 5.0},
            "v_max=5.0 has no effect with distribution='none'.\nUse --distribution c51",
        ),
        ({"distribution": "qr", "v_min": 5.0}, "has no effect with distribution='qr'"),
        ({"num_atoms": 5}, "Use --distribution qr, or leave --num-atoms out"),
        ({"priority_beta": 0.6}, "has no effect with priority_alpha=0.0"),
        (
            {"num_steps": 8, "learning_starts": 2_000, "replay_size": 1_000},
            "replay_size=1000: expected 2000",
        ),
        ({"num_envs": 64, "num_steps": 16, "replay_size": 2_000}, "expected 2048 or more"),
    ],
)
def test_sizes_that_learn_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        resolved(**{"total_env_steps": 5_000} | settings)
