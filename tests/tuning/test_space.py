"""Tests of search spaces: what is drawn, what is refused, and those that come with algorithms."""

import numpy as np
import pytest

from headrace.config.algorithms import ALGORITHMS
from headrace.errors import ConfigError
from headrace.training.job import RunRequest, inspect_request
from headrace.tuning.space import default_space, parse_space, read_space, to_json
from headrace.tuning.study import settings_of

ALL = {
    "a": {"uniform": [0.0, 2.0]},
    "b": {"log": [1e-4, 1.0]},
    "c": {"one_minus_log": [0.001, 0.1]},
    "d": {"int": [2, 4]},
    "e": {"choice": [[64, 64], [256, 256], "x"]},
}
NEEDS_DATA = {"bc", "td3bc", "cql", "iql"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a", [0.0, 1.0, 2.0]),
        ("b", [1e-4, 1e-2, 1.0]),
        ("c", [0.999, 0.99, 0.9]),
        ("d", [2, 3, 4]),
        ("e", [[64, 64], [256, 256], "x"]),
    ],
)
def test_ends_and_middle(name, values):
    parameter = parse_space(ALL, "test")[name]
    assert [parameter.at(share) for share in (0.0, 0.5, 1.0)] == values
    assert parameter.grid() == values


@pytest.mark.parametrize("name", ALL)
def test_the_place_of_a_value_leads_back_to_it(name):
    parameter = parse_space(ALL, "test")[name]
    for share in np.linspace(0, 1, 13):
        value = parameter.at(float(share))
        again = parameter.at(parameter.place(value))
        assert again == (pytest.approx(value, rel=1e-3) if name in "abc" else value)


def test_the_place_of_a_value_outside_is_that_of_the_nearest():
    space = parse_space(ALL | {"f": {"choice": [32, 64, 256]}}, "test")
    assert [space["a"].place(x) for x in (-1.0, 2.1)] == [0.0, 1.0]
    assert space["b"].place("auto") is None
    assert space["b"].place(0.0) == 0.0
    assert [space["c"].place(x) for x in (1.0, 0.5)] == [pytest.approx(0.0), pytest.approx(1.0)]
    assert [space["d"].number(x) for x in (1, 3, 9)] == [2, 3, 4]
    assert space["e"].place([32, 32]) is None
    assert space["e"].place((64, 64)) == pytest.approx(1 / 6)  # settings have tuples
    assert [space["f"].index(x) for x in (1, 50, 2048)] == [0, 1, 2]
    assert space["f"].index("auto") is space["f"].index(True) is None


def test_a_space_survives_json():
    space = parse_space(ALL, "test")
    assert parse_space(to_json(space), "again") == space


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([1, 2], "expected one kind"),
        ({"log": [1, 2], "int": [1, 2]}, "expected one kind"),
        ({"logs": [1, 2]}, "Did you mean log?"),
        ({"log": [0.0, 1.0]}, "above 0"),
        ({"uniform": [2.0, 1.0]}, "the least first"),
        ({"uniform": [1.0]}, "two numbers"),
        ({"int": [1.5, 2.5]}, "two whole numbers"),
        ({"int": [True, 2]}, "two whole numbers"),
        ({"choice": []}, "expected a list"),
    ],
)
def test_wrong_tables_are_refused_in_words(table, said):
    with pytest.raises(ConfigError, match=r"lr \(my space\)") as refused:
        parse_space({"lr": table}, "my space")
    assert said in str(refused.value)


def test_files(tmp_path):
    path = tmp_path / "space.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_space(path)
    path.write_text("lr = {")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_space(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no setting"):
        read_space(path)
    path.write_text("lr = { log = [1e-5, 1e-2] }")
    assert read_space(path)["lr"].at(0.0) == 1e-5


@pytest.mark.parametrize("algo", sorted(set(ALGORITHMS) - NEEDS_DATA))
def test_what_an_algorithms_own_space_draws_is_taken(algo):
    """One setting after the other, and all at once, at both ends and between."""
    continuous = algo in ("sac", "tqc", "redq", "droq", "crossq", "td3", "ddpg")
    env = "Pendulum-v1" if continuous else "CartPole-v1"
    request = inspect_request(RunRequest({"env": env, "algo": algo, "deterministic": True}))
    space = default_space(algo)
    for share in (0.0, 0.5, 1.0):
        for name, parameter in space.items():
            settings_of(request, {name: parameter.at(share)})
        settings_of(request, {name: parameter.at(share) for name, parameter in space.items()})


@pytest.mark.parametrize("algo", sorted(NEEDS_DATA))
def test_algorithms_without_a_space_say_so(algo):
    with pytest.raises(ConfigError, match=r"--space FILE\.toml"):
        default_space(algo)
