"""The benchmarks: real processes that take turns, and what is made of their figures."""

import json
import os
import select
import shlex
import subprocess
import sys

import gymnasium as gym
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    atari,
    cartpole,
    cheetah,
    cluster,
    dqn,
    export,
    front_page,
    guards,
    inference,
    kernels,
    learners,
    limits,
    published,
    replay,
    replay_ratio,
    start,
    table,
    uneven,
    waiting,
)
from benchmarks.drivers import measure_limit
from benchmarks.games import league, speed
from benchmarks.harness import contestants, turns
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.machine import ROOT
from benchmarks.harness.one_turn import TurnError, Work, take_turn
from benchmarks.peers import install, plain_ppo


def python(name, code, **more):
    return Contestant(name, [sys.executable, "-c", code], **more)


def rates(name, log, *of_turns, **more):
    """One that writes its name to a file at each turn, and prints that turn's rate."""
    return python(
        name,
        f"with open({str(log)!r}, 'a+') as log:\n"
        f"    log.write({name!r}); log.seek(0); turn = log.read().count({name!r}) - 1\n"
        f"rate = {of_turns!r}[turn]\n"
        'print(\'RESULT {"env_steps": 100, "env_steps_per_s": %s, "mean_return": 7}\' % rate)',
        **more,
    )


def compare(of, number=1, work=Work(100), **more):  # noqa: B008
    return turns.compare(turns.Comparison("Title", of, work, **more), number)


def by_name(results):
    return {row["name"]: row for row in results["contestants"]}


def test_contestants_alternate_and_their_medians_are_compared_with_the_best_peer(tmp_path):
    log = tmp_path / "log"
    results = compare(
        [
            rates("A", log, 30, 10, 50),
            rates("B", log, 20, 25, 15, is_peer=True, packages=("numpy", "not-there")),
            rates("C", log, 5, 6, 7, is_peer=True),
        ],
        3,
    )
    assert log.read_text() == "ABCABCABC"
    rows = by_name(results)
    assert rows["A"]["turns"] == [30, 10, 50]
    assert [rows["A"][key] for key in ("median", "min", "max", "of_best_peer")] == [30, 10, 50, 1.5]
    assert (rows["B"]["median"], rows["B"]["of_best_peer"]) == (20, 1.0)
    assert (rows["C"]["median"], rows["C"]["of_best_peer"]) == (6, 0.3)
    assert rows["C"]["mean_returns"] == [7, 7, 7]
    assert rows["B"]["versions"]["numpy"]
    assert rows["B"]["versions"]["not-there"] is None
    assert "1.50" in turns.table("Title", results)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; print('so far', file=sys.stderr); sys.exit('no such game')", "no such game"),
        ("print('no figure')", "printed no result"),
        ("", "printed no result"),
        ("print('[1]')", "printed no result"),
        ('print(\'{"env_steps": 100, "env_steps_per_s": null}\')', "printed no result"),
        ('print(\'{"env_steps": 99, "env_steps_per_s": 5}\')', "99 env steps; expected 100"),
        ('print(\'{"env_steps": 200, "env_steps_per_s": 5}\')', "200 env steps; expected 100"),
    ],
)
def test_a_failure_is_shown_and_the_others_go_on(tmp_path, capsys, code, says):
    results = compare([python("bad", code, is_peer=True), rates("A", tmp_path / "log", 3, 4)], 2)
    rows = by_name(results)
    assert rows["bad"]["failed"].startswith("turn 1: ")
    assert says in rows["bad"]["failed"]
    assert says in capsys.readouterr().out
    assert rows["bad"]["median"] is None
    assert (rows["A"]["median"], rows["A"]["of_best_peer"]) == (3.5, None)
    assert "FAILED in turn 1" in turns.table("Title", results)


def test_a_figure_of_other_work_than_was_meant_is_a_failure():
    result = '{"env_steps": 100, "env_steps_per_s": 5}'
    code = f"import sys; print('observation Box(2,)', file=sys.stderr); print({result!r})"
    assert take_turn(python("A", code, must_say="Box(2,)"), Work(100))["env_steps_per_s"] == 5
    with pytest.raises(TurnError, match="did other work: expected 'Box\\(4, 84, 84\\)' in"):
        take_turn(python("A", code, must_say="Box(4, 84, 84)"), Work(100))


