"""Tournaments: who meets whom in which seats, what counts as a win, and the ranking."""

import json
import os
import select
import signal

import numpy as np
import pytest
import torch

import headrace
from headrace.cli.main import _main
from headrace.envs.factory import EnvMaker
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.scripted import ScriptedPolicy
from headrace.evaluation.trained_policies import load_policies
from headrace.leagues.players import Player
from headrace.leagues.tournament import play_tournament, seatings
from headrace.seeding import derive
from headrace.spec import Agents
from headrace.tools.tournament import tournament_of_runs
from headrace.training.job import RunRequest
from tests.envs.kernels.support import Ring
from tests.faults.support import start
from tests.leagues import tournament_support as support
from tests.leagues.tournament_support import always, first_free, meet, perfect
from tests.python import command

TICTACTOE, RPS = "classic/tictactoe-v3", "headrace/RockPaperScissors-v0"
SHORT = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "quiet": True, "total_env_steps": 256}
SCRIPTS = "tests.leagues.tournament_support"


def trained(folder, env, **more):
    return headrace.train(env, run_dir=folder, **SHORT | more)


def games_of(result, one, other):
    """The games of a pair, by names: (wins, draws, losses) of `one`."""
    players = list(result.players)
    (found,) = [g for g in result.games if {g.i, g.j} == {players.index(one), players.index(other)}]
    three = found.wins, found.draws, found.losses
    return three if players[found.i] == one else three[::-1]


@pytest.fixture(scope="module")
def tictactoe():
    players, maker, spec = meet(TICTACTOE, perfect=perfect, random="random", lazy=first_free)
    return play_tournament(players, maker, spec, episodes=60)


def test_a_perfect_player_does_not_lose(tictactoe):
    wins, draws, losses = games_of(tictactoe, "perfect", "random")
    assert losses == 0 and wins > 40 and wins + draws == 60
    assert games_of(tictactoe, "perfect", "lazy") == (60, 0, 0)
    by_rating = sorted(zip(tictactoe.ratings, tictactoe.players, strict=True))
    assert by_rating[-1][1] == "perfect" and by_rating[-1][0] > 300
    assert dict((name, rating) for rating, name in by_rating)["random"] == 0


def test_two_perfect_players_draw_all_games():
    players, maker, spec = meet(TICTACTOE, one=perfect, other=lambda obs: perfect(obs))
    result = play_tournament(players, maker, spec, episodes=10)
    assert games_of(result, "one", "other") == (0, 10, 0)
    assert result.ratings == pytest.approx([0, 0])
    assert result.games[0].mean_returns == (0, 0)


def test_who_wins_from_the_first_seat_only_has_half_the_points():
    players, maker, spec = meet(support.FirstWins, one=always(0), other=always(1), random="random")
    result = play_tournament(players, maker, spec, episodes=20)
    assert [(g.wins, g.draws, g.losses) for g in result.games] == [(10, 0, 10)] * 3
    assert result.ratings == pytest.approx([0, 0, 0])
    assert result.games[0].mean_returns == (0.5, 0.5)


def test_sides_are_given_in_every_way_or_by_halves():
    assert seatings(2) == [(0, 1), (1, 0)]
    assert len(seatings(3)) == 6 and len(set(seatings(3))) == 6
    assert all(0 < sum(way) < 3 for way in seatings(3))
    assert seatings(4) == [(0, 0, 1, 1), (1, 1, 0, 0)]
    assert seatings(5) == [(0, 0, 1, 1, 1), (1, 1, 0, 0, 0)]


@pytest.mark.parametrize("env", [support.Greatest, support.Greatest3, support.Greatest5])
def test_each_player_has_each_seat_equally_often(env):
    one, other = [], []
    players, maker, spec = meet(env, one=always(2, one), other=always(1, other))
    result = play_tournament(players, maker, spec, episodes=11)  # rounded up
    assert games_of(result, "one", "other") == (12, 0, 0)
    assert result.games[0].mean_returns == (2, 1)
    for log in (one, other):
        counts = np.unique([agent for agent, _ in log], return_counts=True)[1]
        assert len(counts) == env.num_agents and len(set(counts)) == 1


