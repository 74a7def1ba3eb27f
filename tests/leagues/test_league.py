"""The members of a league: their ratings and payoffs, which of them are in the pool, snapshots."""

import json

import numpy as np
import pytest

from headrace.collectors.api import LEAGUE_WINDOW
from headrace.config.derive import SNAPSHOTS
from headrace.config.resolve import resolve
from headrace.config.run_config import RunConfig
from headrace.distributed.ranks import SINGLE_RANK
from headrace.envs.api import Episode
from headrace.errors import CheckpointError, ConfigError, RunDirError
from headrace.leagues import members
from headrace.leagues.league import League
from tests.distributed.ranks_support import on_ranks
from tests.leagues.support import RPS
from tests.leagues.test_seats import assert_frequent


def league_of(folder, ranks=SINGLE_RANK, fails=(), sends_data=False, **settings):
    """A league whose snapshots are empty directories."""
    taken = []

    def take(env_steps):
        if env_steps in fails:
            raise OSError(28, "No space left on device")
        taken.append(env_steps)
        path = folder / "league" / f"step_{env_steps:012d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    settings = {"league": 4, "snapshot_every": 100, "league_members": ("one", "two")} | settings
    league = League(RunConfig(env=RPS, **settings), folder, ranks, take, sends_data=sends_data)
    return league, taken


def games(*matches, ended_at=None):
    """Episodes of one fragment: (member, score of the learned side); None: against nobody."""
    return [
        Episode(k if ended_at is None else ended_at, 0, 0.0, 1, (),
                () if of is None else (of[0], k % 2, of[1]))
        for k, of in enumerate(matches)
    ]  # fmt: skip


def test_ratings_and_payoffs_by_hand(tmp_path):
    league, _ = league_of(tmp_path)
    league.begin()
    assert [of.rating for of in league.members] == [1200.0] * 3
    metrics = league.after_update(games((0, 1.0), None, (0, 1.0), (1, 0.0), (2, 0.5)), 10)
    # Elo by hand, K = 16: two wins against member 0
    own, first = 1200 + 16 * 0.5, 1200 - 16 * 0.5
    change = 16 * (1 - 1 / (1 + 10 ** ((first - own) / 400)))
    own, first = own + change, first - change
    # then a loss against member 1, and a draw with member 2
    change = 16 * (0 - 1 / (1 + 10 ** ((1200 - own) / 400)))
    own, second = own + change, 1200 - change
    change = 16 * (0.5 - 1 / (1 + 10 ** ((1200 - own) / 400)))
    own, third = own + change, 1200 - change
    assert [of.rating for of in league.members] == pytest.approx([first, second, third], abs=1e-9)
    assert metrics == pytest.approx(
        {"league_score": 2.5 / 4, "league_rating": own, "league_members": 3.0}
    )
    assert own + first + second + third == pytest.approx(4800)
    # Of two games the older one counts 0.99
    assert [(of.games, of.score) for of in league.members] == [(1.99, 1.99), (1.0, 0.0), (1.0, 0.5)]
    means = [(1.99 + 1) / (1.99 + 2), 1 / 3, 1.5 / 3]
    assert [of.mean_score for of in league.members] == pytest.approx(means)
    assert "league_score" not in league.after_update(games(None), 20)


def test_a_new_snapshot_begins_with_the_rating_of_the_learned_policies(tmp_path):
    league, _ = league_of(tmp_path)
    league.begin()
    metrics = league.after_update(games(*[(0, 1.0)] * 20), 100)
    *_, newest = league.members
    assert newest.rating == metrics["league_rating"] > 1260
    assert (newest.games, newest.score, newest.mean_score) == (0.0, 0.0, 0.5)


def test_weights_by_hand_uniform_and_hard(tmp_path):
    played = games(*[(0, 1.0)] * 3, (1, 0.0), (1, 0.5), *[(2, 1.0)] * 2000)
    for opponents, ended in (("uniform", 9), ("hard", 9)):
        league, _ = league_of(tmp_path / opponents, opponents=opponents, latest_ratio=0.3)
        league.begin()
        before = league.pool
        assert before.members == (0, 1, 2)
        assert before.latest_ratio == 0.3
        assert before.sources[:2] == ("one", "two")
        assert before.sources[2] == str(tmp_path / opponents / "league" / f"step_{0:012d}")
        for k in range(0, len(played), LEAGUE_WINDOW):
            league.after_update(played[k : k + LEAGUE_WINDOW], ended)
        if opponents == "uniform":
            assert before.weights == league.pool.weights == (1.0, 1.0, 1.0)
            assert league.pool is before
            continue
        assert before.weights == (0.25,) * 3  # nothing is known: (1 - 1/2) ** 2
        first = 1 + 0.99 + 0.99**2
        second = (0.5 + 1) / (1.99 + 2)
        wanted = ((1 - (first + 1) / (first + 2)) ** 2, (1 - second) ** 2, 1e-3)
        assert league.pool.weights == pytest.approx(wanted, rel=1e-6)


