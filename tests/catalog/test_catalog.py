"""What is known of environments is true: ids exist, extras bring them, figures are of them."""

import json
import tomllib
from pathlib import Path

import ale_py
import gymnasium as gym
import pytest

from headrace.catalog import extras, returns
from headrace.catalog.families import families, family_of
from headrace.cli.main import _main
from headrace.config.algorithms import ALGORITHMS
from headrace.config.preset_tables import algorithms_of_preset, preset_table, preset_tables
from headrace.envs import registry
from headrace.envs.games import names
from headrace.errors import UsageError
from headrace.tools.listing import find

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_every_id_is_registered_by_its_family(family):
    for env_id in family.ids:
        assert family_of(env_id) is family
        assert registry.load(env_id) == family.extra
        if family.name == "atari":
            gym.register_envs(ale_py)
        if family.name == "pettingzoo":
            assert env_id in names.installed(env_id.partition("/")[0])
        else:
            assert env_id in gym.registry


def test_every_extra_is_one_of_the_package():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {family.extra for family in families().values()} - {""} <= set(known)


def test_published_returns_are_of_listed_ids_and_algorithms():
    listed = {env_id for family in families().values() for env_id in family.ids}
    for env_id, rows in returns._published_toml()["returns"].items():
        assert env_id in listed
        assert set(rows) <= set(ALGORITHMS)
        for row in returns.published(env_id).values():
            assert row.env_steps >= 20_000 and row.source.startswith("RL Baselines3 Zoo")


def test_tables_of_algorithms_in_presets_are_found_without_importing_these():
    for pattern in preset_tables():
        found = algorithms_of_preset(pattern)
        assert found == [key for key in preset_table(pattern)[1] if key in ALGORITHMS]
    assert algorithms_of_preset("CartPole-v1") == ["ppo", "a2c", "appo", "impala", "dqn", "pqn"]
    assert algorithms_of_preset("Nothing-v0") == []


def listed(capsys, *words):
    assert _main(["list", *words]) == 0
    return capsys.readouterr().out


def test_list_shows_families_and_what_is_missing(capsys, monkeypatch):
    text = listed(capsys)
    assert all(line.split()[3] == "yes" for line in text.splitlines()[1:2])
    have = extras.version
    monkeypatch.setattr(extras, "version", lambda name: None if name == "mujoco" else have(name))
    rows = {line.split()[0]: line for line in listed(capsys).splitlines() if line}
    assert set(families()) < set(rows)
    assert " no " in rows["mujoco"] and " yes " in rows["box2d"]
    assert "[mujoco]" in rows["To"]  # To install ...
    assert "Not installed: mujoco. To install it: pip install" in listed(capsys, "mujoco")
    found = json.loads(listed(capsys, "mujoco", "--json"))["families"]
    assert [family["missing"] for family in found] == [["mujoco"]]


def test_list_of_a_family_has_presets_published_and_own_returns(capsys, monkeypatch):
    row = {"mean_return": 487.25, "standard_error": 3.5, "env_steps": 99_840, "seeds": 3}
    single = {"mean_return": 0.5, "standard_error": None, "env_steps": 999_424, "seeds": 1}
    own = {"CartPole-v1": {"ppo": row}, "intersection-v2": {"a2c": single}}
    monkeypatch.setattr(returns, "_own_json", lambda: own)
    lines = [line.split(maxsplit=3) for line in listed(capsys, "classic-control").splitlines()]
    assert [
        "CartPole-v1",
        "preset",
        "ppo",
        "500 (100 k)      487.2 ± 3.5 (100 k, 3 seeds)",
    ] in lines
    highway = [line.split(maxsplit=3) for line in listed(capsys, "highway").splitlines()]
    assert ["intersection-v2", "defaults", "ppo", "-                -"] in highway
    assert ["defaults", "a2c", "-", "0.5 (1 M, 1 seed)"] in highway
    found = json.loads(listed(capsys, "CartPole-v1", "--json"))["families"][0]["envs"]
    assert [(env["env"], env["preset"], env["own"]["ppo"]) for env in found] == [
        ("CartPole-v1", True, row)
    ]


def test_list_of_an_id_shows_its_line_and_how_to_train_it(capsys):
    text = listed(capsys, "CartPole-v1")
    assert "headrace train CartPole-v1\n" in text
    assert "headrace train CartPole-v1 --algo impala\n" in text
    assert "Acrobot" not in text
    assert "ALE/Frostbite-v5 " in listed(capsys, "ALE/Frostbite-v5")  # by the family's pattern
    with pytest.raises(UsageError, match="There is no family 'BabyAI-Nonsense-v9'"):
        find("BabyAI-Nonsense-v9")  # its family has MiniGrid-* besides


def test_numbers_are_short():
    values = (-0.001, 0.961, 12.34, 999.96, 5_660.4)
    assert [returns.format_return(each) for each in values] == [
        "0",
        "0.96",
        "12.3",
        "1,000",
        "5,660",
    ]
    steps = (400, 99_328, 999_424)
    assert [returns.format_steps(each) for each in steps] == ["400", "99 k", "1 M"]


def test_lists_fit_a_terminal(capsys):
    for words in ([], *([name] for name in families())):
        assert max(map(len, listed(capsys, *words).splitlines())) <= 100
