"""Ratings and intervals, against numbers that are known or computed by hand."""

import numpy as np
import pytest

from headrace.leagues.ratings import interval, rate


def points_of(*pairs):
    """`[2, 2]` for the points of the first and the second of two players."""
    (first, second) = pairs
    return np.array([[0.0, first], [second, 0.0]])


def test_equal_players_have_equal_ratings():
    assert rate(points_of(50, 50)) == pytest.approx([0, 0])
    assert rate(np.zeros((3, 3))) == pytest.approx([0, 0, 0])  # no games at all


def test_odds_are_those_of_the_games_where_there_are_many():
    first, second = rate(points_of(10_000_000, 1_000_000))
    assert first - second == pytest.approx(400, abs=0.01)  # odds of 10 to 1
    assert first + second == pytest.approx(0, abs=1e-6)


def test_a_player_who_always_won_has_the_rating_that_the_prior_gives():
    # Strengths are g and 1 / g. The first one's equation, points = expected points:
    # 200.5 = 200 g / (g + 1 / g) + g / (g + 1), or g³ - g² - 399 g - 401 = 0
    (g,) = (root.real for root in np.roots([1, -1, -399, -401]) if root.real > 1)
    first, second = rate(points_of(200, 0))
    assert first == pytest.approx(400 * np.log10(g), abs=1e-3)
    assert first - second == pytest.approx(1057, abs=2)


def test_a_draw_counts_as_half_a_win():
    half = rate(points_of(60 + 20 / 2, 20 + 20 / 2))
    assert half == pytest.approx(rate(points_of(70, 30)))
    assert half[0] > half[1]


def test_the_anchor_has_rating_0():
    points = np.array([[0, 7, 9], [3, 0, 6], [1, 4, 0]], float)
    free, anchored = rate(points), rate(points, 2)
    assert anchored[2] == 0 and free.mean() == pytest.approx(0)
    assert anchored == pytest.approx(free - free[2])
    assert free[0] > free[1] > free[2]


def test_strengths_are_recovered_from_simulated_games():
    rng = np.random.default_rng(7)
    true = np.array([600.0, 250.0, 0.0, -100.0, -300.0])
    share = 1 / (1 + 10 ** ((true[None] - true[:, None]) / 400))
    points = np.zeros((5, 5))
    for i in range(5):
        for j in range(i):
            if (i, j) != (4, 0):  # they never met
                points[i, j] = rng.binomial(20_000, share[i, j])
                points[j, i] = 20_000 - points[i, j]
    assert np.abs(rate(points, 2) - true).max() < 12


@pytest.mark.parametrize(
    ("points", "games", "low", "high"),
    [
        # z² / n = 0.38415: (0.8 + 0.19207) / 1.38415 ± 1.95996 √(0.016 + 0.00960) / 1.38415
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (100, 200, 0.4314, 0.5686),
    ],
)
def test_intervals_are_wilson_s(points, games, low, high):
    assert interval(points, games) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_holds_the_true_share_in_95_of_100_samples():
    rng = np.random.default_rng(3)
    for share in (0.5, 0.9):
        found = [interval(points, 200) for points in rng.binomial(200, share, 4000)]
        held = np.mean([low <= share <= high for low, high in found])
        assert held == pytest.approx(0.95, abs=0.015)
