"""The benchmarks of games of several agents: their players, what is counted, and their tables."""

import dataclasses
import json
import sys

import numpy as np
import pytest

import headrace
from benchmarks import table
from benchmarks.games import __main__ as script
from benchmarks.games import classic, league, matrix, play, players, runs, speed, spread, taggers
from benchmarks.harness.machine import ROOT
from benchmarks.harness.one_turn import Work, take_turn
from benchmarks.peers import busy, uneven_game
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.kernels.library import RockPaperScissors
from headrace.envs.kernels.pettingzoo_adapter import KernelParallelEnv

TICTACTOE = "classic/tictactoe-v3"


def call(monkeypatch, *words):
    """The script with these words after its name; its exit code."""
    monkeypatch.setattr(sys, "argv", ["games", *map(str, words)])
    return script.main()


@pytest.mark.parametrize("part", script.PARTS)
def test_each_part_says_what_it_compares(part, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, part, "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert script.PARTS[part].__doc__.strip() in said
    assert "--share" in said and "--output" in said


def test_a_share_is_more_than_nothing_and_at_most_all(monkeypatch, capsys):
    for share in (0, 1.5):
        with pytest.raises(SystemExit) as ended:
            call(monkeypatch, "matrix", "--share", share)
        assert ended.value.code == 2
        assert "expected more than 0, and at most 1" in capsys.readouterr().err


# Players


def ends(board, is_perfect):
    """What the perfect player gets in all games from here: any of its moves, and any answer."""
    if any(all(board[square] == players.OTHER for square in line) for line in players.LINES):
        yield -1 if is_perfect else 1  # whoever has just moved has won
        return
    moves = [move for move, square in enumerate(board) if square == players.EMPTY]
    if not moves:
        yield 0
    if is_perfect:
        values = [-players.value(players.after(board, move)) for move in moves]
        moves = [m for m, value in zip(moves, values, strict=True) if value == max(values)]
    for move in moves:
        yield from ends(players.after(board, move), not is_perfect)


@pytest.mark.parametrize("begins", [True, False])
def test_perfect_play_loses_no_game_of_tictactoe_at_all(begins):
    found = set(ends((players.EMPTY,) * 9, begins))
    assert found == {0, 1}


def test_the_perfect_player_wins_where_it_can_and_stops_the_other_where_it_must():
    own, other, empty = players.OWN, players.OTHER, players.EMPTY

    def asked(*board):
        planes = [[square == own, square == other] for square in board]
        mask = np.array([square == empty for square in board], np.int8)
        seen = np.array(planes, np.int8).reshape(3, 3, 2)
        obs = {"observation": seen, "action_mask": mask}
        return {players.perfect_tictactoe(obs, "player_1") for _ in range(20)}

    win = (own, own, empty, other, other, empty, empty, empty, empty)
    assert asked(*win) == {2}
    stop = (own, empty, empty, other, other, empty, own, empty, empty)
    assert asked(*stop) == {5}
    assert len(asked(*[empty] * 9)) > 1  # of moves that are equally good, any


def test_games_are_counted_by_seat_and_perfect_play_loses_none():
    played = play.by_seat(TICTACTOE, players.perfect_tictactoe, players.random_move, 40)
    assert list(played) == ["player_1", "player_2"]
    for ended in played.values():
        assert ended["losses"] == 0 and ended["wins"] + ended["draws"] == 40
        assert ended["wins"] > 20
    # 0, 1, 2, ...: the diagonal 2, 4, 6 is the first one's
    lowest = lambda obs, agent: players.allowed(obs)[0]  # noqa: E731
    played = play.by_seat(TICTACTOE, lowest, lowest, 3)
    assert played["player_1"] == {"wins": 3, "draws": 0, "losses": 0}
    assert played["player_2"] == {"wins": 0, "draws": 0, "losses": 3}


def test_a_run_s_policy_plays_its_likeliest_action(tmp_path):
    headrace.train(
        TICTACTOE, total_env_steps=128, num_envs=4, num_steps=16, num_minibatches=1,
        num_workers=0, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    player = play.policy_player(tmp_path / "run")
    obs = {"observation": np.zeros((3, 3, 2), np.int8), "action_mask": np.zeros(9, np.int8)}
    obs["action_mask"][7] = 1
    assert player(obs, "player_1") == 7
    played = play.by_seat(TICTACTOE, player, players.perfect_tictactoe, 5)
    assert all(ended["wins"] == 0 and sum(ended.values()) == 5 for ended in played.values())


# Rock-paper-scissors


def test_payoffs_are_those_of_the_game():
    env = KernelParallelEnv(RockPaperScissors())
    agents = env.possible_agents
    for own in range(3):
        for other in range(3):
            env.reset(seed=0)
            reward = env.step(dict(zip(agents, (own, other), strict=True)))[1]
            assert [reward[a] for a in agents] == [
                matrix.PAYOFF[own, other],
                matrix.PAYOFF[other, own],
            ]


def test_exploitability_of_the_second_half():
    assert matrix.exploitability(np.full(3, 1 / 3)) == pytest.approx(0)
    assert matrix.exploitability(np.array([0.5, 0.5, 0])) == pytest.approx(0.5)
    circles = np.concatenate([np.eye(3)[[0, 0, 0]], np.eye(3)])
    found = matrix.figures(circles)
    assert found["mean"] == pytest.approx([1 / 3] * 3)
    assert found["exploitability_of_mean"] == pytest.approx(0)
    assert found["mean_exploitability"] == 1


@pytest.mark.more
def test_snapshots_of_two_ways_to_learn_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    assert call(monkeypatch, "matrix", "--share", "0.005", "--seeds", "1") == 0
    result = json.loads((tmp_path / "games_matrix.json").read_text())
    assert list(result["forms"]) == list(matrix.FORMS)
    for (found,) in result["forms"].values():
        assert found["env_steps"] == 2 * matrix.BATCH
        assert len(found["snapshots"]) == 3  # at the start, and after each update
        assert np.sum(found["snapshots"], 1) == pytest.approx(1, abs=1e-3)
    with_league = result["forms"]["with a league of 8"][0]["command"]
    assert "--league 8" in with_league and str(tmp_path) not in with_league


def test_the_table_of_rock_paper_scissors_has_each_seed():
    seeds = [
        {"mean": [0.5, 0.3, 0.2], "exploitability_of_mean": e, "mean_exploitability": 2 * e}
        for e in (0.1, 0.3)
    ]
    text = matrix.tables({"seeds": 2, "forms": {"alone": [s | {"env_steps": 9} for s in seeds]}})
    assert "| 0.50 0.30 0.20; 0.50 0.30 0.20 | 0.20 (0.10, 0.30) | 0.40 (0.20, 0.60) |" in text


# Taggers


def test_a_frozen_policy_is_trained_before_those_who_meet_it_and_nobody_meets_the_pool():
    known, groups = {"random"}, taggers.plan(2)
    for group in groups:
        frozen = {flag.partition("=")[2] for *_, flags in group for flag in flags if "=" in flag}
        assert frozen <= known
        known |= {name for name, *_ in group}
    by_name = {name: (seed, " ".join(flags)) for group in groups for name, seed, _, flags in group}
    contestants = {f"{prefix}_{seed}" for prefix in taggers.FORMS.values() for seed in range(2)}
    assert contestants | set(taggers.POOL) <= set(by_name)
    for name in contestants:
        assert not any(other in by_name[name][1] for other in taggers.POOL)
    seeds = {by_name[name][0] for name in contestants | {"runner_0", "runner_1"}}
    of_pool = {*taggers.POOL, *(f"taggers_{pair}" for pair in taggers.PAIRS)}
    assert not seeds & {by_name[other][0] for other in of_pool}


def test_taggers_of_one_run_meet_the_runner_of_another(tmp_path):
    one, other = (
        headrace.train(
            taggers.ENV, env_kwargs=taggers.KWARGS, total_env_steps=64, num_envs=8, num_steps=4,
            num_minibatches=1, num_workers=0, num_learners=1, run_dir=tmp_path / f"run_{seed}",
            seed=seed, quiet=True,
        )
        for seed in (0, 1)
    )  # fmt: skip
    found = taggers.meet(one.dir, other.dir, 30)
    same = one.evaluate(30, stochastic=True, policies={"runner": other.policies["runner"]})
    assert found["tagger_return"] == np.mean(same.by_policy["tagger"])
    assert found["runner_return"] == np.mean(same.by_policy["runner"])
    assert found["caught"] == np.mean(np.array(same.lengths) < taggers.STEPS) > 0


def test_the_table_of_taggers_has_each_kind_of_runners_and_each_seed():
    def seed(caught):
        shares = {"random": caught, "chased": caught + 0.2}
        return {
            other: {"caught": shares[other.partition("_")[0]], "tagger_return": 1.0}
            for other in taggers.POOL
        }

    found = {"meetings": {"league": [seed(0.5), seed(0.7)]}, "episodes": 100}
    row = "| league | 60.0% | 80.0% | 70.0% | 10.0% | 60%, 80% | 1.00 |"
    assert row in taggers.tables(found).splitlines()


# simple_spread, and both of the classics


@pytest.mark.more
def test_returns_of_random_play_are_means_over_agents():
    found = spread.random_play(3)
    assert -60 < found["eval_return"] < -10
    assert found == spread.random_play(3)


@pytest.mark.more
def test_a_run_of_headrace_is_trained_and_plays(tmp_path):
    found = spread.ours("Headrace, shared critic", 0, 2 * spread.SETTING.batch, 2, tmp_path)
    assert found["env_steps"] == 2 * spread.SETTING.batch and found["env_steps_per_s"] > 0
    assert "--critic shared" in found["command"]
    assert -60 < found["eval_return"] < -10


def test_a_peer_that_is_not_installed_is_said_to_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.install.VENVS", tmp_path)
    found = spread.theirs(0, 100, 1, 1.0)
    assert "not installed: python benchmarks/peers/install.py rllib" in found["failed"]
    whole = {"eval_return": -20.0, "env_steps": 100, "env_steps_per_s": 3.0}
    result = {"forms": {"A": [whole, whole], "B": [whole, found]}, "episodes": 5}
    lines = spread.tables(result | {"random": {"eval_return": -30.0}}).splitlines()
    assert "| A | -20.00 | -20.00, -20.00 | 100 |" in lines
    assert f"| B | {found['failed']} | - | - |" in lines
    assert "| random actions | -30.00 | - | - |" in lines


def test_what_was_stopped_goes_on_with_the_runs_that_are_missing(tmp_path, monkeypatch):
    made = []

    def run(form, seed):
        made.append((form, seed))
        return {"seed": seed, "eval_return": -20.0 - seed, "env_steps": 100}

    monkeypatch.setattr(spread, "ours", lambda form, seed, *_: run(form, seed))
    monkeypatch.setattr(spread, "theirs", lambda seed, *_: run(spread.RLLIB, seed))
    words = ["spread", "--output", tmp_path / "found.json", "--share", 0.01]
    assert call(monkeypatch, *words, "--seeds", 2) == 0
    assert len(made) == 6
    assert call(monkeypatch, *words, "--seeds", 3, "--go-on") == 0
    forms = [*spread.FORMS, spread.RLLIB]
    assert sorted(made[6:]) == sorted((form, 2) for form in forms)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [[each["seed"] for each in found["forms"][form]] for form in forms] == [[0, 1, 2]] * 3
    assert call(monkeypatch, *words, "--seeds", 1) == 0
    assert len(made) == 12


def test_the_table_of_the_classics_has_each_seat():
    won = {"wins": 3, "draws": 2, "losses": 1}
    lost = {"wins": 0, "draws": 1, "losses": 5}
    run = {"against": {classic.RANDOM: [won, lost]}, "env_steps": 1000, "wall_s": 3.0}
    found = {"games": {"classic/tictactoe-v3": {"against itself": [run, run]}}}
    lines = classic.tables(found).splitlines()
    assert "| against itself | random moves | first | 12 | 6 | 4 | 2 |" in lines
    assert "| against itself | random moves | second | 12 | 0 | 2 | 10 |" in lines


# Speed


def test_shares_are_whole_batches_of_all_contestants():
    assert speed.ENV_STEPS % speed.LEAST_ENV_STEPS == 0
    for share in (1.0, 0.01):
        for comparison in (*speed.comparisons(share), *league.comparisons(share)):
            steps = {
                word
                for contestant in comparison.contestants
                for flag, word in zip(contestant.command, contestant.command[1:], strict=False)
                if flag in ("--total-env-steps", "--env-steps")
            }
            assert len(steps) == 1
            if comparison.work.env_steps:
                assert steps == {str(comparison.work.env_steps)}


def test_agent_steps_are_of_all_agents():
    result = {"env_steps_per_s": 10.0, "env_steps": 100, "agent_steps": 5500}
    assert league.agent_steps(result) == 1100
    assert league.learned_from(result) == 0.5


def test_the_uneven_game_sleeps_once_for_all_its_agents(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setenv(busy.FOLDER, str(tmp_path))
    monkeypatch.setattr("benchmarks.peers.uneven.time.sleep", slept.append)
    env = uneven_game.UnevenGame("constant")
    env.reset(seed=3)
    steps = 0
    while env.agents:
        obs, _, terminated, truncated, _ = env.step(dict.fromkeys(env.agents, 0))
        steps += 1
        assert list(obs) == env.possible_agents and not any(terminated.values())
    assert all(truncated.values())
    assert len(slept) == steps == busy.totals(tmp_path)["steps"]
    spec = env_spec(EnvMaker("benchmarks.peers.uneven_game:UnevenGame"))
    assert (spec.interface, spec.num_agents) == ("parallel", uneven_game.AGENTS)


@pytest.mark.more
@pytest.mark.parametrize("name", [speed.INLINE, speed.WORKERS])
def test_a_contestant_trains_in_the_game(name):
    comparison = speed.mpe("tag", 0.01)
    (ours,) = (each for each in comparison.contestants if each.name == name)
    assert take_turn(ours, comparison.work)["env_steps"] == speed.LEAST_ENV_STEPS


@pytest.mark.slow  # RLlib takes most of a minute to start
@pytest.mark.timeout(600)
@pytest.mark.parametrize("work", speed.TITLES)
def test_rllib_trains_in_the_game_and_plays(work):
    comparison = speed.mpe(work, 0.01)
    peer = comparison.contestants[-1]
    if peer.missing:
        pytest.skip(f"{peer.name}: {peer.missing}")
    peer = dataclasses.replace(peer, command=[*peer.command, "--episodes", "2"])
    found = take_turn(peer, Work(comparison.work.env_steps, limit_s=500.0))
    assert np.isfinite([found["mean_return"], found["eval_return"]]).all()


def test_the_pages_have_places_for_all_tables():
    pages = {part.NAME: page for part, page in table.PARTS.items()} | table.WHOLE
    for part in script.PARTS.values():
        page = (ROOT / pages[part.NAME]).read_text()
        assert "some text" in table.filled_in(page, "some text", part.NAME)
