"""How sure a result of a few runs is: intervals, interquartile means, probabilities of improvement.

As in Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv:2108.13264), for one task. A sample is the result of one run, and runs differ in their seeds.
The resamples come from a generator with a fixed seed: the same samples have the same interval.
"""

from collections.abc import Callable

import numpy as np

from headrace.spec import Array

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


def mean(samples: Array) -> Array:
    """Return the mean of `[n, ...]` samples, `[...]`."""
    return np.asarray(samples.mean(axis=0))


def interquartile_mean(samples: Array) -> Array:
    """Return the mean of the middle half of `[n, ...]` samples, `[...]` (section 4.3: IQM).

    A quarter of the weight is cut off at each end. If n is no multiple of 4, a sample at the
    border counts by its part inside: of 5, the second and the fourth count three quarters.
    """
    count = len(samples)
    begins = np.arange(count, dtype=np.float64)
    inside = np.minimum(begins + 1, 0.75 * count) - np.maximum(begins, 0.25 * count)
    weights = inside.clip(0.0)
    return np.asarray(np.tensordot(weights / weights.sum(), np.sort(samples, axis=0), axes=1))


def bootstrap_interval(
    samples: Array, statistic: Callable[[Array], Array] = mean
) -> tuple[Array, Array]:
    """Return the ends of the 95 % percentile bootstrap interval of a statistic.

    Args:
        samples: `[n, ...]`.
        statistic: takes `[n, ...]` and returns `[...]`.

    Returns:
        `[...]` lower and upper ends. NaN if n < 2: one sample says nothing of others.
    """
    count = len(samples)
    if count < 2:
        nothing = np.full(samples.shape[1:], np.nan)
        return nothing, nothing
    return _interval(lambda generator: statistic(samples[_drawn(generator, count)]))


def probability_of_improvement(x: Array, y: Array) -> float:
    """Return P(X > Y) of `[n]` and `[m]` samples, of all pairs; ties count one half (section 4.3).

    It is the statistic of Mann and Whitney's U test, divided by n m.
    """
    return float(_wins(x, y).mean())


def probability_interval(x: Array, y: Array) -> tuple[float, float]:
    """Return the ends of the 95 % bootstrap interval of `probability_of_improvement`.

    Both sets are resampled, each by itself. NaN if either has one sample.
    """
    if min(len(x), len(y)) < 2:
        return np.nan, np.nan
    wins = _wins(x, y)

    def resampled(generator: np.random.Generator) -> Array:
        rows, columns = _drawn(generator, len(x)), _drawn(generator, len(y))
        return np.asarray(wins[np.ix_(rows, columns)].mean())

    low, high = _interval(resampled)
    return float(low), float(high)


def _wins(x: Array, y: Array) -> Array:
    return np.asarray(0.5 * (np.sign(x[:, None] - y[None, :]) + 1.0))


def _drawn(generator: np.random.Generator, count: int) -> Array:
    return generator.integers(count, size=count)


def _interval(resampled: Callable[[np.random.Generator], Array]) -> tuple[Array, Array]:
    generator = np.random.default_rng(0)
    found = np.stack([resampled(generator) for _ in range(NUM_RESAMPLES)])
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(found, [tail, 1.0 - tail], axis=0)
    return low, high
