"""Distributions over actions, as heads on a network's output.

Sampling turns uniform noise that the caller brings into actions (inverse CDF), so that an action
depends on its env's noise alone: `torch.distributions` draws from a generator of its own, and takes
longer for its checks than the network for its products at the batch sizes of a vector.

Left out: what an action means to the environment (`spec.ActionCodec`).
"""

import math

import torch
from torch import Tensor, nn

from headrace.spec import Space


class Categorical(nn.Module):
    """Independent categorical choices: one for Discrete, several for MultiDiscrete.

    Parameters are logits `[..., sum(nvec)]`; actions are int64, `[...]` for a single choice
    (`squeeze`), else `[..., len(nvec)]`.
    """

    def __init__(self, nvec: tuple[int, ...], *, squeeze: bool) -> None:
        super().__init__()
        self.nvec = nvec
        self._squeeze = squeeze
        self.num_params = sum(nvec)
        self.num_draws = len(nvec)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions by inverse CDF from `noise` in (0, 1), `[..., draws]`; and their log-probs."""
        log_p = self._log_p(params)
        choice = torch.stack([_inverse_cdf(p, noise[..., i]) for i, p in enumerate(log_p)], -1)
        return self._pack(choice), self._gather(log_p, choice)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest action."""
        choice = [logits.argmax(-1) for logits in torch.split(params, list(self.nvec), -1)]
        return self._pack(torch.stack(choice, -1))

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of `action`, and entropy: `[...]` each."""
        log_p = self._log_p(params)
        log_prob = self._gather(log_p, action.unsqueeze(-1) if self._squeeze else action)
        return log_prob, -torch.stack([(p.exp() * p).sum(-1) for p in log_p], -1).sum(-1)

    def _log_p(self, params: Tensor) -> list[Tensor]:
        return [logits.log_softmax(-1) for logits in torch.split(params, list(self.nvec), -1)]

    def _gather(self, log_p: list[Tensor], choice: Tensor) -> Tensor:
        picked = [p.gather(-1, choice[..., i : i + 1]) for i, p in enumerate(log_p)]
        return torch.cat(picked, -1).sum(-1)

    def _pack(self, choice: Tensor) -> Tensor:
        return choice.squeeze(-1) if self._squeeze else choice


def _inverse_cdf(log_p: Tensor, uniform: Tensor) -> Tensor:
    """The first choice whose cumulative probability reaches `uniform`.

    Scaled by the total instead of 1 and compared strictly: rounding can then neither run past the
    last choice nor land on one of probability 0.
    """
    cumulative = log_p.exp().cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[..., -1:]
    return (cumulative < threshold).sum(-1)


class Gaussian(nn.Module):
    """A Gaussian with a mean from the network and a spread that is learned but the same everywhere.

    Parameters are means `[..., size]`; actions are float32 `[..., size]`, not clipped (the
    environment gets the clipped one, the log-probability is of the unclipped one).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_params = self.num_draws = size
        self.log_std = nn.Parameter(torch.zeros(size))

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions by inverse CDF from `noise` in (0, 1), `[..., size]`; with their log-probs."""
        action = params + self.log_std.exp() * torch.special.ndtri(noise)
        return action, self._log_prob(params, action)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest action."""
        return params

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of `action`, and entropy: `[...]` each."""
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return self._log_prob(params, action), entropy.expand(params.shape[:-1])

    def _log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        z = (action - params) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


Head = Categorical | Gaussian


def head_for(space: Space) -> Head:
    """The distribution that fits an action space."""
    if space.kind == "box":
        return Gaussian(space.size)
    return Categorical(space.nvec, squeeze=space.kind == "discrete")
