"""Policies that act by the values of actions: their network, and the choice among the values.

Left out: what the values are learned from (`algos/`).
"""

import math

import torch
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.errors import ConfigError
from headrace.models.action_values.noisy import NoisyLinear
from headrace.models.action_values.value_distributions import MeanOnly, ValueDistribution
from headrace.models.custom import ModelFactory
from headrace.models.distributions import Head, at, inverse_cdf
from headrace.models.networks import Mlp, encoder_for, linear
from headrace.models.policy import Network, Policy, WithCore
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


class QNetwork(WithCore):
    """An encoder, maybe a core, hidden layers, and the outputs of each action, which say its value.

    Args:
        returns: what the outputs of an action say; default: its value alone.
        layer_norm: normalize the sums of each hidden layer (Ba et al. 2016, arXiv:1607.06450).
        dueling: a value and advantages, each with hidden layers of its own, which add up to the
            values of actions (Wang et al. 2016, arXiv:1511.06581, eq. 9).
        noisy: noise in the weights of the hidden layers and of the last one.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        returns: ValueDistribution | None = None,
        *,
        layer_norm: bool = False,
        dueling: bool = False,
        noisy: bool = False,
    ) -> None:
        super().__init__(encoder_for(spec.seen, network.image_net, layer_norm=layer_norm), network)
        self.returns = returns or MeanOnly()
        features, sizes = self.num_features, network.hidden_sizes
        width = (features, *sizes)[-1]

        def layer(num_in: int, num_out: int, gain: float = math.sqrt(2)) -> nn.Linear:
            if noisy:
                return NoisyLinear(num_in, num_out)
            # PyTorch's own initial weights, which DQN's published settings were found with, are
            # smaller than orthogonal ones. Where sums are normalized, their size does not matter.
            return linear(num_in, num_out, gain) if layer_norm else nn.Linear(num_in, num_out)

        def trunk() -> Mlp:
            return Mlp(features, sizes, network.activation, make=layer, layer_norm=layer_norm)

        num_choices, num_atoms = spec.action.nvec[0], self.returns.num_atoms
        self.trunk, self.actor = trunk(), layer(width, num_choices * num_atoms, 1.0)
        self.critic_trunk: Mlp | None = None
        if dueling:
            self.critic_trunk, self.critic = trunk(), layer(width, num_atoms, 1.0)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the outputs of each action, `[..., num_choices, num_atoms]`.

        Args:
            features: of observations, or outputs of the core.
        """
        of_each: Tensor = self.actor(self.trunk(features))
        # A rank may have no rows, so no size is left to be found.
        num_atoms = self.returns.num_atoms
        of_each = of_each.view(*of_each.shape[:-1], of_each.shape[-1] // num_atoms, num_atoms)
        if self.critic_trunk is not None:
            value = self.critic(self.critic_trunk(features)).unsqueeze(-2)
            of_each = value + (of_each - of_each.mean(-2, keepdim=True))
        return of_each

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of actions `[..., num_choices]`, and the largest `[...]`."""
        values = self.returns.mean(self.outputs(features))
        return values, values.amax(-1)


class QPolicy(Policy):
    """A policy whose network's parameters are values of actions; its value is the largest.

    A mask takes actions that are not allowed out of both.

    Args:
        returns: what the network's outputs say of an action; a network of one's own says its value.
        options: of `QNetwork`.

    Raises:
        ConfigError: a network of one's own is to say more, or to be noisy or dueling.
    """

    head: EpsilonGreedy

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        model: ModelFactory | None = None,
        returns: ValueDistribution | None = None,
        *,
        epsilon: float,
        **options: bool,
    ) -> None:
        returns = returns or MeanOnly()
        if model is not None and not isinstance(returns, MeanOnly):
            raise ConfigError(
                "A network of your own gives one value for each action, and no distribution.\n"
                "Leave --distribution out, or --model."
            )
        if model is not None and options.get("noisy"):
            raise ConfigError(
                "A network of your own gets no noise in its weights.\n"
                "Leave --noisy out, or --model."
            )
        if model is not None and options.get("dueling"):
            raise ConfigError(
                "A network of your own has its own sum of values and advantages.\n"
                "Leave --dueling out, or --model."
            )

        def own(spec: EnvSpec, network: Network) -> QNetwork:
            return QNetwork(spec, network, returns, **options)

        head = EpsilonGreedy(spec.action.nvec[0], epsilon)
        super().__init__(spec, network, model, own=own, head=head)
        self.returns = returns

    def outputs(self, obs: Obs) -> Tensor:
        """Return the outputs of each action, `[..., num_choices, num_atoms]`; see `returns`."""
        with self._precision():
            if isinstance(self.model, QNetwork):
                outputs = self.model.outputs(self.model.features(self._input(obs)))
            else:
                outputs = self.model(self._input(obs))[0].unsqueeze(-1)
        return outputs.float() if self._bf16 else outputs

    def outputs_of_sequence(self, obs: Obs, state: Tensor, reset: Tensor, burn_in: int) -> Tensor:
        """Return `outputs` of rows in sequence, with a core: `[T - burn_in, n, num_choices, K]`.

        Args:
            obs, state, reset, burn_in: see `after_core`.
        """
        assert isinstance(self.model, QNetwork)
        hidden = self.after_core(obs, state, reset, burn_in)
        with self._precision():
            outputs = self.model.outputs(hidden)
        return outputs.float() if self._bf16 else outputs

    def best(self, outputs: Tensor, obs: Obs) -> Tensor:
        """Return the actions `[...]` of the largest values that are allowed."""
        values = self.returns.mean(outputs)
        return self._masked(obs, values, values[..., 0])[0].argmax(-1)

    def if_any_is_allowed(self, value: Tensor, obs: Obs) -> Tensor:
        """Return values `[...]` of observations, and 0 where a mask allows no action at all."""
        allowed = self.allowed(obs, value.shape)
        return value if allowed is None else value.where(allowed.any(-1), 0.0)

    def act(self, obs: Obs, noise: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        values, best, after = self.one_row(obs, state)
        action, _ = self.head.sample(values, noise)
        return {"action": action, "value": best} | after

    def act_at_random(self) -> None:
        self.head.epsilon.fill_(1.0)

    def _masked(self, obs: Obs, params: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        params, _ = super()._masked(obs, params, value)
        best = params.amax(-1)
        if self.masks:  # a row that only resets may allow nothing
            best = best.masked_fill(best == torch.finfo(best.dtype).min, 0.0)
        return params, best
