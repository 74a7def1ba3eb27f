"""Who plays which side: the draw on host and device, its frequencies, when a pool counts."""

import itertools

import numpy as np
import pytest
import torch

from headrace import batch
from headrace.batch import columns
from headrace.envs.api import VectorContext
from headrace.envs.games.seats import LATEST, Pool, Seats, score
from headrace.envs.vectors import make_vector
from headrace.spec import Agents
from tests.envs.kernels.support import act_at_random
from tests.leagues.support import (
    GRID,
    POOL,
    RPS,
    SMALL_GRID,
    Takes,
    Trio,
    league_plan,
    seats_before_steps,
)

PAIR, TRIPLE = (Agents(0, 1), Agents(1, 1)), (Agents(0, 3), Agents(3, 1), Agents(4, 2))
POOLS = {
    "three": POOL,
    "empty": Pool((), (), 0.5, ("",)),
    "one": Pool((6,), (0.001,), 0.0),
    "uneven": Pool(tuple(range(8)), (1.0, 0.001, 2.5, 0.3, 1e-3, 7.0, 0.1, 1.0), 0.4),
    "latest only": Pool((1, 2), (1.0, 1.0), 1.0),
    "thirds, which are no binary fractions": Pool((0, 1, 2), (0.1, 0.1, 0.1), 0.0),
}


def seats_of(n, sides=PAIR, first=0, seed=7, most=8):
    return Seats(seed, np.arange(first, first + n), sides, most)


def drawn(seats, episode):
    """Who plays an episode of every game, as each form draws it: (members, sides) of both."""
    n = len(seats.member)
    for e in range(n):
        seats.draw(e, episode)
    host = seats.member.clone(), seats.side.clone()
    seats.member.fill_(-7), seats.side.fill_(-7)
    seats.draw_where(torch.ones(n, dtype=torch.bool), torch.full((n,), episode))
    return host, (seats.member.clone(), seats.side.clone())


@pytest.mark.parametrize("sides", [PAIR, TRIPLE], ids=["two", "three"])
def test_host_and_device_draw_the_same(sides):
    """Whatever pool was there before."""
    seats, seen = seats_of(20, sides, first=1000), set()
    for (name, pool), episode in itertools.product(
        [*POOLS.items(), *reversed(POOLS.items())], (0, 1, 77, 2**31, 2**40 + 5)
    ):
        seats.set_pool(pool)
        host, device = drawn(seats, episode)
        for one, other in zip(host, device, strict=True):
            assert torch.equal(one, other), name
        assert set(host[0].tolist()) <= {LATEST, *pool.members}
        assert set(host[1].tolist()) <= set(range(len(sides)))
        seen |= set(host[0].tolist())
        if name in ("empty", "latest only"):
            assert set(host[0].tolist()) == {LATEST}
    assert seen >= {LATEST, 0, 2, 3, 5, 6, 7, 8}


def test_a_draw_depends_on_seed_env_and_episode_alone():
    one, other = seats_of(40), seats_of(10, first=25)
    for seats in (one, other):
        seats.set_pool(POOL)
    (members, sides), _ = drawn(one, 3)
    (part, part_sides), _ = drawn(other, 3)
    assert torch.equal(members[25:35], part)
    assert torch.equal(sides[25:35], part_sides)
    changed = [drawn(one, 4)[0][0], *(drawn(s, 3)[0][0] for s in [seats_of(40, seed=8)])]
    for others in changed:
        assert not torch.equal(members, others)