def test_a_turn_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    endless = f"tail -f /dev/null & echo $! > {shlex.quote(str(pid_file))}; wait"
    slow = Contestant("slow", ["/bin/sh", "-c", endless])
    with pytest.raises(TurnError, match="took longer than 1 s"):
        take_turn(slow, Work(100, limit_s=1.0))
    try:
        child = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:  # ended, and its new parent has looked
        return
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended


def test_a_busy_process_is_there_until_the_command_beside_it_ends():
    code = "import os; p = os.getppid(); print(*open(f'/proc/{p}/task/{p}/children').read().split()"
    code += ", os.getpid()); raise SystemExit(3)"
    command = [sys.executable, "-m", "benchmarks.drivers.beside", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *started, itself = done.stdout.split()
    assert done.returncode == 3
    assert len(started) == 2
    assert itself in started
    assert not any(os.path.exists(f"/proc/{pid}") for pid in started)


def test_run_writes_json_and_prints_the_table_last(tmp_path, capsys, monkeypatch):
    output = tmp_path / "new" / "name.json"
    monkeypatch.setattr(sys, "argv", ["name", "--turns", "2", "--output", str(output)])
    good = turns.Comparison("Good", [rates("A", tmp_path / "log", 3, 4)], Work(100))
    assert turns.run("name", "What it is.", [good], turns=5) == 0
    written = json.loads(output.read_text())
    assert written["tables"]["Good"]["contestants"][0]["turns"] == [3, 4]
    machine = written["machine"]
    assert machine["cores"] >= 1
    assert machine["load_average_at_start"] >= 0
    assert len(machine["git_commit"]) == 40
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("A ")

    bad = turns.Comparison("Bad", [python("B", "raise SystemExit(3)")], Work(100))
    assert turns.run("name", "What it is.", [bad], turns=5) == 1


def test_a_peer_without_its_environment_is_missing_not_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "VENVS", tmp_path)
    peer = contestants.driver("SB3", "sb3", "sb3_bench", [])
    results = compare([peer])
    (row,) = results["contestants"]
    assert row["missing"] == "not installed: python benchmarks/peers/install.py sb3"
    assert row["failed"] is None
    assert "not installed" in turns.table("Title", results)
    assert "not installed" in capsys.readouterr().out


def every_comparison():
    yield from limits.comparisons()
    yield from (cartpole.training(), cartpole.solving(), cheetah.training(), atari.training())
    yield from (atari.stepping(n) for n in (8, 32))
    yield from (published.until(env) for env in published.ENVS)
    yield from uneven.comparisons()
    yield from start.comparisons()
    yield from guards.comparisons()
    yield from inference.comparisons()
    yield from kernels.comparisons()
    yield from cluster.comparisons()
    yield from (dqn.comparison(work) for work in dqn.TITLES)
    yield replay_ratio.comparison()
    yield from (replay.comparison(env) for env in replay.ENV_STEPS)
    yield from speed.comparisons()
    yield from league.comparisons()
    yield from waiting.comparisons()
    yield turns.Comparison("learners", learners.shared_out(100), Work(100))


def test_commands_are_written_down_without_what_is_particular_to_this_checkout():
    for comparison in every_comparison():
        for contestant in comparison.contestants:
            command = contestant.describe()["command"]
            assert str(ROOT) not in command
            assert not command.startswith("/")


def test_names_that_comparisons_and_tables_refer_to_are_there():
    by_title = {
        comparison.title: {contestant.name: contestant for contestant in comparison.contestants}
        for comparison in every_comparison()
    }
    for title, names in table.HEADLINES.items():
        assert set(names) <= set(by_title[title])
    for comparison in every_comparison():
        named = by_title[comparison.title]
        for pair in comparison.ratios.values():
            assert set(pair) <= set(named)
        for contestant in named.values():
            limit = contestant.compared_with
            assert not limit or named[limit].is_limit


