"""Policies for continuous actions that have no value of their own: their critics are apart.

Left out: critics (`critics.py`), and what the policy learns from (`algos/critics/`).
"""

from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.critics.heads import ExploringHead
from headrace.models.custom import ModelFactory
from headrace.models.networks import Mlp, encoder_for
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


class ActorNetwork(nn.Module):
    """An encoder, hidden layers, and the parameters of the head."""

    def __init__(self, spec: EnvSpec, network: Network, num_params: int) -> None:
        super().__init__()
        self.encoder = encoder_for(spec.seen, network.image_net)
        features, sizes = self.encoder.num_features, network.hidden_sizes
        # PyTorch's own initial weights: published settings were found with them.
        self.trunk = Mlp(features, sizes, network.activation, make=nn.Linear)
        self.actor = nn.Linear((features, *sizes)[-1], num_params)

    def forward(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Return parameters of the head `[..., num_params]`, and values of 0 `[...]`."""
        features: Tensor = self.encoder(obs)
        params = self.actor(self.trunk(features.to(self.actor.weight.dtype)))
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
    ) -> None:
        def own(spec: EnvSpec, network: Network) -> ActorNetwork:
            return ActorNetwork(spec, network, head.num_params)

        super().__init__(spec, network, model, own=own, head=head)

    def act(self, obs: Obs, noise: Tensor, state: Tensor | None = None) -> dict[str, Tensor]:
        return {"action": self.head.explore(self(obs)[0], noise)}

    def act_at_random(self) -> None:
        self.head.is_random.fill_(1.0)