def test_the_pool_has_the_newest_snapshot_and_others(tmp_path):
    league, taken = league_of(tmp_path, league=4)
    league.begin()
    assert league.pool.members == (0, 1, 2)  # all that there are
    seen = set()
    for k in range(1, 40):
        league.after_update([], 100 * k)
        *others, newest = league.pool.members
        assert newest == k + 2 == len(league.members) - 1
        assert len(set(others)) == 3
        assert others == sorted(others)
        assert set(others) <= set(range(newest))
        assert all(np.asarray(others) >= 0)
        seen |= set(others)
    assert taken == [100 * k for k in range(40)]
    assert {0, 1} < seen  # those of other runs are among them, and most of the others
    assert len(seen) > 30


def test_data_of_the_pool_and_of_the_one_before_go_with_it(tmp_path, monkeypatch):
    """So that who was drawn in the last steps of a fragment can be loaded in the next one."""
    monkeypatch.setattr(members, "packed", lambda directory: str(directory).encode())
    league, _ = league_of(tmp_path, sends_data=True, league=2, league_members=("random",))
    league.begin()
    assert set(league.pool.data) == {1}
    for k in range(1, 12):
        before = league.pool
        league.after_update([], 100 * k)
        pool = league.pool
        assert set(pool.data) == (set(pool.members) | set(before.members)) - {0}
        assert all(data.decode() == pool.sources[i] for i, data in pool.data.items())


def test_one_place_is_the_newest_snapshot_s(tmp_path):
    league, _ = league_of(tmp_path, league=1, league_members=())
    league.begin()
    for k in range(1, 6):
        assert league.pool.members == (k - 1,)
        league.after_update([], 100 * k)


def test_without_snapshots_the_members_are_those_that_are_named(tmp_path):
    league, taken = league_of(tmp_path, league=2, snapshot_every=-1)
    league.begin()
    for k in range(5):
        assert league.pool.members == (0, 1)
        league.after_update(games((0, 1.0)), 10_000 * k)
    assert taken == []
    assert not (tmp_path / "league").exists()


@pytest.mark.parametrize("opponents", ["uniform", "hard"])
def test_who_is_chosen_for_the_pool_follows_the_weights(tmp_path, opponents):
    """Two places: the newest snapshot's, and that of one of four others."""
    counts, results = np.zeros(4), [(0, 1.0)] * 8 + [(1, 0.0)] * 2 + [(2, 0.5)] * 3
    for seed in range(300):
        league, _ = league_of(
            tmp_path / str(seed), seed=seed, league=2, opponents=opponents,
            league_members=("a", "b", "c"),
        )  # fmt: skip
        league.begin()
        league.after_update(games(*results), 50)
        league.after_update([], 100)
        other, newest = league.pool.members
        assert newest == 4
        counts[other] += 1
    weights = np.array([of.mean_score for of in league.members[:4]])
    expected = (1 - weights) ** 2 if opponents == "hard" else np.ones(4)
    assert_frequent(counts, expected / expected.sum() * 300)
    assert (max(expected) > 10 * min(expected)) == (opponents == "hard")


def test_snapshots_are_taken_when_env_steps_pass_multiples(tmp_path):
    league, taken = league_of(tmp_path, snapshot_every=100)
    league.begin()
    for env_steps in (60, 120, 180, 240, 550, 599, 600, 601):
        league.after_update([], env_steps)
    assert taken == [0, 120, 240, 550, 600]
    assert [of.env_steps for of in league.members] == [-1, -1, *taken]


