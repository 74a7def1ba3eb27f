"""Distributions over actions, as heads on a network's output.

Sampling turns the caller's uniform noise into actions by inverse CDF, so that an action depends on
its env's noise alone. `torch.distributions` draws from a generator of its own, and is slower.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from headrace.spec import Space


class Head(nn.Module, ABC):
    """A distribution over actions.

    Attributes:
        num_params: numbers that it takes from the network.
        num_draws: uniform random numbers per action.
        num_choices: bits of an action mask.
    """

    num_params: int
    num_draws: int
    num_choices: int

    @abstractmethod
    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, from noise in (0, 1) `[..., num_draws]`, and their log-probabilities."""

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """Return the likeliest action."""

    @abstractmethod
    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy, `[...]` each."""

    def masked(self, params: Tensor, allowed: Tensor) -> Tensor:
        """Return the parameters of the same distribution over only the choices that are allowed.

        `allowed`, `[..., num_choices]` bool, has one bit per choice.
        """
        # The least finite number, not -inf, whose entropy term 0 * log 0 would be NaN.
        return params.masked_fill(~allowed, torch.finfo(params.dtype).min)


class Categorical(Head):
    """One choice among `num_choices`: logits `[..., num_choices]`, actions int64 `[...]`."""

    num_draws = 1

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self.num_params = self.num_choices = num_choices

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        log_p = params.log_softmax(-1)
        choice = inverse_cdf(log_p.exp(), noise)
        return choice, at(log_p, choice)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_p = params.log_softmax(-1)
        return at(log_p, action), -(log_p.exp() * log_p).sum(-1)


class MultiCategorical(Head):
    """Several choices at a time: logits `[..., sum(nvec)]`, actions int64 `[..., len(nvec)]`."""

    def __init__(self, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = list(nvec)
        self._choices = [Categorical(num_choices) for num_choices in nvec]
        self.num_params = self.num_choices = sum(nvec)
        self.num_draws = len(nvec)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        logits, draws = torch.split(params, self.sizes, -1), torch.split(noise, 1, -1)
        each = [c.sample(*of) for c, *of in zip(self._choices, logits, draws, strict=True)]
        action, log_prob = zip(*each, strict=True)
        return torch.stack(action, -1), torch.stack(log_prob, -1).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        logits = torch.split(params, self.sizes, -1)
        return torch.stack([part.argmax(-1) for part in logits], -1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        logits, chosen = torch.split(params, self.sizes, -1), action.unbind(-1)
        each = [c.evaluate(*of) for c, *of in zip(self._choices, logits, chosen, strict=True)]
        log_prob, entropy = zip(*each, strict=True)
        return torch.stack(log_prob, -1).sum(-1), torch.stack(entropy, -1).sum(-1)


def at(of_each: Tensor, choice: Tensor) -> Tensor:
    """Return the number of the chosen one, `[...]`, of those of each choice `[..., n]`."""
    return of_each.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def inverse_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return the first choice whose cumulative probability reaches `uniform`, `[..., 1]`.

    Scaled by the total instead of 1 and compared strictly: rounding can then neither run past the
    last choice nor land on one of probability 0.
    """
    cumulative = probability.cumsum(-1)
    threshold = uniform * cumulative[..., -1:]
    return (cumulative < threshold).sum(-1)


class Gaussian(Head):
    """A Gaussian with a mean from the network and one learned spread for all observations.

    Parameters are means `[..., size]`; actions are float32 `[..., size]`, not clipped (the
    environment gets the clipped one, the log-probability is of the unclipped one). A mask has no
    bits for it.
    """

    num_choices = 0

    def __init__(self, size: int, initial_log_std: float = 0.0) -> None:
        super().__init__()
        self.num_params = self.num_draws = size
        self.log_std = nn.Parameter(torch.full((size,), initial_log_std))

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = params + self.log_std.exp() * torch.special.ndtri(noise)
        return action, self._log_prob(params, action)

    def mode(self, params: Tensor) -> Tensor:
        return params

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return self._log_prob(params, action), entropy.expand(params.shape[:-1])

    def masked(self, params: Tensor, allowed: Tensor) -> Tensor:
        return params

    def _log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        z = (action - params) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


class Product(Head):
    """Independent actions of several heads, as one row: float32 `[..., num_draws]`.

    Parameters, noise, masks and actions are those of the parts, side by side; log-probabilities and
    entropies are their sums.
    """

    def __init__(self, parts: Sequence[MultiCategorical | Gaussian]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._parts = list(parts)  # the same, typed
        self._params = [part.num_params for part in parts]
        self._draws = [part.num_draws for part in parts]  # also the numbers of an action
        self._bits = [part.num_choices for part in parts]
        self.num_params, self.num_draws = sum(self._params), sum(self._draws)
        self.num_choices = sum(self._bits)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        pieces = torch.split(params, self._params, -1), torch.split(noise, self._draws, -1)
        each = [part.sample(*of) for part, *of in zip(self._parts, *pieces, strict=True)]
        actions, log_prob = zip(*each, strict=True)
        return _row(actions), torch.stack(log_prob, -1).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        pieces = torch.split(params, self._params, -1)
        return _row([part.mode(of) for part, of in zip(self._parts, pieces, strict=True)])

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        pieces = torch.split(params, self._params, -1), torch.split(action, self._draws, -1)
        each = [
            part.evaluate(of, chosen.long() if part.num_choices else chosen)
            for part, of, chosen in zip(self._parts, *pieces, strict=True)
        ]
        log_prob, entropy = zip(*each, strict=True)
        return torch.stack(log_prob, -1).sum(-1), torch.stack(entropy, -1).sum(-1)

    def masked(self, params: Tensor, allowed: Tensor) -> Tensor:
        pieces = torch.split(params, self._params, -1), torch.split(allowed, self._bits, -1)
        each = [part.masked(*of) for part, *of in zip(self._parts, *pieces, strict=True)]
        return torch.cat(each, -1)


def _row(actions: Sequence[Tensor]) -> Tensor:
    return torch.cat([action.float() for action in actions], -1)


def head_for(space: Space, initial_log_std: float = 0.0) -> Head:
    """Return the distribution over the actions of a space."""
    if space.kind in ("dict", "tuple"):
        return Product([*_parts_of(space, initial_log_std)])
    if space.kind == "discrete":
        return Categorical(space.nvec[0])
    return _of_numbers(space, initial_log_std)


def _of_numbers(space: Space, initial_log_std: float) -> MultiCategorical | Gaussian:
    if space.kind == "box":
        return Gaussian(space.size, initial_log_std)
    return MultiCategorical(space.nvec)


def _parts_of(space: Space, initial_log_std: float) -> Iterator[MultiCategorical | Gaussian]:
    for _, part in space.parts:
        if part.parts:
            yield from _parts_of(part, initial_log_std)
        else:
            yield _of_numbers(part, initial_log_std)
