"""Statistics of few runs, against numbers worked out by hand and against SciPy."""

import numpy as np
import pytest
from scipy import stats

from headrace.tools.runs.statistics import (
    bootstrap_interval,
    interquartile_mean,
    mean,
    probability_interval,
    probability_of_improvement,
)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([8, 1, 7, 2, 6, 3, 5, 4], 4.5),  # 3 to 6
        ([100, 0, 2, 10, 1], (0.75 * 1 + 2 + 0.75 * 10) / 2.5),
        ([10, 0, 1], (0.25 * 0 + 1 + 0.25 * 10) / 1.5),
        ([3, 5], 4.0),
        ([7], 7.0),
    ],
)
def test_interquartile_mean_by_hand(samples, expected):
    assert float(interquartile_mean(np.array(samples, np.float64))) == pytest.approx(expected)


def test_interquartile_mean_is_scipy_s_where_quarters_are_whole():
    samples = np.random.default_rng(1).normal(size=(12, 3))
    np.testing.assert_allclose(interquartile_mean(samples), stats.trim_mean(samples, 0.25))


def test_probability_of_improvement_counts_pairs_and_half_of_ties():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0])
    assert probability_of_improvement(x, y) == (0 + 0 + 0.5 + 0.5 + 1 + 1) / 6
    assert probability_of_improvement(x, x) == 0.5
    assert probability_of_improvement(y + 1, y) == 1.0
    x, y = np.random.default_rng(2).integers(9, size=(2, 40)).astype(np.float64)
    u = stats.mannwhitneyu(x, y[:30]).statistic
    assert probability_of_improvement(x, y[:30]) == pytest.approx(u / (40 * 30))


def test_intervals_of_two_samples_are_both_of_them():
    # Of four equally likely resamples one has the first twice, and one the second.
    ends = bootstrap_interval(np.array([1.0, 5.0]))
    assert [float(end) for end in ends] == [1.0, 5.0]
    # A run of 0 never wins, a run of 1 always does.
    assert probability_interval(np.array([0.0, 1.0]), np.array([0.5, 0.5])) == (0.0, 1.0)
    assert probability_interval(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == (1.0, 1.0)


def test_one_sample_has_no_interval():
    assert np.isnan(bootstrap_interval(np.array([1.0]))).all()
    assert np.isnan(probability_interval(np.array([1.0]), np.array([1.0, 2.0]))).all()
    assert np.isnan(probability_interval(np.array([1.0, 2.0]), np.array([1.0]))).all()


def test_interval_of_many_samples_is_that_of_the_normal_distribution():
    samples = np.random.default_rng(3).normal(5.0, 2.0, size=400)
    low, high = bootstrap_interval(samples)
    expected = mean(samples) + np.array([-1.96, 1.96]) * samples.std() / 20
    np.testing.assert_allclose([low, high], expected, atol=0.02)


def test_interval_of_a_statistic_is_near_scipy_s():
    samples = np.random.default_rng(4).exponential(size=25)
    theirs = stats.bootstrap(
        (samples,), lambda s, axis: np.apply_along_axis(interquartile_mean, axis, s),
        method="percentile", n_resamples=2000, rng=np.random.default_rng(5),
    ).confidence_interval  # fmt: skip
    np.testing.assert_allclose(bootstrap_interval(samples, interquartile_mean), theirs, atol=0.03)


def test_the_same_samples_have_the_same_interval():
    samples = np.random.default_rng(6).normal(size=(5, 2))
    both = np.array(bootstrap_interval(samples))
    for i in range(2):  # points of a curve are resampled together
        np.testing.assert_array_equal(both[:, i], bootstrap_interval(samples[:, i]))
    x, y = samples.T
    assert probability_interval(x, y) == probability_interval(x.copy(), y.copy())
