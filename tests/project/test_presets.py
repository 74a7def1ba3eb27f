"""The script that measures presets: real runs that are cut and resumed, and its page."""

import argparse
import json
from concurrent.futures import Future

import pytest

from benchmarks.presets import __main__ as script
from benchmarks.presets import page, results, runs
from benchmarks.presets.tasks import AN_HOUR, ELSEWHERE, Task, chosen, tasks
from benchmarks.table import filled_in
from headrace.catalog.families import families
from headrace.catalog.returns import Published
from headrace.errors import UsageError

CARTPOLE = Task("classic-control", "CartPole-v1", num_seeds=1)
MORE = ("--total-env-steps", "30720")
ARGS = {"who": "headrace", "seeds": "", "at_once": 2, "deadline_s": None, "again": False}


def seed(number, mean_return, **more):
    """A seed's result, as `measure_seed` makes it."""
    return {
        "seed": number,
        "settings": runs.settings_of(CARTPOLE, number),
        "env_steps": 99_840,
        "wall_s": 16.0,
        "mean_return": 490.0,
        "evaluation": {"mean_return": mean_return, "standard_error": 2.5, "episodes": 100},
        "curve": {"env_steps": [512, 99_840], "wall_s": [1, 16], "mean_return": [20.0, 490.0]},
        "machine": {"git_commit": "abcdef1234", "cpu": "a CPU", "cores": 2, "date": "2026-11-24T"},
        **more,
    }


@pytest.mark.slow
def test_a_run_that_is_cut_and_resumed_gives_the_same_as_one_that_is_not(tmp_path):
    args, processes = argparse.Namespace(**ARGS), runs.Processes()
    folders, uncut = runs.trial(tmp_path / "cut"), runs.trial(tmp_path / "uncut")

    def cut(line):
        if "/s  return" in line and not processes.stopping:  # the first update
            processes.stop()

    processes.on_line = cut
    assert script.measure([CARTPOLE], args, folders, processes, MORE, 5) == 0
    assert processes.stopping and results.read(folders.results) == {}
    for each in (folders, uncut):
        assert script.measure([CARTPOLE], args, each, runs.Processes(), MORE, 5) == 0
    found, whole = (results.read(f.results)["CartPole-v1-ppo"]["runs"][0] for f in (folders, uncut))
    assert "Resumed from" in (folders.run_dir(CARTPOLE, 1) / "stderr.txt").read_text()
    assert found["env_steps"] == whole["env_steps"] == 30_720
    for name in ("env_steps", "mean_return"):
        assert found["curve"][name] == whole["curve"][name]
    assert found["curve"]["wall_s"] == sorted(found["curve"]["wall_s"])
    assert found["evaluation"] == whole["evaluation"]
    assert 9 < results.read_others(uncut.results, results.RANDOM)["CartPole-v1"]["mean_return"] < 40
    # What has a result is not trained again, unless it is asked for or the settings changed.
    assert list(script.wanted_seeds(CARTPOLE, args, uncut, MORE)) == []
    assert list(script.wanted_seeds(CARTPOLE, args, uncut, ("--lr", "0.1"))) == [1]
    again = argparse.Namespace(**ARGS | {"again": True})
    assert list(script.wanted_seeds(CARTPOLE, again, uncut, MORE)) == [1]


def test_the_deadline_stops_what_runs_and_keeps_it(tmp_path):
    folders, processes = runs.trial(tmp_path), runs.Processes()
    args = argparse.Namespace(**ARGS | {"deadline_s": 0.2})
    assert script.measure([CARTPOLE], args, folders, processes, episodes=5) == 0
    assert processes.stopping and not processes._running
    assert results.read(folders.results) == {}
    assert list(script.wanted_seeds(CARTPOLE, argparse.Namespace(**ARGS), folders, ())) == [1]