def test_shares_of_limits_and_ratios(tmp_path):
    log = tmp_path / "log"
    results = compare(
        [
            rates("A", log, 30, 20),
            rates("B", log, 60, 10, compared_with="N"),
            rates("M", log, 100, 100, is_limit=True),
            rates("N", log, 700, 700, is_limit=True),
        ],
        2,
        also={"returned": lambda result: result["mean_return"]},
        ratios={"A / B": ("A", "B")},
        limit=1.0,
    )
    rows = by_name(results)
    assert [rows[name]["of_limit"] for name in "ABMN"] == [0.25, 0.05, None, None]
    assert rows["A"]["also"] == {"returned": 7}
    assert results["ratios"]["A / B"]["of_medians"] == 25 / 35
    assert results["ratios"]["A / B"]["of_turns"] == [0.5, 2.0]
    fixed = compare([rates("A", tmp_path / "other", 30)], limit=40.0)
    assert by_name(fixed)["A"]["of_limit"] == 0.75
    own = compare(
        [rates("A", tmp_path / "own", 30, 10, 90)],
        3,
        limit=lambda result: 4 * result["mean_return"],
    )
    assert by_name(own)["A"]["of_limit"] == 30 / 28


def test_one_that_is_slow_to_start_takes_fewer_turns(tmp_path):
    log = tmp_path / "log"
    results = compare(
        [rates("A", log, 30, 20, 10), rates("B", log, 60, turns=1)], 3, ratios={"A / B": ("A", "B")}
    )
    assert log.read_text() == "ABAA"
    assert by_name(results)["B"]["turns"] == [60]
    assert results["ratios"]["A / B"]["of_turns"] == [0.5]


def test_a_limit_does_no_work_and_needs_no_env_steps():
    limit = python("L", "print('{\"env_steps_per_s\": 5}')", is_limit=True)
    assert take_turn(limit, Work(100))["env_steps_per_s"] == 5


def solver(name, seconds, mean_return, **more):
    """Prints its turn's number as env steps."""
    said = f'print(f\'{{{{"env_steps": {{sys.argv[1]}}, "mean_return": {mean_return}}}}}\')'
    command = [sys.executable, "-c", f"import sys, time; time.sleep({seconds}); {said}"]
    return Contestant(name, [*command, contestants.TURN], **more)


@pytest.mark.more
def test_time_to_solve_is_measured_outside_and_less_is_better():
    work = Work(None, "turn_s", "s", lower_is_better=True, least_return=475)
    fast, slow = solver("fast", 0, 480), solver("slow", 0.5, 475, is_peer=True)
    slower = solver("slower", 1, 475, is_peer=True)
    rows = by_name(compare([fast, slow, slower, solver("bad", 0, 474)], 2, work))
    assert 0.5 <= rows["slow"]["min"] <= rows["slow"]["max"]
    assert rows["fast"]["of_best_peer"] == rows["slow"]["median"] / rows["fast"]["median"] > 1
    assert "not solved: mean return 474 after 0 env steps; expected 475" in rows["bad"]["failed"]
    assert take_turn(fast, work, turn=3)["env_steps"] == 3
    with pytest.raises(TurnError, match="mean return None"):
        take_turn(python("none", "print('{\"mean_return\": null}')"), work)


def test_a_contestant_can_be_held_to_one_core_and_runs_in_a_folder_that_is_removed():
    mine = os.sched_getaffinity(0)
    code = (
        'import os, tempfile; print(\'{"env_steps_per_s": %d, "at": "%s", "tmp": "%s"}\''
        "% (len(os.sched_getaffinity(0)), os.getcwd(), tempfile.gettempdir()))"
    )
    result = take_turn(python("one", code, cores=1), Work(None))
    assert (result["env_steps_per_s"], os.sched_getaffinity(0)) == (1, mine)
    assert result["at"] == result["tmp"]
    assert not os.path.exists(result["at"])


