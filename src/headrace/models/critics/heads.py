"""What the numbers of a network say of an action, and exploration around it.

Continuous actions are in [-1, 1]; `spec.ActionCodec` gives them the range of the space. Left out:
the network (`actor.py`), and what it is learned from (`algos/critics/`).
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from headrace.models.distributions import Categorical, Head

LOG_STD = (-20.0, 2.0)  # bounds, as in Haarnoja's code and Stable-Baselines3
_LARGEST = 1 - 2**-20  # of an action whose tanh is to be undone


class ExploringHead(Head):
    """The base class of heads that may explore at random, until they are trained.

    Attributes:
        is_random: 1 as long as actions are uniform, whatever is observed; else 0. It is a buffer:
            it is saved and published with the weights.
    """

    num_choices = 0
    is_random: Tensor

    def __init__(self, size: int, num_params: int, *, is_random: bool) -> None:
        super().__init__()
        self.num_draws, self.num_params = size, num_params
        self.register_buffer("is_random", torch.tensor(float(is_random)))

    def explore(self, params: Tensor, noise: Tensor) -> Tensor:
        """Return actions to explore by, from noise in (0, 1) `[..., size]`."""
        at_random, by_params = self._at_random(params, noise), self._explore(params, noise)
        return torch.where(self.is_random > 0, at_random, by_params)

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.explore(params, noise)
        return action, self.evaluate(params, action)[0]

    def masked(self, params: Tensor, allowed: Tensor) -> Tensor:
        return params

    def _at_random(self, params: Tensor, noise: Tensor) -> Tensor:
        return 2 * noise - 1

    @abstractmethod
    def _explore(self, params: Tensor, noise: Tensor) -> Tensor: ...


class ExploringChoice(ExploringHead):
    """One choice among `num_choices`: logits `[..., num_choices]`, as `Categorical`."""

    def __init__(self, num_choices: int, *, is_random: bool = False) -> None:
        super().__init__(1, num_choices, is_random=is_random)
        self.num_choices = num_choices
        self._head = Categorical(num_choices)

    def mode(self, params: Tensor) -> Tensor:
        return self._head.mode(params)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self._head.evaluate(params, action)

    def allowed(self, params: Tensor) -> Tensor:
        """Return which choices the mask of `params` left, `[..., num_choices]` bool."""
        return params > torch.finfo(params.dtype).min

    def masked(self, params: Tensor, allowed: Tensor) -> Tensor:
        return self._head.masked(params, allowed)

    def _at_random(self, params: Tensor, noise: Tensor) -> Tensor:
        alike = self.masked(torch.zeros_like(params), self.allowed(params))
        return self._explore(alike, noise)

    def _explore(self, params: Tensor, noise: Tensor) -> Tensor:
        return self._head.sample(params, noise)[0]


class SquashedGaussian(ExploringHead):
    """tanh of a Gaussian whose mean and deviation depend on the observation.

    Parameters are means and logarithms of deviations, `[..., 2 * size]`. Haarnoja et al. 2018,
    arXiv:1812.05905, appendix C.
    """

    def __init__(self, size: int, *, is_random: bool = False) -> None:
        super().__init__(size, 2 * size, is_random=is_random)

    def mode(self, params: Tensor) -> Tensor:
        return params.chunk(2, -1)[0].tanh()

    def draw(self, params: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions, from normal noise `[..., size]`, and their log-probabilities `[...]`."""
        mean, log_std = self._gaussian(params)
        before = mean + log_std.exp() * normal
        return before.tanh(), _log_prob(before, normal, log_std)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of `action`, and minus it: the entropy has no closed form."""
        mean, log_std = self._gaussian(params)
        before = action.clamp(-_LARGEST, _LARGEST).atanh()
        log_prob = _log_prob(before, (before - mean) * (-log_std).exp(), log_std)
        return log_prob, -log_prob

    def _gaussian(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = params.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def _explore(self, params: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._gaussian(params)
        action: Tensor = (mean + log_std.exp() * torch.special.ndtri(noise)).tanh()
        return action


class NoisyAction(ExploringHead):
    """An action, tanh of the parameters `[..., size]`, explored around by Gaussian noise.

    Args:
        deviation: of the noise, in the action's range [-1, 1].
    """

    def __init__(self, size: int, deviation: float, *, is_random: bool = False) -> None:
        super().__init__(size, size, is_random=is_random)
        self._deviation = deviation

    def mode(self, params: Tensor) -> Tensor:
        return params.tanh()

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability before the action is clipped to [-1, 1], and the entropy."""
        deviation = max(self._deviation, 1e-8)
        of_each = math.log(deviation) + 0.5 * math.log(2 * math.pi)
        z = (action - params.tanh()) / deviation
        log_prob = (-0.5 * z.square() - of_each).sum(-1)
        return log_prob, torch.full_like(log_prob, (of_each + 0.5) * params.shape[-1])

    def _explore(self, params: Tensor, noise: Tensor) -> Tensor:
        action: Tensor = params.tanh() + self._deviation * torch.special.ndtri(noise)
        return action.clamp(-1, 1)


def _log_prob(before: Tensor, normal: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-probability of tanh(before), where before = mean + exp(log_std) normal."""
    # log(1 - tanh(u)^2) in a form that stays finite: 2 (log 2 - u - softplus(-2 u))
    squashed = 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
    gaussian = -0.5 * normal.square() - log_std - 0.5 * math.log(2 * math.pi)
    return (gaussian - squashed).sum(-1)
