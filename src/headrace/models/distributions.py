"""Distributions over actions, as heads on a network's output.

Sampling turns the caller's uniform noise into actions by inverse CDF, so that an action depends on
its env's noise alone. `torch.distributions` draws from a generator of its own, and is slower.
"""

import math

import torch
from torch import Tensor, nn

from headrace.spec import Space


class Categorical(nn.Module):
    """One choice among `num_choices`: logits `[..., num_choices]`, actions int64 `[...]`."""

    num_draws = 1

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self.num_params = num_choices

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, from noise in (0, 1) `[..., num_draws]`, and their log-probabilities."""
        log_p = params.log_softmax(-1)
        choice = _inverse_cdf(log_p, noise)
        return choice, _at(log_p, choice)

    def mode(self, params: Tensor) -> Tensor:
        """Return the likeliest action."""
        return params.argmax(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy, `[...]` each."""
        log_p = params.log_softmax(-1)
        return _at(log_p, action), -(log_p.exp() * log_p).sum(-1)


class MultiCategorical(nn.Module):
    """Several choices at a time: logits `[..., sum(nvec)]`, actions int64 `[..., len(nvec)]`."""

    def __init__(self, nvec: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = list(nvec)
        self._choices = [Categorical(num_choices) for num_choices in nvec]
        self.num_params, self.num_draws = sum(nvec), len(nvec)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, from noise in (0, 1) `[..., num_draws]`, and their log-probabilities."""
        logits, draws = torch.split(params, self.sizes, -1), torch.split(noise, 1, -1)
        each = [c.sample(*of) for c, *of in zip(self._choices, logits, draws, strict=True)]
        action, log_prob = zip(*each, strict=True)
        return torch.stack(action, -1), torch.stack(log_prob, -1).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        """Return the likeliest action."""
        logits = torch.split(params, self.sizes, -1)
        return torch.stack([part.argmax(-1) for part in logits], -1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy, `[...]` each."""
        logits, chosen = torch.split(params, self.sizes, -1), action.unbind(-1)
        each = [c.evaluate(*of) for c, *of in zip(self._choices, logits, chosen, strict=True)]
        log_prob, entropy = zip(*each, strict=True)
        return torch.stack(log_prob, -1).sum(-1), torch.stack(entropy, -1).sum(-1)


def _at(log_p: Tensor, choice: Tensor) -> Tensor:
    return log_p.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(log_p: Tensor, uniform: Tensor) -> Tensor:
    """Return the first choice whose cumulative probability reaches `uniform`, `[..., 1]`.

    Scaled by the total instead of 1 and compared strictly: rounding can then neither run past the
    last choice nor land on one of probability 0.
    """
    cumulative = log_p.exp().cumsum(-1)
    threshold = uniform * cumulative[..., -1:]
    return (cumulative < threshold).sum(-1)


class Gaussian(nn.Module):
    """A Gaussian with a mean from the network and one learned spread for all observations.

    Parameters are means `[..., size]`; actions are float32 `[..., size]`, not clipped (the
    environment gets the clipped one, the log-probability is of the unclipped one).
    """

    def __init__(self, size: int, initial_log_std: float = 0.0) -> None:
        super().__init__()
        self.num_params = self.num_draws = size
        self.log_std = nn.Parameter(torch.full((size,), initial_log_std))

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, from noise in (0, 1) `[..., num_draws]`, and their log-probabilities."""
        action = params + self.log_std.exp() * torch.special.ndtri(noise)
        return action, self._log_prob(params, action)

    def mode(self, params: Tensor) -> Tensor:
        """Return the likeliest action."""
        return params

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action` and the entropy, `[...]` each."""
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return self._log_prob(params, action), entropy.expand(params.shape[:-1])

    def _log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        z = (action - params) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


Head = Categorical | MultiCategorical | Gaussian


def head_for(space: Space, initial_log_std: float = 0.0) -> Head:
    """Return the distribution over the actions of a space."""
    if space.kind == "box":
        return Gaussian(space.size, initial_log_std)
    if space.kind == "discrete":
        return Categorical(space.nvec[0])
    return MultiCategorical(space.nvec)