def assert_frequent(counts, expected):
    """By chi-square: within five deviations of what chance gives."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert counts.sum() == pytest.approx(expected.sum())
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (counts, expected)


@pytest.mark.parametrize("name", ["three", "uneven"])
@pytest.mark.parametrize("sides", [PAIR, TRIPLE], ids=["two", "three"])
def test_frequencies_are_the_pool_s_and_sides_take_equal_turns(name, sides):
    pool, n, episodes = POOLS[name], 500, 200
    seats, everybody = seats_of(n, sides), torch.ones(500, dtype=torch.bool)
    seats.set_pool(pool)
    count = np.zeros((len(pool.members) + 1, len(sides)))
    for episode in range(episodes):
        seats.draw_where(everybody, torch.full((n,), episode))
        place = {member: i for i, member in enumerate((LATEST, *pool.members))}
        for member, side in zip(seats.member.tolist(), seats.side.tolist(), strict=True):
            count[place[member], side] += 1
    total = n * episodes
    weights = np.array(pool.weights) / sum(pool.weights) * (1 - pool.latest_ratio)
    shares = np.array([pool.latest_ratio, *weights])
    assert_frequent(count.sum(1), shares * total)
    assert_frequent(count.sum(0), np.full(len(sides), total / len(sides)))
    # And the side does not depend on who is the opponent
    joint = np.outer(shares, np.full(len(sides), 1 / len(sides))) * total
    assert_frequent(count.ravel(), joint.ravel())


def test_whose_rows_are_whose():
    seats = seats_of(4, TRIPLE)
    seats.member[:] = torch.tensor([LATEST, 5, 5, 2])
    seats.side[:] = torch.tensor([1, 0, 1, 2])
    assert [seats.learns(i).tolist() for i in range(3)] == [
        [True, True, False, False], [True, False, True, False], [True, False, False, True],
    ]  # fmt: skip
    found = [{m: r.tolist() for m, r in seats.played_by_members(i)} for i in range(3)]
    assert found == [
        {2: [9, 10, 11], 5: [6, 7, 8]},  # three agents: of games 3 and 2
        {2: [3], 5: [1]},
        {5: [2, 3, 4, 5]},
    ]
    assert seats.in_use() == {2, 5}
    for i in range(3):  # each row is of the learned policies, or of one member
        size = TRIPLE[i].size
        learned = seats.learns(i).repeat_interleave(size)
        assert {r for rows in found[i].values() for r in rows} == set(
            (~learned).nonzero().flatten().tolist()
        )


GAMES = {"kernel, one policy": RPS, "kernel, two": GRID, "at once": Trio, "in turns": Takes}


def vector_of(env, seed=3, num_steps=24):
    kwargs = SMALL_GRID if env == GRID else {}
    plan = league_plan(env, num_envs=6, kwargs=kwargs)
    context = VectorContext(
        plan.spec, np.arange(4, 10), seed, parts=plan.parts, owners=plan.owners, league_size=4
    )
    fragments = [
        batch.allocate(columns(of.spec, {}, num_steps, 6 * of.agents.size))
        for of in plan.policies.values()
    ]
    return make_vector(plan.maker, context), fragments, plan


@pytest.mark.parametrize("game", GAMES)
def test_a_pool_counts_for_episodes_that_begin_later(game):
    vector, fragments, plan = vector_of(GAMES[game])
    pools = [POOL, Pool((1, 2), (1.0, 1.0), 0.1), Pool((4,), (1.0,), 0.0)]
    rng, episode = np.random.default_rng(5), np.zeros(6, int)
    expected, noted = Seats(3, vector.env_id, plan.parts, 4), seats_before_steps(vector)
    expected.set_pool(pools[0])
    for e in range(6):
        expected.draw(e, 0)
    kept = 0
    for pool in pools:
        vector.set_pool(pool)
        expected.set_pool(pool)
        for fragment, of in zip(fragments, plan.policies.values(), strict=True):
            act_at_random([fragment], of.spec, rng)
            fragment.action.zero_()  # always allowed
        before = expected.member.clone(), expected.side.clone()
        noted.clear()
        vector.bind(*fragments)
        for t in range(24):
            vector.step(t)
        ended = {(of.ended_at, of.env_id) for of in vector.finish()}
        assert len(ended) > 12
        kept += sum(int(m) not in (LATEST, *pool.members) for m in before[0])
        for t, (member, side) in enumerate(noted):
            assert torch.equal(member, expected.member), t
            assert torch.equal(side, expected.side), t
            for e in range(6):
                if (t, 4 + e) in ended:
                    episode[e] += 1
                    expected.draw(e, int(episode[e]))
    # Some episodes were under way when their member left the pool, and went on with it.
    assert kept or game == "kernel, one policy"
    assert expected.member.unique().tolist() == [4]
    vector.close()


def test_score_by_hand_of_two_sides():
    returns = np.array([[1.0, -1.0], [1.0, -1.0], [0.5, 0.5], [-2.0, 3.0]])
    found = score(returns, np.array([4, 1]), np.array([0, 1, 0, 1]))
    assert found.tolist() == [1.0, 0.0, 0.5, 1.0]


def test_score_by_hand_of_three_sides_of_different_sizes():
    sizes = np.array([3, 1, 2])
    # Side 0 against 1 and 2: (1 * 4 + 2 * 1) / 3 = 2
    returns = np.array([[2.5, 4.0, 1.0], [2.0, 4.0, 1.0], [1.5, 4.0, 1.0]])
    assert score(returns, sizes, np.zeros(3, int)).tolist() == [1.0, 0.5, 0.0]
    # Side 1 against 0 and 2: (3 * 2 + 2 * 7) / 5 = 4; side 2 against 0 and 1: (3 * 2 + 4) / 4 = 2.5
    assert score(np.array([[2.0, 4.5, 7.0]] * 2), sizes, np.array([1, 1])).tolist() == [1.0, 1.0]
    assert score(np.array([[2.0, 3.5, 7.0]]), sizes, np.array([1])).tolist() == [0.0]
    assert score(np.array([[2.0, 4.0, 2.4]]), sizes, np.array([2])).tolist() == [0.0]
    assert score(np.array([[2.0, 4.0, 2.6]]), sizes, np.array([2])).tolist() == [1.0]


@pytest.mark.parametrize("sizes", [(1, 1), (10, 1), (3, 1, 2), (1, 2, 3)], ids=str)
def test_equal_returns_are_a_draw_whatever_the_rounding(sizes):
    values = np.array([0.1, 0.3, -0.7, 1 / 3, 99.9, -123456.7, 0.0])
    # As a mean over a side's agents has it: the sum of equal numbers is not always their multiple
    returns = np.stack([[np.mean([v] * size) for size in sizes] for v in values])
    for side in range(len(sizes)):
        found = score(returns, np.array(sizes), np.full(len(values), side))
        assert found.tolist() == [0.5] * len(values), side
