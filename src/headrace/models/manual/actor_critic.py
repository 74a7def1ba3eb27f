"""The network of actor and critic forward and backward, without autograd.

If both trunks have one shape, each layer is one batched product. Left out: losses (`algos/`).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Obs
from headrace.models.manual import dense
from headrace.models.manual.dense import Dense, linear, linears
from headrace.models.manual.flat import FlatParameters
from headrace.models.manual.heads import Floats
from headrace.models.networks import FlatEncoder
from headrace.models.normalization import CLIP
from headrace.models.policy import ActorCritic, Network, Policy
from headrace.spec import PLAIN


def unsupported(policy: Policy, network: Network) -> str:
    """Return the reason why `ManualActorCritic` cannot replace `policy.model`, or ""."""
    model = policy.model
    if type(model) is not ActorCritic or not policy.is_own:
        return "a network of your own"
    reasons = {
        "a policy of its own kind": type(policy) is not Policy,
        "no hidden layer": not network.hidden_sizes,
        "a recurrent core": model.core is not None,
    }
    encoders = [model.encoder, *([model.state_encoder] if model.state_encoder else [])]
    return dense.unsupported(network, encoders, model.actor.weight, reasons)


class ManualActorCritic(FlatParameters):
    """The actor and the critic of a policy, whose parameters become views of one vector."""

    def __init__(self, policy: Policy, activation: str) -> None:
        model = policy.model
        assert isinstance(model, ActorCritic)
        self._policy, self._model = policy, model
        both = model.actor_trunk, model.critic_trunk
        trunks = [[*trunk.layers] for trunk in both if trunk is not None]
        layers = [*zip(*trunks, strict=True)]
        # A layer's parts of both trunks are neighbours.
        names = "weight", "bias"
        hidden: list[Any] = [getattr(part, name) for of in layers for name in names for part in of]
        heads: list[Any] = [*model.actor.parameters(), *model.critic.parameters()]
        own = list(policy.head.parameters())
        super().__init__([*hidden, *heads, *own])
        self._are_alike = len(trunks) == 2 and model.state_encoder is None
        if self._are_alike:
            self._trunks = [Dense([linears(self, of, activation) for of in layers])]
        else:
            self._trunks = [Dense([linear(self, of, activation) for of in t]) for t in trunks]
        arrays = [[tensor.numpy() for tensor in self.value_and_gradient(p)] for p in (*heads, *own)]
        self._heads, self._own = arrays[:4], [of_own for _, of_own in arrays[4:]]
        # By trunk: what it last put out, and the same and its gradient as arrays (`_arrays`)
        self._outputs = [torch.empty(0)]
        self._hidden: list[Floats] = []
        self._signals: list[Floats] = []
        self._is_box = isinstance(model.encoder, FlatEncoder) and model.encoder.kind == "box"
        self.start_update()

    def start_update(self) -> None:
        """Read the normalizer of observations."""
        normalize = self._policy.normalize_obs
        self._scaling = normalize.of(PLAIN).scaling() if self._is_box and normalize else None

    @np.errstate(invalid="ignore")  # as in `NumpyActor`
    def forward(self, obs: Obs) -> tuple[Floats, Floats]:
        """Return params of the head `[num_params, rows]` and values `[rows]` of observations."""
        x = self._features(obs)
        seen = [x.expand(2, -1, -1)] if self._are_alike else [x, *self._of_critic(x, obs)]
        outputs = [trunk.forward(of) for trunk, of in zip(self._trunks, seen, strict=True)]
        if outputs[0] is not self._outputs[0]:  # of another number of rows: memory has moved
            self._outputs = outputs
            self._hidden = self._arrays(outputs)
            self._signals = self._arrays([trunk.output_gradient for trunk in self._trunks])
        (actor, _), (actor_bias, _), (critic, _), (critic_bias, _) = self._heads
        params = np.dot(actor, self._hidden[0].T)
        params += actor_bias[:, None]
        value = np.dot(critic, self._hidden[-1].T)[0]
        value += critic_bias
        return params, value

    def _arrays(self, of_trunks: list[Tensor]) -> list[Floats]:
        """Return `[rows, width]` of the actor, and of the critic if it has a trunk of its own."""
        return [*of_trunks[0].numpy()] if self._are_alike else [of.numpy() for of in of_trunks]

    def _features(self, obs: Obs) -> Tensor:
        """Return the input of the actor's trunk, `[rows, num_features]`."""
        dtype = self.flat.dtype
        if not (self._is_box and isinstance(obs, Tensor)):
            features: Tensor = self._model.encoder(self._policy.normalized(obs))
            return features.to(dtype)
        x = (obs.flatten(1) if obs.dim() > 1 else obs.unsqueeze(1)).float()
        if self._scaling is not None:
            mean, scale = self._scaling
            x = torch.sub(x, mean.reshape(-1)).mul_(scale.reshape(-1)).clamp_(-CLIP, CLIP)
        return x.to(dtype)

    def _of_critic(self, features: Tensor, obs: Obs) -> list[Tensor]:
        """Return the input of the critic's trunk, if it has one."""
        if self._model.state_encoder is None:
            return []
        state = self._model.state_encoder(*self._policy.game_state(obs))
        return [torch.cat([features, state.to(features.dtype)], -1)]

    @np.errstate(invalid="ignore")
    def fill_gradient(self, of_params: Floats, of_value: Floats, of_own: list[Floats]) -> None:
        """Fill `flat` from the gradients of params, values and the distribution's parameters."""
        for gradient, of in zip(self._own, of_own, strict=True):
            gradient[:] = of
        (actor, of_actor), (_, of_actor_bias) = self._heads[:2]
        (critic, of_critic), (_, of_critic_bias) = self._heads[2:]
        np.dot(of_params, self._hidden[0], out=of_actor)
        np.add.reduce(of_params, 1, out=of_actor_bias)
        np.dot(of_value, self._hidden[-1], out=of_critic[0])
        np.add.reduce(of_value, 0, keepdims=True, out=of_critic_bias)
        np.dot(of_params.T, actor, out=self._signals[0])
        if len(self._signals) == 2:
            np.multiply(of_value[:, None], critic, out=self._signals[1])
        else:
            self._signals[0] += of_value[:, None] * critic
        for trunk in self._trunks:
            trunk.fill()
