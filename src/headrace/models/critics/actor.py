"""Policies for continuous actions that have no value of their own: their critics are apart.

Left out: critics (`critics.py`), and what the policy learns from (`algos/critics/`).
"""

from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.critics.batch_norm import BatchNorm
from headrace.models.critics.heads import ExploringHead
from headrace.models.custom import ModelFactory
from headrace.models.networks import Mlp, encoder_for
from headrace.models.policy import Network, Policy, WithCore
from headrace.spec import EnvSpec


class NormedLinear(nn.Linear):
    """A linear layer whose input is normalized over the batch."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.norm = BatchNorm(num_in)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.norm(input))


class ActorNetwork(WithCore):
    """An encoder, maybe a core, hidden layers, and the parameters of the head.

    Args:
        batch_norm: normalize the input of each layer over the batch.
    """

    def __init__(
        self, spec: EnvSpec, network: Network, num_params: int, *, batch_norm: bool = False
    ) -> None:
        super().__init__(encoder_for(spec.seen, network.image_net), network)
        features, sizes = self.num_features, network.hidden_sizes
        # PyTorch's own initial weights: published settings were found with them.
        make = NormedLinear if batch_norm else nn.Linear
        self.trunk = Mlp(features, sizes, network.activation, make=make)
        self.actor = make((features, *sizes)[-1], num_params)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters of the head `[..., num_params]`, and values of 0 `[...]`."""
        params = self.actor(self.trunk(features))
        return params, params.new_zeros(params.shape[:-1])


class ActorPolicy(Policy):
    """A policy whose head explores a continuous action."""

    head: ExploringHead

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        head: ExploringHead,
        model: ModelFactory | None = None,
        *,
        batch_norm: bool = False,
    ) -> None:
        def own(spec: EnvSpec, network: Network) -> ActorNetwork:
            return ActorNetwork(spec, network, head.num_params, batch_norm=batch_norm)

        super().__init__(spec, network, model, own=own, head=head)

    def act(self, obs: Obs, noise: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        params, _, after = self.one_row(obs, state)
        return {"action": self.head.explore(params, noise)} | after

    def params_of_sequence(self, obs: Obs, state: Tensor, reset: Tensor, burn_in: int) -> Tensor:
        """Return parameters of the head for rows in sequence, `[T - burn_in, n, num_params]`.

        Args:
            obs, state, reset, burn_in: see `after_core`.
        """
        assert isinstance(self.model, ActorNetwork)
        hidden = self.after_core(obs, state, reset, burn_in)
        with self._precision():
            params = self.model.heads(hidden)[0]
        return params.float() if self._bf16 else params

    def act_at_random(self) -> None:
        self.head.is_random.fill_(1.0)
