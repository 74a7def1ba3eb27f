"""The policy: from observations to actions and values. What samplers copy and what files hold.

Left out: where observations come from (`collect/`), and losses (`algos/`).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from headrace.models.dists import head_for
from headrace.models.nets import FlatEncoder, linear, mlp
from headrace.models.normalize import NormalizeObs, NormalizeReward
from headrace.settings import settings
from headrace.spec import EnvSpec


@settings
class Network:
    """The shape of the policy's network, and the normalizers that live in it."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    """Width of each hidden layer (units)."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Non-linearity between layers."""
    shared_trunk: bool = False
    """One stack of hidden layers for policy and value, in place of one each."""
    normalize_obs: bool = False
    """Subtract the running mean of observations and divide by their running deviation."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return (learner only)."""


class Policy(nn.Module):
    """An actor and a critic over one encoder, with their normalizers."""

    def __init__(self, spec: EnvSpec, network: Network) -> None:
        super().__init__()
        self.encoder = FlatEncoder(spec.observation)
        self.head = head_for(spec.action)
        features = self.encoder.num_features
        self.normalize_obs = NormalizeObs((features,)) if network.normalize_obs else None
        self.normalize_reward = NormalizeReward() if network.normalize_reward else None

        def trunk() -> nn.Sequential:
            return mlp(features, network.hidden_sizes, network.activation)

        width = (features, *network.hidden_sizes)[-1]
        self.actor_trunk = trunk()
        # Small gain: the first policy is close to uniform whatever it sees (Andrychowicz et al.
        # 2021, arXiv:2006.05990, choice C57).
        self.actor = linear(width, self.head.num_params, 0.01)
        self.critic_trunk = None if network.shared_trunk else trunk()
        self.critic = linear(width, 1, 1.0)

    @property
    def num_draws(self) -> int:
        """Numbers of uniform noise that one action takes."""
        return self.head.num_draws

    def features(self, obs: Tensor) -> Tensor:
        """Encoded observations before normalization, `[..., features]`."""
        encoded: Tensor = self.encoder(obs)
        return encoded

    def _normalized(self, obs: Tensor) -> Tensor:
        features = self.features(obs)
        return features if self.normalize_obs is None else self.normalize_obs(features)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution `[..., num_params]`, and values `[...]`."""
        features = self._normalized(obs)
        hidden = self.actor_trunk(features)
        critic_hidden = hidden if self.critic_trunk is None else self.critic_trunk(features)
        return self.actor(hidden), self.critic(critic_hidden).squeeze(-1)

    def act(self, obs: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Sample actions.

        Args:
            obs: `[n, ...]`.
            noise: `[n, num_draws]`, uniform in (0, 1).

        Returns:
            `action` (as stored in a fragment), `log_prob` `[n]` and `value` `[n]`.
        """
        params, value = self(obs)
        action, log_prob = self.head.sample(params, noise)
        return {"action": action, "log_prob": log_prob, "value": value}

    def act_greedily(self, obs: Tensor) -> Tensor:
        """The likeliest action for each of `[n, ...]` observations."""
        hidden = self.actor_trunk(self._normalized(obs))
        return self.head.mode(self.actor(hidden))

    def evaluate(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value of `action` in `obs`: `[...]` each."""
        params, value = self(obs)
        log_prob, entropy = self.head.evaluate(params, action)
        return log_prob, entropy, value

    def value(self, obs: Tensor) -> Tensor:
        """V(s) for `[..., ]` observations."""
        features = self._normalized(obs)
        trunk = self.actor_trunk if self.critic_trunk is None else self.critic_trunk
        value: Tensor = self.critic(trunk(features)).squeeze(-1)
        return value

    def scaled(self, reward: Tensor) -> Tensor:
        """The reward as the learner sees it: normalized, where that was asked for."""
        return reward if self.normalize_reward is None else self.normalize_reward(reward)


def build(spec: EnvSpec, network: Network, seed: int) -> Policy:
    """A fresh policy on the CPU, the same for the same seed whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(spec, network)