def test_returns_that_differ_by_rounding_are_a_draw():
    players, maker, spec = meet(support.Thirds, one=always(0), other=always(1))
    result = play_tournament(players, maker, spec, episodes=6)
    assert games_of(result, "one", "other") == (0, 6, 0)


def test_all_pairs_and_seats_have_the_same_seeds():
    logs = [[], [], []]
    players, maker, spec = meet(
        support.Greatest, **{f"p{i}": always(i, log) for i, log in enumerate(logs)}
    )
    play_tournament(players, maker, spec, episodes=66)  # two rounds
    seen = [
        {value for agent, value in log if agent == name} for log in logs for name in ("p_0", "p_1")
    ]
    assert len(seen[0]) >= 33
    assert all(values == seen[0] for values in seen)


def test_the_same_seed_gives_the_same_table():
    players, maker, spec = meet(TICTACTOE, lazy=first_free, random="random")

    def table(**more):
        return play_tournament(players, maker, spec, episodes=40, **more).describe()

    assert table(seed=3) == table(seed=3)
    assert table(seed=3) != table(seed=4)


def test_a_player_s_return_is_the_mean_over_its_agents():
    (ones, same), maker, spec = meet(support.Roles, ones=always(1), same=always(1))
    # a_0 does 2; a_1, a_2 and b_0 do 0: 2 / 3 against 1, and 0 against 1
    shares = {"x": Agents(0, 1), "y": Agents(1, 3)}
    policies = {
        name: ScriptedPolicy(always(action), name, spec, maker().possible_agents)
        for name, action in (("x", 2), ("y", 0))
    }
    result = play_tournament(
        [Player("uneven", policies, shares), ones, same], maker, spec, episodes=4
    )
    assert games_of(result, "uneven", "ones") == (0, 0, 4)
    assert result.games[0].mean_returns == pytest.approx((1 / 3, 1))


@pytest.fixture(scope="module")
def rings(tmp_path_factory):
    """Two runs of a game with two roles."""
    folder = tmp_path_factory.mktemp("rings")
    runs = [folder / "a", folder / "b"]
    trained(runs[0], Ring, seed=1, lr=0.02)
    trained(runs[1], Ring, seed=2, total_env_steps=64)
    return runs


def test_runs_of_a_game_with_roles_play_each_role(rings):
    result = tournament_of_runs(rings, RunRequest(env=Ring), episodes=40, seed=5)
    a, b = map(str, rings)
    assert result.players == (a, b, "random")
    assert [g.count for g in result.games] == [40] * 3
    one, other = (load_policies(run)[0] for run in rings)
    shares = {"first": Agents(0, 2), "second": Agents(2, 1)}
    wins = draws = 0
    returns = np.zeros(2)
    for mixed, own in (
        ({"first": one["first"], "second": other["second"]}, 0),
        ({"first": other["first"], "second": one["second"]}, 1),
    ):
        seed = derive(5, "league", 0)
        played = evaluate(
            mixed, EnvMaker(Ring, native=True), shares=shares, episodes=20, seed=seed,
            stochastic=True,
        )  # fmt: skip
        by_role = np.array([played.by_policy["first"], played.by_policy["second"]])
        wins += int((by_role[own] > by_role[1 - own]).sum())
        draws += int((by_role[0] == by_role[1]).sum())
        returns += by_role[[own, 1 - own]].sum(1)
    assert games_of(result, a, b) == (wins, draws, 40 - wins - draws)
    assert result.games[0].mean_returns == pytest.approx((returns / 40).tolist())


@pytest.fixture(scope="module")
def favourites(tmp_path_factory):
    """Two runs of rock, paper, scissors, whose policies have favourites."""
    folder = tmp_path_factory.mktemp("favourites")
    sizes = {"num_envs": 64, "total_env_steps": 8192, "lr": 0.01}
    runs = [folder / "a", folder / "b"]
    trained(runs[0], RPS, **sizes)
    trained(runs[1], RPS, **sizes, policies={"x": "0:1", "y": "1:2"}, seed=4)
    return runs