def test_the_picture_of_the_readme_has_every_group_and_a_bar_for_each_trainer(tmp_path):
    measured = front_page.groups()
    assert list(measured) == list(front_page.BARS.values())
    assert all({"Headrace", "Stable-Baselines3"} <= set(rates) for rates in measured.values())
    contestants = [{"name": "RLlib, 8 runners", "median": 3.0}, {"name": "RLlib", "median": None}]
    contestants += [{"name": "Headrace", "median": 1.0}, {"name": "Headrace, 2", "median": 2.0}]
    contestants += [{"name": "limit of this machine", "median": 9.0}]
    rates = front_page.best_rates({"contestants": contestants})
    assert rates == {"RLlib": 3.0, "Headrace": 2.0}
    front_page.draw(output=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_documents_tables_are_what_the_script_makes_of_the_results():
    for path, page in table.pages().items():
        assert path.read_text() == page, f"{path}: python -m benchmarks.table"


def test_tables_have_medians_spread_shares_ratios_and_failures(tmp_path):
    log = tmp_path / "log"
    title = "Stepping, Breakout, 8 environments"
    comparison = turns.Comparison(
        title,
        [
            rates("Headrace, 8 envs", log, 3000, 1000),
            rates("peer", log, 400, 400, is_peer=True),
            python("bad", "raise SystemExit(3)"),
        ],
        Work(100),
        also={"returned": lambda result: result["mean_return"]},
        ratios={"ours / theirs": ("Headrace, 8 envs", "peer"), "none": ("bad", "peer")},
        limit=4000.0,
    )
    machine = {"cores": 2, "cpu": "C", "date": "2026-11-21T10", "git_commit": "a" * 40}
    machine |= {"git_uncommitted_changes": True}
    found = {"atari": {"machine": machine, "tables": {title: turns.compare(comparison, 2)}}}
    lines = table.headlines(found).splitlines()
    assert lines[2:] == [
        f"| {title} (env steps/s) | 8 envs: 2,000 (1,000 to 3,000) | peer: 400 | 5.00 x | 50% |",
        "",
        f"{title}, ours / theirs: 5.000.",
        "",
        "atari: 2 cores, C, 2026-11-21, commit aaaaaaa, with changes.",
    ]
    whole = table.whole(found)
    assert "| | env steps/s | of the best peer | of the limit | returned |" in whole
    assert "| peer | 400 (400 to 400) | 1.00 x | 10% | 7 |" in whole
    assert "| bad | FAILED in turn 1: ended with 3 | - | - | - |" in whole
    assert "ours / theirs: 5.000 (in each turn: 7.500, 2.500)" in whole
    page = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert table.filled_in(page, "new", "x") == page.replace("old", "new")
    with pytest.raises(ValueError, match="bench:begin"):
        table.filled_in("a", "new")


def test_two_contestants_make_a_row_for_each_work(tmp_path):
    def compared(title, *learner):
        of = [
            rates("worker", tmp_path / title, 400, 200),
            rates("learner", tmp_path / f"{title} l", *learner),
        ]
        ratios = {"learner / worker": ("learner", "worker")}
        also = {"inferring": lambda result: result["mean_return"] / 100}
        return turns.compare(turns.Comparison(title, of, Work(100), also, ratios), 2)

    machine = {"cores": 2, "cpu": "C", "date": "2026-11-21T10", "git_commit": "a" * 40}
    machine |= {"git_uncommitted_changes": False}
    found = {
        "machine": machine,
        "tables": {"A": compared("A", 800, 100), "B": compared("B", 200, 100)},
    }
    assert table.side_by_side({"inference": found}).splitlines() == [
        "",
        "| | worker (env steps/s) | learner (env steps/s) | learner / worker | in each turn "
        "| inferring: worker | inferring: learner |",
        "|---|---|---|---|---|---|---|",
        "| A | 300 (200 to 400) | 450 (100 to 800) | 1.50 x | 2.00 x, 0.50 x | 7% | 7% |",
        "| B | 300 (200 to 400) | 150 (100 to 200) | 0.50 x | 0.50 x, 0.50 x | 7% | 7% |",
        "",
        "inference: 2 cores, C, 2026-11-21, commit aaaaaaa.",
    ]
    assert table.side_by_side({}) == ""


@pytest.mark.parametrize("work", list(limits.NETWORKS))
def test_operations_of_training_are_those_that_torch_counts(work):
    rows = 8
    if work == "atari":
        net, obs = plain_ppo.NatureCnn(4), torch.rand(rows, 4, 84, 84)
    else:
        actions = gym.spaces.Discrete(2) if work == "cartpole" else gym.spaces.Box(-1, 1, (6,))
        inputs = {"cartpole": 4, "cheetah": 17}[work]
        net, obs = plain_ppo.Mlp(inputs, actions), torch.rand(rows, inputs)
    acting, learning = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with acting:
        net(obs)
    with learning:
        chances, value = net(obs)
        action = chances.sample()
        (chances.log_prob(action).sum() + value.sum()).backward()
    epochs = limits.SETTINGS[work].num_epochs
    counted = acting.get_total_flops() + epochs * learning.get_total_flops()
    assert limits.flops(work) * rows == counted


def test_the_limit_of_training_is_stepping_and_then_multiplying():
    assert measure_limit.training(100.0, 50, 1000.0) == pytest.approx(1 / (0.01 + 0.05))
    command = [sys.executable, "-m", "benchmarks.drivers.measure_limit", "stepping"]
    alone = Contestant("S", [*command, "--env", "CartPole-v1", "--seconds", "0.1"])
    assert take_turn(alone, Work(None))["env_steps_per_s"] > 1000


@pytest.mark.more
def test_what_a_replay_costs_is_measured_without_learning():
    arguments = ["CartPole-v1", "--env-steps", "10000"]  # the last batch goes beyond
    ours = contestants.headrace_driver("Headrace", "replay_cost", arguments)
    found = take_turn(ours, Work(10_000, "buffer_mib", "MiB"))
    assert found["saved_mib"] > found["more_mib"] > 0
    assert min(found["save_s"], found["save_more_s"], found["restore_s"]) > 0


@pytest.mark.slow
def test_a_start_is_timed_and_its_memory_taken_by_the_workers_themselves():
    last = start.comparisons()[-1]
    (fresh,) = last.contestants
    result = take_turn(fresh, last.work)
    assert 0 < result["start_s"] < result["turn_s"]
    assert 10 < result["uss_mib"] <= result["pss_mib"] < 2000
    command = [word.replace("1", "2") if word == "1" else word for word in fresh.command]
    with pytest.raises(TurnError, match="1 workers reported; expected 2"):
        take_turn(Contestant("two", command), Work(None, "start_s"))


@pytest.mark.more
def test_the_first_env_step_and_update_are_timed_beside_the_import_of_torch():
    first = start.first_steps()
    no_workers, _, torch_alone = first.contestants
    result = take_turn(no_workers, first.work)
    assert 0 < result["start_s"] < result["first_update_s"] < result["turn_s"]
    assert take_turn(torch_alone, first.work)["start_s"] > 0


def test_the_plain_ppo_s_gaussian_is_torch_s():
    mean, log_std = torch.randn(5, 3), torch.randn(3)
    ours, theirs = (
        plain_ppo.Gaussian(mean, log_std),
        torch.distributions.Normal(mean, log_std.exp()),
    )
    action = ours.sample()
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action).sum(-1))
    torch.testing.assert_close(ours.entropy(), theirs.entropy().sum(-1))


@pytest.mark.slow
def test_the_plain_ppo_does_all_of_its_work_on_halfcheetah():
    steps = 2 * limits.SETTINGS["cheetah"].batch
    flags = ["--work", "cheetah", "--env-steps", str(steps), "--threads", "1"]
    plain = Contestant("plain", [sys.executable, "-m", "benchmarks.peers.plain_ppo", *flags])
    assert take_turn(plain, Work(steps))["mean_return"] < 1000


@pytest.mark.more
def test_a_call_of_an_exported_file_is_timed_beside_the_policy_s():
    name = "CartPole-v1, PPO, LSTM of 64"
    row = export.measure(name, turns=2, calls=3)
    assert [len(row["us"][who]) for who in (export.FILE, export.POLICY)] == [2, 2]
    assert all(check["ok"] for check in row["check"])
    row["us"] = {export.FILE: [2.0, 4.0, 3.0], export.POLICY: [30.0, 15.0, 45.0]}
    assert f"| {name} | 3 | 30 | 10.0 |" in export.tables({"rows": [row]})
