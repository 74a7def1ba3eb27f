"""Tests of which trials go on, on tables of scores."""

import pytest

from headrace.tuning.pruning import Standing, last_promoted, make_rungs, promoted


def at(number, *scores, waits=True):
    return Standing(number, len(scores) - 1, scores, waits)


@pytest.mark.parametrize(
    ("pruner", "total", "batch", "starts", "rungs"),
    [
        ("none", 90_000, 512, 0, [90_000]),
        ("asha", 90_000, 512, 0, [10_000, 30_000, 90_000]),
        ("median", 90_000, 512, 0, [10_000, 30_000, 90_000]),
        ("asha", 90_000, 2048, 0, [30_000, 90_000]),  # a ninth would be less than five batches
        ("asha", 90_000, 64, 10_000, [30_000, 90_000]),  # and here learning would hardly have begun
        ("asha", 1_000, 512, 0, [1_000]),
    ],
)
def test_rungs(pruner, total, batch, starts, rungs):
    assert make_rungs(pruner, total, batch, starts) == rungs


def test_asha_promotes_the_best_third_as_soon_as_it_is_known():
    assert promoted("asha", 3, [at(0, 5.0), at(1, 1.0)]) is None
    three = [at(0, 1.0), at(1, 5.0), at(2, 3.0)]
    assert promoted("asha", 3, three).number == 1
    gone = [at(0, 1.0), at(1, 5.0, waits=False), at(2, 3.0)]
    assert promoted("asha", 3, gone) is None  # one of three has gone on
    six = [*gone, at(3, 4.0), at(4, 0.0), at(5, 0.0)]
    assert promoted("asha", 3, six).number == 3


def test_asha_takes_the_highest_rung_first_and_counts_those_that_went_on():
    gone = [at(0, 9.0, 2.0), at(1, 8.0, 3.0), at(2, 7.0, 1.0)]
    below = [at(i, 1.0) for i in range(3, 12)]
    assert promoted("asha", 3, [*gone, *below]).number == 1  # one could leave the first rung, too
    # All three of the best nine are at the second rung: nobody else leaves the first.
    gone[1] = at(1, 8.0, 3.0, 5.0, waits=False)
    assert promoted("asha", 3, [*gone, *below[:6]]) is None
    assert (
        promoted("asha", 3, [*gone, *below[:6], at(9, 7.5), at(10, 0.5), at(11, 0.1)]).number == 9
    )


def test_ties_go_to_the_older_trial():
    assert promoted("asha", 2, [at(2, 1.0), at(0, 1.0), at(1, 1.0)]).number == 0


def test_median_stops_what_is_below_it_once_five_others_are_known():
    others = [at(i, float(i), waits=False) for i in range(4)]
    assert promoted("median", 2, [*others, at(9, -1.0)]).number == 9
    others.append(at(4, 4.0, waits=False))
    assert promoted("median", 2, [*others, at(9, 1.9)]) is None
    assert promoted("median", 2, [*others, at(9, 2.0)]).number == 9


@pytest.mark.parametrize("pruner", ["asha", "median", "none"])
def test_nobody_goes_on_from_the_last_rung_or_from_none(pruner):
    assert promoted(pruner, 1, [at(i, 1.0) for i in range(9)]) is None
    assert promoted(pruner, 2, [at(i) for i in range(9)]) is None


def test_the_best_of_a_small_study_is_trained_to_the_end():
    assert last_promoted(3, [at(0, 1.0), at(1, 2.0)]).number == 1
    assert last_promoted(3, [at(0, 1.0, 0.5), at(1, 2.0)]).number == 0
    assert last_promoted(2, [at(0, 1.0, 2.0, waits=False), at(1, 2.0)]) is None
    assert last_promoted(2, []) is None
