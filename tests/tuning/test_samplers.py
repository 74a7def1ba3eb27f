"""Tests of samplers: repeatable, within the space, and better than chance where they learn."""

import math

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.tuning.samplers import (
    SAMPLERS,
    GridSampler,
    Observed,
    as_optuna,
    importances,
    make_sampler,
)
from headrace.tuning.space import parse_space

SPACE = parse_space(
    {
        "x": {"uniform": [-1.0, 1.0]},
        "y": {"log": [1e-3, 1e3]},
        "n": {"int": [1, 5]},
        "word": {"choice": ["a", "b", "c"]},
    },
    "test",
)


def score_of(values):
    """The greatest at x = 0.5, y = 10, whatever n; "b" is the best word."""
    return -((values["x"] - 0.5) ** 2) - math.log10(values["y"] / 10) ** 2 - (values["word"] != "b")


def searched(name, trials, seed=1):
    sampler, found = make_sampler(name, SPACE, seed), []
    for number in range(1, trials + 1):
        values = sampler.ask(number, found)
        found.append(Observed(number, values, score_of(values), 100, True))
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_proposal_follows_from_seed_number_and_what_is_known(name):
    known = searched(name, 14)
    assert searched(name, 14) == known
    assert make_sampler(name, SPACE, 1).ask(15, known) == make_sampler(name, SPACE, 1).ask(
        15, known
    )
    assert [o.values for o in searched(name, 14, seed=2)] != [o.values for o in known]
    for each in known:
        for parameter in SPACE.values():
            assert parameter.place(each.values[parameter.name]) is not None


@pytest.mark.parametrize("name", ["tpe", "cmaes"])
def test_samplers_that_learn_find_more_than_chance(name):
    def late(sampler):
        return np.mean([o.score for seed in (1, 2) for o in searched(sampler, 40, seed)[-10:]])

    assert late(name) > late("random") + 1.0


def test_a_grid_has_each_point_once():
    points = [o.values for o in searched("grid", 81)]
    assert len({tuple(p.values()) for p in points}) == 81
    in_order = GridSampler(SPACE, 0, shuffled=False)
    assert in_order.ask(1, []) == {"x": -1.0, "y": 1e-3, "n": 1, "word": "a"}
    assert in_order.ask(2, []) == {"x": -1.0, "y": 1e-3, "n": 1, "word": "b"}


def test_what_optuna_is_told():
    optuna = pytest.importorskip("optuna")
    values = {"x": 0.0, "y": 1.0, "n": 2, "word": "c"}
    states = optuna.trial.TrialState
    told = as_optuna(
        optuna,
        SPACE,
        [
            Observed(0, values | {"x": 5.0}, 9.0, 100, True),  # a preset outside the space
            Observed(1, values, 3.0, 100, True),
            Observed(2, values, 1.0, 10, False),
            Observed(3, values, None, 0, False),
            Observed(4, values, 0.0, 0, False),
            Observed(5, values, -math.inf, 100, True),
            Observed(6, values | {"word": "d"}, 3.0, 100, True),  # no option is near
        ],
    )
    assert [t.state for t in told] == [
        states.COMPLETE,
        states.COMPLETE,
        states.PRUNED,
        states.PRUNED,
        states.RUNNING,
        states.PRUNED,
    ]
    assert [t.value for t in told] == [9.0, 3.0, None, None, None, None]
    assert told[0].params == {"x": 1.0, "y": 1.0, "n": 2, "word": 2}  # the nearest
    assert told[1].params == {"x": 0.0, "y": 1.0, "n": 2, "word": 2}
    assert told[2].intermediate_values == {10: 1.0}
    assert told[3].intermediate_values == told[5].intermediate_values == {}


def test_tpe_stays_away_from_trials_that_failed():
    """All that failed lie at x > 0; the few that were measured, and are as good, at x < 0."""
    rng, known = np.random.default_rng(0), []
    for number in range(1, 31):
        values = SPACE["x"].at(0.5 * rng.random() + (0.5 if number % 3 else 0.0))
        failed = values > 0
        values = {"x": values, "y": 1.0, "n": 1, "word": "b"}
        known.append(Observed(number, values, None if failed else 0.0, 100 * (not failed), True))
    asked = [make_sampler("tpe", SPACE, seed).ask(31, known)["x"] for seed in range(20)]
    assert sum(x < 0 for x in asked) >= 15


def test_importances_name_what_decides():
    shares = importances(SPACE, searched("random", 60))
    assert list(shares)[:2] == ["y", "x"]
    assert shares["n"] < 0.05
    assert sum(shares.values()) == pytest.approx(1.0)
    assert importances(SPACE, searched("random", 3)) == {}


def test_unknown_samplers_are_refused():
    with pytest.raises(ConfigError, match="expected one of tpe, random, grid, cmaes"):
        make_sampler("tpr", SPACE, 0)