def test_the_last_episodes_count_whoever_reports_them(tmp_path):
    """One collector tells of all episodes, another one of the last ones; ranks of theirs."""
    rng = np.random.default_rng(1)
    episodes = [
        Episode(t, env, 0.0, 1, (), (int(rng.integers(3)), 0, float(rng.integers(3)) / 2))
        for t in range(60) for env in range(40)
    ]  # fmt: skip
    last = episodes[-LEAGUE_WINDOW:]
    by_rank = [[of for of in episodes if of.env_id // 20 == rank] for rank in range(2)]
    of_ranks = [*by_rank[1][-LEAGUE_WINDOW:], *by_rank[0][-LEAGUE_WINDOW:]]
    records = []
    for k, reported in enumerate((episodes, last, of_ranks, list(reversed(episodes)))):
        league, _ = league_of(tmp_path / str(k))
        league.begin()
        league.after_update(reported, 1)
        records.append(league.section().state()[1])
    assert all(record == records[0] for record in records)
    assert sum(of["games"] for of in records[0]["members"]) > 200


def test_what_a_checkpoint_has_brings_all_back(tmp_path):
    league, _ = league_of(tmp_path, opponents="hard")
    league.begin()
    for k in range(1, 9):
        league.after_update(games((k % 3, 1.0), (2, 0.0), ((k - 1) // 2, 0.5)), 70 * k)
    assert len(league.members) > league.pool.members[-1] == 7
    tensors, data = league.section().state()
    assert tensors == {}
    again, taken = league_of(tmp_path, opponents="hard", league_members=())
    again.section().load({}, json.loads(json.dumps(data)))
    again.begin()
    assert taken == []
    assert again.members == league.members
    assert again.pool == league.pool
    assert again.after_update(games((0, 1.0)), 600) == league.after_update(games((0, 1.0)), 600)


def test_a_snapshot_that_is_gone_is_missed_when_the_run_goes_on(tmp_path):
    league, _ = league_of(tmp_path)
    league.begin()
    league.after_update([], 100)
    data = league.section().state()[1]
    (tmp_path / "league" / f"step_{100:012d}").rmdir()
    with pytest.raises(CheckpointError, match=r"step_000000000100 of the league is gone.*\nPut it"):
        league_of(tmp_path)[0].section().load({}, data)


def failing(ranks, folder):
    league, _ = league_of(folder, ranks, fails=(200,))
    league.begin()
    league.after_update([], 100)
    try:
        league.after_update([], 200)
    except RunDirError as error:
        return str(error), league.pool.members
    raise AssertionError("it was written")


@pytest.mark.parametrize("size", [1, 2])
def test_a_snapshot_that_cannot_be_written_ends_the_run_on_all_ranks(tmp_path, size):
    for text, active in on_ranks(size, failing, tmp_path):
        assert "after 200 env steps could not be written" in text
        assert "No space left on device.\nMake room, and go on from the last checkpoint." in text
        assert active == (0, 1, 2, 3)


RPS_LEAGUE = {"env": RPS, "league": 3}


def test_a_fortieth_of_the_run_is_between_snapshots_unless_somebody_says_otherwise():
    def every(**given):
        return resolve(RPS_LEAGUE | given, interface="kernel").run.snapshot_every

    assert SNAPSHOTS == 40
    assert every(total_env_steps=100_000) == 2500
    assert every(total_env_steps=20) == 1
    assert every(total_env_steps=100_000, snapshot_every=7) == 7
    assert every(snapshot_every=-1, league_members=("random",)) == -1
    assert every(league=0, total_env_steps=100_000) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"league": 0, "snapshot_every": 100},
         r"snapshot_every=100, but there is no league: league=0\.\nUse --league 8, or leave "
         r"--snapshot-every out"),
        ({"league": 0, "opponents": "hard"}, "opponents=hard, but there is no league"),
        ({"league": 0, "latest_ratio": 0.2}, "latest_ratio=0.2, but there is no league"),
        ({"league": 0, "league_members": ("random",)}, "league_members=.*but there is no league"),
        ({"algo": "dqn"}, "league=3 and algo=dqn, which learns from replay.\nUse --algo ppo"),
        ({"algo": "sac"}, "league=3 and algo=sac, which learns from replay"),
        ({"core": "gru"}, "league=3 and core='gru', which has a memory, which members lack.\nLeave "
         "--core out"),
        ({"inference": "learner", "num_workers": 2, "lag": 1, "algo": "appo"},
         "league=3 and inference='learner', which leaves members no place"),
        ({"frozen": {"runner": "random"}}, r"league=3 and frozen={'runner': 'random'}, which plays "
         "its agents always.\nUse --league-members"),
        # Recorded steps are for such alone
        ({"data": "steps", "algo": "iql"}, "league=3 and algo=iql, which learns from replay"),
        ({"snapshot_every": -1}, "league=3 and snapshot_every=-1: nobody would be in the league"),
        ({"league": 2, "league_members": ("a", "b", "c"), "snapshot_every": -1},
         r"league_members names 3: expected no more(.|\n)*Use --league 3\."),
        ({"league": 1, "league_members": ("random",)},
         r"league=1, but league_members names 1: expected no more than the league has at a time, "
         r"beside the newest snapshot\.\nUse --league 2\."),
        ({"latest_ratio": 1.5}, "latest_ratio=1.5"),
        ({"opponents": "best"}, "opponents='?best"),
        ({"league": -1}, "league=-1"),
    ],
)  # fmt: skip
def test_what_a_league_cannot_have_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(RPS_LEAGUE | given, interface="kernel")


@pytest.mark.parametrize(
    "given",
    [
        {"league": 2, "league_members": ("random",)},
        {"league": 1, "league_members": ("random",), "snapshot_every": -1},
        {"league": 0, "latest_ratio": 0.5},  # the default may be said
        {"algo": "a2c"}, {"algo": "impala", "num_workers": 2, "lag": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_league_can_have_is_taken(given):
    resolve(RPS_LEAGUE | given, interface="kernel")