def test_the_table_is_made_of_the_results(tmp_path):
    folders = runs.trial(tmp_path)
    for number, mean in ((1, 480.0), (2, 500.0)):
        results.add_seed(folders.results, CARTPOLE, seed(number, mean))
    results.add_other(folders.results, results.RANDOM, "CartPole-v1", {"mean_return": 20.0})
    script.write(folders)
    expected = "| CartPole-v1 | ppo | 490 ± 10 | 490 | 500 (100 k) | 98% | 20 | 99,840 | 16 | 2 |"
    assert expected in folders.page.read_text()
    assert (folders.results / "classic-control.png").read_bytes().startswith(b"\x89PNG")
    own = json.loads(folders.own_returns.read_text())
    row = {"mean_return": 490.0, "standard_error": 10.0, "env_steps": 99_840, "seeds": 2}
    assert own == {"CartPole-v1": {"ppo": row}}
    # A seed with other settings takes the place of those before.
    results.add_seed(folders.results, CARTPOLE, seed(3, 400.0, settings={"lr": 0.1, "seed": 3}))
    script.write(folders)
    assert "| ppo | 400 ± 2.5 ¹ ² | 490 | 500 (100 k) | 79% | 20 | 99,840 | 16 | 1 |" in (
        folders.page.read_text()
    )
    assert json.loads(folders.own_returns.read_text()) == {}  # `headrace list` has today's alone


def test_algorithms_on_one_environment_are_set_side_by_side(tmp_path):
    folders, other = runs.trial(tmp_path), Task("classic-control", "CartPole-v1", algo="dqn")
    choose = folders.page.with_name("choose.md")
    choose.write_text("Before.\n<!-- compared:begin -->\nold\n<!-- compared:end -->\nAfter.\n")
    results.add_seed(folders.results, CARTPOLE, seed(1, 480.0))
    results.add_seed(folders.results, other, seed(1, 470.0) | {"env_steps": 50_048})
    script.write(folders)
    assert (
        "| CartPole-v1 | ppo | 480 | 99,840 | 16 |\n| CartPole-v1 | dqn | 470 | 50,048 | 16 |"
        in (choose.read_text())
    )
    assert "old" not in choose.read_text() and choose.read_text().endswith("After.\n")
    pictures = {path.stem for path in folders.results.glob("*.png")}
    assert pictures == {"classic-control", "algo-dqn", "compared"}


def test_a_seed_without_an_ended_episode_is_kept_and_left_out_of_the_mean(tmp_path, capsys):
    folders, done = runs.trial(tmp_path), Future()
    folders.run_dir(CARTPOLE, 1).mkdir(parents=True)
    curve = {"env_steps": [512], "wall_s": [1], "mean_return": [None]}
    done.set_result(seed(1, 480.0, curve=curve) | {"mean_return": None})
    assert not script._keep(done, CARTPOLE, 1, folders)
    assert "seed 1: - in training, 480.00 evaluated" in capsys.readouterr().out
    script.write(folders)
    assert "| ppo | 480 ± 2.5 ¹ | - |" in folders.page.read_text()
    results.add_seed(folders.results, CARTPOLE, seed(2, 500.0))
    script.write(folders)
    assert "| ppo | 490 ± 10 | 490 |" in folders.page.read_text()


# Box2D's extension ends the process if a warning of its import is made an error.
@pytest.mark.filterwarnings("ignore")
def test_a_preset_with_fewer_env_steps_is_listed_and_held_against_what_is_published(tmp_path):
    folders = runs.trial(tmp_path)
    (task,) = chosen("CarRacing-v3")
    env_steps = runs.settings_of(task, 1)["total_env_steps"]
    assert env_steps < AN_HOUR[task.env] + 8192
    played = seed(1, 500.0, settings=runs.settings_of(task, 1)) | {"env_steps": env_steps}
    results.add_seed(folders.results, task, played)
    script.write(folders)
    assert f"`headrace train CarRacing-v3 --algo ppo --total-env-steps {AN_HOUR[task.env]}`" in (
        folders.page.read_text()
    )
    own = json.loads(folders.own_returns.read_text())
    assert own["CarRacing-v3"]["ppo"]["env_steps"] == env_steps
    assert results.is_comparable(task.algo, task.flags)