def test_a_policy_of_several_agents_plays_each_seat(favourites):
    result = tournament_of_runs(favourites, episodes=640, against=())
    probabilities = [
        {
            name: policy.module(torch.zeros(1, 1))[0].softmax(-1)[0].detach().numpy()
            for name, policy in load_policies(run)[0].items()
        }
        for run in favourites
    ]
    beats = np.array([[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]])  # rock, paper, scissors
    (own,), theirs = probabilities[0].values(), probabilities[1]
    expected = np.mean([own @ beats @ theirs["y"], own @ beats @ theirs["x"]])
    (of,) = result.games
    assert of.count == 640
    assert of.points / of.count == pytest.approx(expected, abs=0.07)


def test_the_likeliest_actions_are_played_if_asked_for(favourites):
    sampled, greedy = (
        tournament_of_runs(favourites, episodes=64, against=(), stochastic=stochastic)
        for stochastic in (True, False)
    )
    kinds = [sum(map(bool, (g.wins, g.draws, g.losses))) for g in (*sampled.games, *greedy.games)]
    assert kinds[0] == 3 and kinds[1] <= 2  # one outcome for each seating


@pytest.fixture(scope="module")
def in_league(tmp_path_factory):
    """A run with snapshots of its own, and one without."""
    folder = tmp_path_factory.mktemp("league")
    runs = [folder / "a", folder / "b"]
    trained(runs[0], RPS, num_envs=64, league=2, snapshot_every=1024, total_env_steps=4096, lr=0.01)
    trained(runs[1], RPS, num_envs=64)
    return runs


def test_the_first_snapshot_of_a_run_in_a_league_is_a_player(in_league):
    result = tournament_of_runs(in_league, episodes=4, against=("first", "random"))
    snapshots = sorted(in_league[0].glob("league/step_*"))
    assert len(snapshots) > 2
    assert result.players == (*map(str, in_league), str(snapshots[0]), "random")


