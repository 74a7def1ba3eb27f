"""Actions of a squashed Gaussian, their log-probabilities, and gradients of both, in NumPy.

`SquashedGaussian` (`models/critics/heads.py`) is the reference. Left out: exploration.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from headrace.models.critics.heads import LOG_STD
from headrace.models.manual.heads import Floats

Pull: TypeAlias = Callable[[Floats, Floats], Floats]
"""From the gradients of actions `[B, size]` and log-probabilities `[B, 1]` to that of the head's
parameters `[B, 2 * size]`."""


def draw(params: Floats, normal: Floats) -> tuple[Floats, Floats, Pull]:
    """Return actions `[B, size]`, their log-probabilities `[B]`, and their backward function.

    Args:
        params: means and logarithms of deviations, `[B, 2 * size]`.
        normal: normal noise, `[B, size]`.
    """
    size = normal.shape[-1]
    mean, given = params[:, :size], params[:, size:]
    log_std = np.minimum(np.maximum(given, LOG_STD[0]), LOG_STD[1])
    spread = np.exp(log_std) * normal
    before = mean + spread
    action = np.tanh(before)
    # -log(1 - tanh(u)²) = 2 (|u| + log(1 + exp(-2 |u|)) - log 2), which stays finite
    distance = np.abs(before)
    half = distance + np.log1p(np.exp(-2 * distance))  # without log 2, which is the same for all
    of_each = 2 * half - 0.5 * np.square(normal) - log_std
    ones = np.ones(size, of_each.dtype)  # a product is faster than a sum over few columns
    log_prob = of_each @ ones - size * (2 * math.log(2) + 0.5 * math.log(2 * math.pi))

    def pull(of_action: Floats, of_log_prob: Floats) -> Floats:
        # With u = mean + std * normal and a = tanh u: da/du = 1 - a². The log-probability has
        # -log(1 - tanh(u)²), with the derivative 2 a, and -log std, with -1.
        of_before = of_action * (1 - np.square(action)) + of_log_prob * (2 * action)
        of_log_std = (of_before * spread - of_log_prob) * (log_std == given)
        return np.concatenate((of_before, of_log_std), -1)

    return action, log_prob, pull
