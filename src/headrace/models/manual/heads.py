"""Log-probabilities and entropies of actions, and their gradients, in NumPy.

`distributions.py` is the reference. Columns here are rows of a minibatch: `[num_params, rows]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.models.distributions import Categorical, Gaussian, Head, MultiCategorical, Product

Floats: TypeAlias = NDArray[np.floating[Any]]
Pull: TypeAlias = Callable[[Floats, Floats], tuple[Floats, list[Floats]]]
"""From the gradients of log-probs and entropies, `[rows]` each, to those of the head's params
`[num_params, rows]` and of its own parameters."""
Evaluated: TypeAlias = tuple[Floats, Floats, Pull]

_HALF_LOG_2_PI = 0.5 * float(np.log(2 * np.pi))


def evaluate(head: Head, params: Floats, action: NDArray[Any]) -> Evaluated:
    """Return log-probs of actions and entropies, `[rows]` each, and their backward function.

    Args:
        params: `[num_params, rows]`.
        action: `[rows, ...]`, as stored in a fragment.
    """
    if isinstance(head, Gaussian):
        return _gaussian(head.log_std.detach().numpy(), params, action.T)
    if isinstance(head, Categorical):
        return _categorical(params, action)
    if isinstance(head, MultiCategorical):
        logits = np.split(params, np.cumsum(head.sizes)[:-1])
        return _sum_of([_categorical(*of) for of in zip(logits, action.T, strict=True)])
    assert isinstance(head, Product)
    parts = [part for part in head.parts if isinstance(part, Head)]
    pieces = np.split(params, np.cumsum([part.num_params for part in parts])[:-1])
    numbers = np.split(action, np.cumsum([part.num_draws for part in parts])[:-1], 1)
    return _sum_of(
        [
            evaluate(part, of, chosen.astype(np.int64) if part.num_choices else chosen)
            for part, of, chosen in zip(parts, pieces, numbers, strict=True)
        ]
    )


def _sum_of(parts: Sequence[Evaluated]) -> Evaluated:
    """Return the sums of independent actions."""
    log_probs, entropies, pulls = zip(*parts, strict=True)

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        of_params, own = zip(*(of(of_log_prob, of_entropy) for of in pulls), strict=True)
        return np.concatenate(of_params), [gradient for of in own for gradient in of]

    return sum(log_probs[1:], log_probs[0]), sum(entropies[1:], entropies[0]), pull


def _categorical(logits: Floats, choice: NDArray[np.int64]) -> Evaluated:
    # A ufunc's `reduce` avoids the Python overhead of the methods `max` and `sum`.
    log_p = logits - np.maximum.reduce(logits, 0)
    p = np.exp(log_p)
    total = np.add.reduce(p, 0)
    p /= total
    log_p -= np.log(total)
    entropy = -np.add.reduce(p * log_p, 0)
    chosen = choice * len(choice) + np.arange(len(choice))  # flat index in [choices, rows]

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        of_logits = -p * (of_log_prob + of_entropy * (log_p + entropy))
        of_logits.reshape(-1)[chosen] += of_log_prob
        return of_logits, []

    return log_p.take(chosen), entropy, pull


def _gaussian(log_std: Floats, mean: Floats, action: Floats) -> Evaluated:
    narrow = np.exp(-log_std)[:, None]
    z = action - mean
    z *= narrow
    square = z * z
    log_prob = np.add.reduce(square, 0)
    log_prob *= -0.5
    widths = float(np.add.reduce(log_std)) + len(log_std) * _HALF_LOG_2_PI
    log_prob -= widths
    entropy = np.full_like(log_prob, widths + 0.5 * len(log_std))

    def pull(of_log_prob: Floats, of_entropy: Floats) -> tuple[Floats, list[Floats]]:
        # Each number's square has the weight of its row; the rest is the same for all numbers.
        of_log_std = square @ of_log_prob
        of_log_std += np.add.reduce(of_entropy) - np.add.reduce(of_log_prob)
        of_mean = z * of_log_prob
        of_mean *= narrow
        return of_mean, [of_log_std]

    return log_prob, entropy, pull
