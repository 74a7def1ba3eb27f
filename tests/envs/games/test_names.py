"""PettingZoo's games by name: found, made in their form, refused with what would help."""

import json
import sys

import pytest

from headrace.cli.main import _main
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.games import names
from headrace.envs.registry import newest_version
from headrace.errors import (
    ConfigError,
    EnvNotFoundError,
    MissingExtraError,
    UsageError,
    install_command,
)

SHORT = ("--total-env-steps", 64, "--num-envs", 2, "--num-steps", 16, "--num-workers", 0)


def _run(*words):
    return _main([str(word) for word in words])


@pytest.mark.parametrize(
    ("env", "interface", "roles"),
    [
        ("classic/tictactoe-v3", "turns", (("player", 2),)),
        ("classic/connect_four-v3", "turns", (("player", 2),)),
        ("classic/rps-v2", "parallel", (("player", 2),)),
        ("mpe2/simple_tag-v3", "parallel", (("adversary", 3), ("agent", 1))),
        ("butterfly/knights_archers_zombies-v11", "parallel", (("archer", 2), ("knight", 2))),
        ("sisl/pursuit-v5", "parallel", (("pursuer", 8),)),
    ],
)
def test_a_name_makes_the_game_in_the_form_in_which_it_is_played(env, interface, roles):
    maker = EnvMaker(env)
    spec = env_spec(maker)
    assert (spec.id, spec.interface, spec.roles) == (env, interface, roles)
    assert not maker.is_code
    drawn = maker(render_mode="rgb_array")
    assert drawn.render_mode == "rgb_array"
    drawn.close()


def test_a_name_without_a_version_is_that_of_the_newest_one(monkeypatch):
    assert newest_version("classic/connect_four") == "classic/connect_four-v3"
    assert newest_version("mpe2/simple_spread") == "mpe2/simple_spread-v3"
    assert newest_version("classic/connect_four-v2") == "classic/connect_four-v2"
    assert newest_version("classic/nothing") == "classic/nothing"
    both = [*names.installed("classic"), "classic/rps-v11"]
    monkeypatch.setattr(names, "installed", lambda family: both)
    assert newest_version("classic/rps") == "classic/rps-v11"


def test_unknown_names_are_refused_with_near_misses():
    for env, meant in (
        ("classic/conect_four-v3", "classic/connect_four-v3"),
        ("classic/tictactoe-v2", "classic/tictactoe-v3"),
        ("atari/pongg-v3", "atari/pong-v3"),  # installed, and not listed
        ("mpe/simple_spread-v3", "mpe2/simple_spread-v3"),
        ("connect_four", "classic/connect_four-v3"),
    ):
        with pytest.raises(EnvNotFoundError, match=f"{env}(?s:.)*Did you mean {meant}"):
            EnvMaker(env)()


@pytest.mark.parametrize(
    ("env", "package", "remedy"),
    [
        ("classic/tictactoe-v3", "pettingzoo", install_command("pettingzoo")),
        ("mpe2/simple_spread-v3", "mpe2", install_command("pettingzoo")),
        ("butterfly/pistonball-v6", "pymunk", "pip install 'pettingzoo[butterfly]'"),
        ("classic/hanabi-v5", "shimmy", "pip install 'pettingzoo[classic]'"),
        ("atari/pong-v3", "multi_agent_ale_py", "pip install 'pettingzoo[atari]'"),
    ],
)
def test_a_missing_package_is_refused_with_what_installs_it(monkeypatch, env, package, remedy):
    for module in [m for m in sys.modules if m.partition(".")[0] in ("pettingzoo", "mpe2")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match="needs a package that is not installed") as caught:
        EnvMaker(env)()
    assert str(caught.value).endswith(f"To install it: {remedy}")


def test_wrong_arguments_and_vector_forms_are_refused():
    with pytest.raises(UsageError, match=r"tictactoe-v3 does not take the arguments {'colour': 3}"):
        EnvMaker("classic/tictactoe-v3", {"colour": 3})()
    with pytest.raises(ConfigError, match="registers no vector_entry_point"):
        EnvMaker("classic/tictactoe-v3", native=True).vector(1, 1)


def test_a_game_is_trained_resumed_and_evaluated_by_its_name_alone(tmp_path, capsys):
    run = tmp_path / "r"
    assert _run("train", "classic/tictactoe", *SHORT, "--run-dir", run) == 0
    config = json.loads((run / "config.json").read_text())
    assert (config["settings"]["env"], config["env_is_code"]) == ("classic/tictactoe-v3", False)
    assert _run("resume", run, "--total-env-steps", 96, "--quiet") == 0
    capsys.readouterr()
    assert _run("eval", run, "--episodes", 2, "--json") == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 2
    spread = ("mpe2/simple_spread-v3", "--env-kwargs", "max_cycles=5", *SHORT)
    assert _run("train", *spread, "--run-dir", tmp_path / "s", "--quiet") == 0


def test_names_are_listed_as_a_family(capsys):
    assert _run("list", "pettingzoo") == 0
    text = capsys.readouterr().out
    assert "classic/connect_four-v3 " in text and "Others, too: atari/*" in text
    assert _run("list", "atari/pong-v3") == 0
    assert "headrace train atari/pong-v3" in capsys.readouterr().out