# Box2D's extension ends the process if a warning of its import is made an error.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.more  # it reads the settings of all presets
def test_the_page_and_own_returns_are_what_the_script_makes_of_the_results(tmp_path):
    found = results.read(runs.HERE.results)
    outdated = runs.outdated(found)
    assert runs.HERE.page.read_text() == page.text(runs.HERE, found, outdated)
    choose = runs.HERE.page.with_name("choose.md").read_text()
    assert choose == filled_in(choose, page.comparison(found), "compared")
    current = {name: task for name, task in found.items() if name not in outdated}
    results.write_own_returns(tmp_path / "own.json", current)
    assert runs.HERE.own_returns.read_text() == (tmp_path / "own.json").read_text()
    assert set(found) <= {task.name for task in tasks()}


def test_what_is_not_published_stands_beside_a_peer_that_had_as_many_env_steps(tmp_path):
    task, folders = Task("toy-text", "Blackjack-v1"), runs.trial(tmp_path)
    settings = runs.settings_of(task, 1)
    results.add_seed(folders.results, task, seed(1, -0.04, settings=settings))
    results.add_other(folders.results, results.RANDOM, task.env, {"mean_return": -0.4})
    peer = {"env_steps": 100_352, "mean_return": -0.2, "eval_return": -0.1}
    results.add_other(folders.results, results.PEER, task.env, peer)
    script.write(folders)
    row = "| Blackjack-v1 | ppo | -0.04 ± 2.5 ¹ | 490 | -0.1 (100 k) ³ | 120% | -0.4 | 99,840 |"
    assert row in folders.page.read_text()
    assert set(results.read(folders.results)) == {task.name}
    assert runs.outdated(results.read(folders.results)) == set()
    # Settings that only change the speed do not count; all others do.
    for change, is_outdated in (
        ({"num_workers": 9, "envs_per_vector": 1}, False),
        ({"lr": 1}, True),
        ({"max_grad_norm": 0.5}, False),  # the default of its class, and nothing sets it
    ):
        other = seed(1, -0.04, settings=settings | change)
        assert runs.outdated({task.name: {"runs": [other]}}) == (
            {task.name} if is_outdated else set()
        )
    # A trial has other settings, and its page compares with these.
    more = ("--total-env-steps", "4096")
    assert runs.outdated(results.read(folders.results), more) == {task.name}
    assert script.enough_steps(peer, 99_840) and not script.enough_steps(None, 99_840)
    assert not script.enough_steps(peer, 100_608) and not script.enough_steps(peer, 50_000)


def test_of_a_peer_that_learned_nothing_there_is_no_share():
    theirs, random = Published(0.0, 500_000, ""), {"mean_return": 0.0}
    assert page._share(0.96, theirs, random) == "-"
    assert page._share(0.5, Published(1.0, 500_000, ""), random) == "50%"


def test_seconds_of_a_curve_are_those_of_all_its_processes():
    rows = [{"env_steps": i, "wall_s": s, "mean_return": 0} for i, s in enumerate([2, 5, 3, 4])]
    assert runs.curve_of(rows)["wall_s"] == [2, 5, 8, 9]
    long = [{"env_steps": i, "wall_s": i, "mean_return": 0} for i in range(1, 1001)]
    steps = runs.curve_of(long)["env_steps"]
    assert len(steps) == runs.POINTS and steps[-1] == 1000


def test_tasks_follow_from_presets_and_the_catalog():
    cartpole = {task.name for task in chosen("CartPole-v1")}
    assert {"CartPole-v1-ppo", "CartPole-v1-a2c", "CartPole-v1-impala-lag-4"} <= cartpole
    assert {task.num_seeds for task in chosen("atari")} == {1}
    assert [task.label for task in chosen("LunarLander-v3", "dqn", "dueling")] == ["dueling"]
    assert [task.label for task in chosen("LunarLander-v3", "dqn", "")] == [""]
    listed = {env for family in families().values() for env in family.ids}
    assert set(AN_HOUR) | set(ELSEWHERE) <= listed
    assert all(task.env.startswith("ALE/") for task in chosen("ALE/*"))
    assert len({task.name for task in tasks()}) == len(tasks())
    assert "headrace/TagGridWorld-v0" not in {task.env for task in tasks()}  # docs/tag.md
    with pytest.raises(UsageError, match="Did you mean LunarLander-v3"):
        chosen("LunarLander")
