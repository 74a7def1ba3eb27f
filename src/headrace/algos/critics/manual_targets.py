"""The targets of SAC, TQC, REDQ and TD3 with fewer operations, for the CPU.

`sac.targets` and `td3.targets` are the references: results agree within rounding
(`tests/models/test_critics_gradient.py`). Left out: gradients (`manual_gradient.py`).
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.algos.critics.manual_gradient import (
    layers_of,
    layers_of_actor,
    policy_unsupported,
)
from headrace.algos.critics.td3 import TD3, noisy
from headrace.batch import Minibatch, Obs
from headrace.models.critics.actor import ActorNetwork, ActorPolicy
from headrace.models.critics.critics import Critics, join
from headrace.models.critics.temperature import Temperature
from headrace.models.manual import squashed
from headrace.models.manual.dense import Dense
from headrace.models.policy import Network


def unsupported(network: Network, *, policy: ActorPolicy, target: Critics, **_: Any) -> str:
    """Return the reason why targets cannot be computed here, or ""."""
    return policy_unsupported(policy, network, None, critics=target)


class _Targets:
    """What targets share: the policy that acts next, and the target critics.

    Args:
        network: settings of the policy's network and the critics'.
        normalizing: normalizes observations.
        acting: draws the next actions.
        target: judges them.
    """

    def __init__(
        self, network: Network, normalizing: ActorPolicy, acting: ActorPolicy, target: Critics
    ) -> None:
        self._network, self._normalizing = network, normalizing
        self._acting, self._target = acting, target

    @functools.cached_property
    def _nets(self) -> tuple[Dense, Dense]:
        """The layers of both. They are read at the first use: a gradient may move their weights."""
        assert isinstance(self._acting.model, ActorNetwork)
        of_actor = Dense(layers_of_actor(self._acting.model, self._network))
        return of_actor, Dense(layers_of(self._target, self._network))

    def _params(self, obs: Obs) -> tuple[Obs, Tensor]:
        """Return normalized observations, and parameters of the next actions."""
        model = self._acting.model
        assert isinstance(model, ActorNetwork)
        seen = self._normalizing.normalized(obs)
        return seen, self._nets[0].forward(model.features(seen))

    def _outputs(self, seen: Obs, action: Tensor) -> Tensor:
        """Return the outputs of the target critics, `[E, B, K]`."""
        features = self._target.encoder(seen)
        x = join(features, action, next(self._target.parameters()).dtype)
        return self._nets[1].forward(x.expand(self._target.num_critics, *x.shape))

    def _discounted(self, rows: Minibatch, value: Tensor) -> Minibatch:
        """Return the targets with these values of what follows, and normalized observations."""
        reward, discount = rows["reward"].unsqueeze(-1), rows["discount"].unsqueeze(-1)
        return {
            "target": torch.addcmul(reward, discount, value),
            "seen": self._normalizing.normalized(rows["obs"]),
        }


class SACTargets(_Targets):
    """A replacement of `sac.targets`."""

    def __init__(
        self,
        network: Network,
        *,
        policy: ActorPolicy,
        target: Critics,
        temperature: Temperature,
    ) -> None:
        super().__init__(network, policy, policy, target)
        self._temperature = temperature

    @torch.no_grad()
    @np.errstate(all="ignore")  # as in torch: what is not finite makes the gradient so
    def __call__(self, rows: Minibatch) -> Minibatch:
        """Return what `sac.targets` documents."""
        size, estimate = self._acting.num_draws, self._target.estimate
        seen, params = self._params(rows["next_obs"])
        noise = rows["noise"]
        action, log_prob, _ = squashed.draw(params.numpy(), noise[:, :size].numpy())
        outputs = self._outputs(seen, torch.from_numpy(action))
        value = estimate.of_next(outputs, noise[:, 2 * size :][:, : estimate.num_normal])
        of_entropy = float(self._temperature()) * log_prob
        return self._discounted(rows, value - torch.from_numpy(of_entropy).unsqueeze(-1))


class TD3Targets(_Targets):
    """A replacement of `td3.targets`."""

    def __init__(
        self,
        network: Network,
        *,
        policy: ActorPolicy,
        target_policy: ActorPolicy,
        target: Critics,
        cfg: TD3,
    ) -> None:
        super().__init__(network, policy, target_policy, target)
        self._cfg = cfg

    @torch.no_grad()
    @np.errstate(all="ignore")
    def __call__(self, rows: Minibatch) -> Minibatch:
        """Return what `td3.targets` documents."""
        seen, params = self._params(rows["next_obs"])
        action = noisy(self._acting.head.mode(params), rows, self._cfg)
        return self._discounted(rows, self._outputs(seen, action).amin(0))