def test_the_command_prints_tables_or_one_object(in_league, capsys):
    words = ["tournament", *map(str, in_league), "--episodes", "10", "--seed", "2"]
    assert _main([*words, "--against", "random", f"{SCRIPTS}:rock"]) == 0
    out, err = capsys.readouterr()
    result = tournament_of_runs(
        in_league, episodes=10, seed=2, against=("random", f"{SCRIPTS}:rock")
    )
    assert out == result.describe() + "\n"
    assert "Round 1 of 1: " in err
    rows = [line.split() for line in out.splitlines()]
    (zero,) = (row for row in rows if row[-1:] == ["random"] and len(row) == 4)
    assert zero[::2] == ["+0", "30"]

    assert _main([*words, "--against", "--json", "--greedy"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [player["name"] for player in found["players"]] == list(map(str, in_league))
    (pair,) = found["pairs"]
    assert pair["games"] == pair["wins"] + pair["draws"] + pair["losses"] == 10
    assert pair["score"] == (pair["wins"] + pair["draws"] / 2) / 10
    low, high = pair["interval"]
    assert low <= pair["score"] <= high
    assert (found["stochastic"], found["seed"], found["was_stopped"]) == (False, 2, False)
    assert sum(player["rating"] for player in found["players"]) == pytest.approx(0)


def test_runs_whose_env_is_code_are_named_again(rings, capsys):
    words = ["tournament", *map(str, rings), "--episodes", "4", "--json"]
    assert _main(words) == 2
    assert "Name it again: --env" in capsys.readouterr().err
    assert _main([*words, "--env", "tests.envs.kernels.support:Ring"]) == 0
    assert len(json.loads(capsys.readouterr().out)["players"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "A tournament of no run"),
        (["A", "--against"], r"A tournament of \['.*a'\]: expected two players or more"),
        (["A", "A"], "The player .*a is there twice"),
        (["A", "--against", "fist"], "expected random, first or module:callable. Did you mean fi"),
        (["A", "--against", "no_such_module:play"], "There is no module 'no_such_module'"),
        (["A", "--against", f"{SCRIPTS}:rokc"], f"Did you mean {SCRIPTS}:rock"),
        (["A", "--against", f"{SCRIPTS}:idle"], r"idle takes \(\): expected \(obse"),
        (["B", "--against", "first"], "none of .*b has snapshots"),
        (["A", "--episodes", "0"], "--episodes 0: expected at least 1"),
        (["A", "--seed", "-1"], "--seed -1: expected 0 or more"),
        (["A", "--stochastic", "--greedy"], "expected one of them"),
        (["nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_played_is_refused(in_league, capsys, words, message):
    names = dict(zip("AB", map(str, in_league), strict=True))
    assert _main(["tournament", *(names.get(word, word) for word in words)]) in (1, 2)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(capsys.readouterr().err)


def test_runs_of_different_games_are_refused_and_other_arguments_are_told(tmp_path, in_league):
    trained(tmp_path / "spread", "mpe2/simple_spread-v3", env_kwargs={"max_cycles": 3})
    trained(tmp_path / "longer", "mpe2/simple_spread-v3", env_kwargs={"max_cycles": 4})
    trained(tmp_path / "alone", "CartPole-v1")
    message = r"(?s)these differ.*/a: headrace/RockPaper.*2 player.*/spread: mpe2/simple_spread-v3"
    with pytest.raises(ConfigError, match=message):
        tournament_of_runs([in_league[0], tmp_path / "spread"])
    with pytest.warns(UserWarning, match="longer was trained with env_kwargs={'max_cycles': 4}"):
        result = tournament_of_runs(
            [tmp_path / "spread", tmp_path / "longer"], episodes=6, against=()
        )
    assert result.games[0].count == 6
    with pytest.raises(ConfigError, match="CartPole-v1 has one agent"):
        tournament_of_runs([tmp_path / "alone"])


def test_a_stop_leaves_the_whole_rounds():
    asked = []
    players, maker, spec = meet(support.Greatest, a=always(2), b=always(1), c=always(0))

    def stop():
        asked.append(1)
        return len(asked) > 16 * 5  # two pairs in both seats, and the third one in one

    result = play_tournament(players, maker, spec, episodes=64, stop=stop)
    assert result.was_stopped
    counts = [of.count for of in result.games]
    assert counts == [64, 64, 0]
    assert "Stopped before all games" in result.describe()
    assert len(result.to_json()["pairs"]) == 2
    nothing = play_tournament(players, maker, spec, episodes=64, stop=lambda: True)
    assert nothing.ratings == pytest.approx([0, 0, 0])
    assert "    -" in nothing.describe()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_tournament_with_its_table(tmp_path, in_league, number):
    (tmp_path / "waiting.py").write_text(WAITING)
    for name in ("here", "on"):
        os.mkfifo(tmp_path / name)
    here, on = (os.open(tmp_path / name, os.O_RDWR) for name in ("here", "on"))
    run = str(in_league[0])
    words = command("tournament", run, "--against", "random", "waiting:play", "--json")
    try:
        with start(words, tmp_path, stdin=None) as process:
            ended = os.pidfd_open(process.pid)
            ready = select.select([here, ended], [], [], 60)[0]
            os.close(ended)
            assert ready == [here], process.communicate(timeout=1)[1]
            os.killpg(process.pid, number)
            while "Stopping: the games so far follow" not in process.stderr.readline():
                assert process.poll() is None
            os.write(on, b"x")
            out, _ = process.communicate(timeout=50)
    finally:
        os.close(here)
        os.close(on)
    assert process.returncode == 128 + number
    found = json.loads(out)
    assert found["was_stopped"]
    assert [pair["players"] for pair in found["pairs"]] == [[run, "random"]]


WAITING = """
from pathlib import Path

HERE = Path(__file__).parent

def play(observation):
    # The first time: say so, and wait until told to go on.
    if not hasattr(play, "was_asked"):
        play.was_asked = True
        (HERE / "here").write_text("x")
        with open(HERE / "on", "rb", buffering=0) as on:
            on.read(1)
    return 0
"""
