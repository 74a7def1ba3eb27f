"""Critics: several networks Q(s, a), computed as one.

Left out: what they learn (`algos/critics/`).
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batch import Obs
from headrace.models.critics.batch_norm import BatchNorm
from headrace.models.critics.dropout import Dropout
from headrace.models.critics.estimates import Estimate, LeastValue
from headrace.models.networks import ACTIVATIONS, NORM_EPS, autocast, encoder_for
from headrace.models.policy import Network
from headrace.models.recurrent import Core
from headrace.spec import EnvSpec


class BatchedLinear(nn.Module):
    """A linear layer of each of E networks: `[E, B, num_in]` to `[E, B, num_out]`.

    Initial weights are those of `torch.nn.Linear`: uniform in ±1 / sqrt(num_in).
    """

    def __init__(self, num_networks: int, num_in: int, num_out: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(num_in)
        self.weight = nn.Parameter(torch.empty(num_networks, num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num_networks, 1, num_out))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, features: Tensor, *, frozen: bool, first: int | None) -> Tensor:
        weight, bias = self.weight[:first], self.bias[:first]
        if frozen:
            weight, bias = weight.detach(), bias.detach()
        return torch.baddbmm(bias, features, weight)


def join(features: Tensor, action: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what the first layer sees, `[B, num_in]`: features, and the action if there is one."""
    features = features.to(dtype)
    return features if action is None else torch.cat((features, action.to(dtype)), -1)


class Critics(nn.Module):
    """E networks Q(s, a), which share the encoder of observations, and maybe a recurrent core.

    Of choices, the networks give the outputs of each one.

    Args:
        estimate: what their outputs say of the return; default: the least value.
        layer_norm: normalize the sums of each hidden layer, without learned factors.
        dropout: share of the units of each hidden layer to drop.
        batch_norm: normalize the input of each layer over the batch.

    Attributes:
        has_layer_norm: as `layer_norm`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: Network,
        num_critics: int,
        estimate: Estimate | None = None,
        *,
        layer_norm: bool = False,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_critics = num_critics
        self.estimate = estimate or LeastValue()
        self.encoder = encoder_for(spec.seen, network.image_net)
        self.num_choices = spec.action.nvec[0] if spec.action.kind == "discrete" else 0
        num_features = self.encoder.num_features
        self.core: Core | None = None
        if network.core != "none":
            self.core = Core(network.core, num_features, network.core_size)
            num_features = network.core_size
        self._state_size = network.state_size
        num_in = num_features + (0 if self.num_choices else spec.action.size)
        num_outputs = max(1, self.num_choices) * self.estimate.num_outputs
        pairs = itertools.pairwise((num_in, *network.hidden_sizes, num_outputs))
        self.layers = nn.ModuleList(BatchedLinear(num_critics, *pair) for pair in pairs)
        inputs = (num_in, *network.hidden_sizes) if batch_norm else ()
        self.norms = nn.ModuleList(BatchNorm(num_critics, 1, size) for size in inputs)
        sizes = network.hidden_sizes if dropout else ()
        self.dropout = nn.ModuleList(Dropout(dropout, num_critics, size) for size in sizes)
        self.has_layer_norm, self._is_bf16 = layer_norm, network.precision == "bf16"
        self._activation = ACTIVATIONS[network.activation]

    def of_action(self, obs: Obs, action: Tensor, key: Tensor | None = None) -> Tensor:
        """Return outputs `[E, B, K]` of normalized observations and actions that were taken."""
        if not self.num_choices:
            outputs: Tensor = self(obs, action, key=key)
            return outputs
        outputs = self(obs, key=key)
        chosen = action.view(1, -1, 1, 1).expand(len(outputs), -1, 1, outputs.shape[-1])
        return outputs.gather(2, chosen).squeeze(2)

    def forward(
        self,
        obs: Obs,
        action: Tensor | None = None,
        *,
        frozen: bool = False,
        first: int | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        """Return outputs `[E, B, K]`, see `estimate`; of choices those of each, `[E, B, A, K]`.

        Args:
            obs: `[B, ...]`, normalized.
            action: `[B, size]`, in [-1, 1]; None: choices.
            frozen: let no gradient flow to the weights; that of the action does flow.
            first: use only so many of the networks.
            key: of each row, `[B]`, for dropout; None: nothing is dropped.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            features = self.encoder(obs)
        return self.outputs(features, action, frozen=frozen, first=first, key=key)

    def after_core(self, obs: Obs, reset: Tensor, burn_in: int) -> Tensor:
        """Return the core's outputs for rows in sequence, `[T - burn_in, n, core_size]`.

        Args:
            obs: `[T, n, ...]`, normalized. The state before the first row is zero.
            reset, burn_in: as in `Policy.after_core`.
        """
        assert self.core is not None
        features = self.encoder(obs).to(self.core.rnn.weight_ih_l0.dtype)
        state = features.new_zeros((features.shape[1], self._state_size))
        if burn_in:
            with torch.no_grad():
                _, after = self.core.with_states(features[:burn_in], state, reset[:burn_in])
            state = after[burn_in - 1]
        hidden: Tensor = self.core(features[burn_in:], state, reset[burn_in:])
        return hidden

    def outputs(
        self,
        features: Tensor,
        action: Tensor | None = None,
        *,
        frozen: bool = False,
        first: int | None = None,
        key: Tensor | None = None,
    ) -> Tensor:
        """Return `forward` from features of observations, or outputs of the core."""
        hidden: list[Any] = [*self.layers]
        last: BatchedLinear = hidden.pop()
        weight = last.weight[:first]
        with autocast(weight.device, on=self._is_bf16):
            joined = join(features, action, weight.dtype)
            at = joined.expand(len(weight), *joined.shape)
            if self.norms:
                at = self.norms[0](at, frozen=frozen)
            for i, layer in enumerate(hidden):
                at = layer(at, frozen=frozen, first=first)
                if key is not None:
                    at = self.dropout[i](at, key)
                if self.has_layer_norm:
                    at = nn.functional.layer_norm(at, at.shape[-1:], eps=NORM_EPS)
                at = self._activation(at)
                if self.norms:
                    at = self.norms[i + 1](at, frozen=frozen)
            outputs: Tensor = last(at, frozen=frozen, first=first)
        if self.num_choices:
            outputs = outputs.view(*outputs.shape[:2], self.num_choices, -1)
        return outputs.float() if self._is_bf16 else outputs
