"""Ratings of players, from how often each pair of them won: Bradley and Terry's model."""

import numpy as np

from headrace.spec import Array

ELO = 400.0 / np.log(10.0)
"""Points of Elo's scale in a unit of the logarithm of a player's strength."""
_MOST_ROUNDS = 100_000
_CLOSE_ENOUGH = 1e-9


def rate(points: Array, anchor: int | None = None) -> Array:
    """Return each player's rating on Elo's scale: 400 points are odds of 10 to 1.

    The model: i scores against j in a share of p_i / (p_i + p_j). The strengths p are the likeliest
    ones, by the MM algorithm (Hunter 2004, doi:10.1214/aos/1079120141). Each player has one draw
    more, against a player of strength 1, so that one who always won has a rating, too.

    Args:
        points: `[n, n]`: what i scored against j, 1 for a win and 0.5 for a draw.
        anchor: the player whose rating is 0; None: the mean is 0.
    """
    games, strength = points + points.T, np.ones(len(points))
    won = points.sum(1) + 0.5
    for _ in range(_MOST_ROUNDS):
        expected = (games / (strength[:, None] + strength)).sum(1) + 1.0 / (strength + 1.0)
        before, strength = strength, won / expected
        if np.abs(np.log(strength / before)).max() < _CLOSE_ENOUGH:
            break
    rating: Array = ELO * np.log(strength)
    rating -= rating.mean() if anchor is None else rating[anchor]
    return rating


def interval(points: float, games: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's score interval of a mean score: the 95 % interval, if `z` is left out.

    A draw counts as half a win, which makes it wider than it need be.
    """
    share, weight = points / games, z * z / games
    middle = (share + weight / 2) / (1 + weight)
    half = z * np.sqrt(share * (1 - share) / games + weight / games / 4) / (1 + weight)
    # At its ends the interval ends with the share itself, but for rounding.
    return float(max(0.0, min(share, middle - half))), float(min(1.0, max(share, middle + half)))
