"""Policies that act by the values of actions: their network, and the choice among the values.

Left out: what the values are learned from (`algos/`).
"""

from functools import partial

import torch
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.custom import ModelFactory
from headrace.models.distributions import Head, at, inverse_cdf
from headrace.models.networks import Mlp, encoder_for, linear
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


class EpsilonGreedy(Head):
    """The choice of the largest value or, with probability epsilon, any choice that is allowed.

    Parameters are values of actions `[..., num_choices]`, actions are int64 `[...]`. Epsilon is a
    buffer: it is saved and published with the weights.
    """

    num_draws = 1
    epsilon: Tensor

    def __init__(self, num_choices: int, epsilon: float) -> None:
        super().__init__()
        self.num_params = self.num_choices = num_choices
        self.register_buffer("epsilon", torch.tensor(epsilon))

    def sample(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        probability = self._probabilities(params)
        choice = inverse_cdf(probability, noise)
        return choice, at(probability, choice).log()

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def evaluate(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        probability = self._probabilities(params)
        entropy = torch.special.entr(probability).sum(-1)
        return at(probability, action).log(), entropy

    def _probabilities(self, values: Tensor) -> Tensor:
        allowed = (values > torch.finfo(values.dtype).min).to(values.dtype)
        uniform = allowed / allowed.sum(-1, keepdim=True)
        greedy = nn.functional.one_hot(values.argmax(-1), self.num_choices)
        return self.epsilon * uniform + (1 - self.epsilon) * greedy


class QNetwork(nn.Module):
    """An encoder, hidden layers, and the values of all actions.

    Args:
        layer_norm: normalize the sums of each hidden layer (Ba et al. 2016, arXiv:1607.06450).
        dueling: a value and advantages, each with hidden layers of its own, which add up to the
            values of actions (Wang et al. 2016, arXiv:1511.06581, eq. 9).
    """

    def __init__(
        self, spec: EnvSpec, network: Network, *, layer_norm: bool = False, dueling: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder_for(spec.seen, network.image_net, layer_norm=layer_norm)
        features, sizes = self.encoder.num_features, network.hidden_sizes
        width = (features, *sizes)[-1]
        # PyTorch's own initial weights, which DQN's published settings were found with, are smaller
        # than orthogonal ones. Where sums are normalized, their size does not matter.
        orthogonal = layer_norm

        def trunk() -> Mlp:
            return Mlp(
                features, sizes, network.activation, orthogonal=orthogonal, layer_norm=layer_norm
            )

        def head(num_out: int) -> nn.Linear:
            return linear(width, num_out, 1.0) if orthogonal else nn.Linear(width, num_out)

        self.trunk, self.actor = trunk(), head(spec.action.nvec[0])
        self.critic_trunk: Mlp | None = None
        if dueling:
            self.critic_trunk, self.critic = trunk(), head(1)

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Return the values of actions `[..., num_choices]`, and the largest `[...]`."""
        features = self.encoder(obs).to(self.actor.weight.dtype)
        values: Tensor = self.actor(self.trunk(features))
        if self.critic_trunk is not None:
            advantage = values - values.mean(-1, keepdim=True)
            values = self.critic(self.critic_trunk(features)) + advantage
        return values, values.amax(-1)


class QPolicy(Policy):
    """A policy whose network's parameters are values of actions; its value is the largest.

    A mask takes actions that are not allowed out of both.
    """

    head: EpsilonGreedy

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        model: ModelFactory | None = None,
        *,
        epsilon: float,
        layer_norm: bool = False,
        dueling: bool = False,
    ) -> None:
        own = partial(QNetwork, layer_norm=layer_norm, dueling=dueling)
        head = EpsilonGreedy(spec.action.nvec[0], epsilon)
        super().__init__(spec, network, model, own=own, head=head)

    def act(self, obs: Obs, noise: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        values, best = self(obs)
        action, _ = self.head.sample(values, noise)
        return {"action": action, "value": best}

    def act_at_random(self) -> None:
        self.head.epsilon.fill_(1.0)

    def _masked(self, obs: Obs, params: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        params, _ = super()._masked(obs, params, value)
        best = params.amax(-1)
        if self.masks:  # a row that only resets may allow nothing
            best = best.masked_fill(best == torch.finfo(best.dtype).min, 0.0)
        return params, best
