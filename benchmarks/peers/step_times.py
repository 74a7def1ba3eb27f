"""How long steps and resets of `uneven.py` take: drawn here, slept there.

Each distribution has a mean of 7 ms of step and reset for each env step (rare stalls: 7.04), and
differs in how much one step differs from the next. Imports nothing but the standard library, so
that every peer can read it.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

MEAN_S = 0.007
SHORT_S, LONG_S, LONG_PROBABILITY = 0.003, 0.1, 1 / 24
STALLS_MEAN_S = SHORT_S * (1 - LONG_PROBABILITY) + LONG_S * LONG_PROBABILITY
GAUSSIAN50_CENTER_S = 0.0069696
"""With this center, a Gaussian with a standard deviation of 3.5 ms has a mean of 7 ms when what is
below 0 (2.3 %) is made 0: center * cdf(center / sd) + sd * pdf(center / sd) of a normal one."""
LOGNORMAL_SIGMA = 1.0
"""Of the logarithm: the standard deviation of a step is 131 % of its mean."""
SLOW_RESET_S, SLOW_RESET_STEPS = 0.2, (50, 150)


@dataclass(frozen=True)
class StepTimes:
    """One distribution.

    Attributes:
        words: what tables call it.
        draw: seconds of a step, from a generator.
        mean_s: seconds of step and reset for each env step, in the mean.
        reset_s: seconds of a reset.
        episode_steps: least and most of an episode; any number between is as likely.
    """

    words: str
    draw: Callable[[random.Random], float]
    mean_s: float = MEAN_S
    reset_s: float = 0.0
    episode_steps: tuple[int, int] = (1000, 1000)


def _stalls(rng):
    return LONG_S if rng.random() < LONG_PROBABILITY else SHORT_S


def _gaussian50(rng):
    return max(0.0, rng.gauss(GAUSSIAN50_CENTER_S, 0.5 * MEAN_S))


def _lognormal(rng):
    return rng.lognormvariate(math.log(MEAN_S) - LOGNORMAL_SIGMA**2 / 2, LOGNORMAL_SIGMA)


_SLOW_RESETS_STEP_S = MEAN_S - SLOW_RESET_S / (sum(SLOW_RESET_STEPS) / 2)

DISTRIBUTIONS = {
    "constant": StepTimes("constant", lambda rng: MEAN_S),
    # 0 is ten standard deviations away
    "gaussian10": StepTimes("Gaussian, 10 %", lambda rng: rng.gauss(MEAN_S, 0.1 * MEAN_S)),
    "gaussian50": StepTimes("Gaussian, 50 %", _gaussian50),
    "exponential": StepTimes("exponential", lambda rng: rng.expovariate(1 / MEAN_S)),
    "lognormal": StepTimes("log-normal", _lognormal),
    "stalls": StepTimes("rare stalls", _stalls, STALLS_MEAN_S),
    "slow-resets": StepTimes(
        "slow resets",
        lambda rng: _SLOW_RESETS_STEP_S,
        reset_s=SLOW_RESET_S,
        episode_steps=SLOW_RESET_STEPS,
    ),
}
