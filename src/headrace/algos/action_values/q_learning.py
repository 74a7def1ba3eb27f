"""What algorithms have in common that learn the values of actions: settings, policy, exploration.

Left out: targets, and the data that is learned from (`pqn.py`, `dqn.py`).
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headrace.algos.base import Algorithm, AlgorithmConfig, Metrics, Share, mean_over_rows
from headrace.batch import Minibatch
from headrace.configclass import NonNegative, configclass
from headrace.errors import ConfigError
from headrace.models.action_values.q_policy import QPolicy
from headrace.models.action_values.value_distributions import ValueDistribution
from headrace.models.custom import ModelFactory
from headrace.models.distributions import at
from headrace.models.policy import Network, Policy
from headrace.spec import EnvSpec


@configclass
class QLearningConfig(AlgorithmConfig):
    """Settings of algorithms that learn the values of actions."""

    max_grad_norm: NonNegative = 10.0
    exploration_initial_eps: Share = 1.0
    """Probability of a random action (epsilon) at the start."""
    exploration_final_eps: Share = 0.05
    """Epsilon after the exploration_fraction. Evaluations take the best action."""
    exploration_fraction: Share = 0.1
    """Share of schedule_env_steps in which epsilon falls linearly from its first to its last."""
    layer_norm: bool = False
    """Apply layer normalization before each activation, and group normalization in convolutions.
    Networks of one's own have none."""
    dueling: bool = False
    """Sum the values of actions up from the observation's value and each action's advantage."""

    def epsilon(self, progress: float) -> float:
        """Return epsilon after a share `progress` of the run's schedules."""
        first, last, share = (
            self.exploration_initial_eps,
            self.exploration_final_eps,
            self.exploration_fraction,
        )
        return first + (last - first) * (min(1.0, progress / share) if share else 1.0)


ConfigT = TypeVar("ConfigT", bound=QLearningConfig)


class QLearning(Algorithm[ConfigT]):
    """The base class of algorithms that learn the values of actions."""

    def check(self, spec: EnvSpec) -> None:
        if spec.action.kind != "discrete":
            raise ConfigError(
                f"algo={self.name!r} learns a value for each action: expected a Discrete action "
                f"space, but that of {spec.id} is {spec.action.describe()}.\nUse --algo ppo, for "
                "example."
            )

    def build_policy(
        self, spec: EnvSpec, network: Network, config: ConfigT, model: ModelFactory | None = None
    ) -> Policy:
        return q_policy(spec, network, config, model)


def q_policy(
    spec: EnvSpec,
    network: Network,
    config: QLearningConfig,
    model: ModelFactory | None,
    returns: ValueDistribution | None = None,
    *,
    noisy: bool = False,
) -> QPolicy:
    """Build a policy that acts by values of actions; `returns` and `noisy` as in `QNetwork`."""
    return QPolicy(
        spec, network, model, returns,
        epsilon=config.exploration_initial_eps,
        layer_norm=config.layer_norm,
        dueling=config.dueling,
        noisy=noisy,
    )  # fmt: skip


def of_action(outputs: Tensor, action: Tensor) -> Tensor:
    """Return the outputs `[B, K]` of actions `[B]`, of those of all actions `[B, A, K]`."""
    at_action = action.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])
    return outputs.gather(-2, at_action).squeeze(-2)


def loss_of_outputs(
    of: ValueDistribution, outputs: Tensor, minibatch: Minibatch
) -> tuple[Tensor, Metrics]:
    """Return `dqn.loss` from the outputs `[B, K]` of the minibatch's actions."""
    target, weight = minibatch["target"], minibatch["weight"]
    total = (of.loss(outputs, target) * weight).sum()
    with torch.no_grad():
        value = of.mean(outputs)
        of_rows = {"td_error": (value - minibatch["target_mean"]).abs(), "mean_value": value}
        if "clipped" in minibatch:
            of_rows["clipped_targets"] = minibatch["clipped"]
        metrics = mean_over_rows(of_rows, minibatch)
        error = of.error(outputs, minibatch)
    return total, metrics | {"loss": total.detach(), "error": error}


def value_of(policy: nn.Module, obs: Any, action: Tensor) -> Tensor:
    """Return Q(s, a) of observations and actions, `[...]`."""
    return at(policy(obs)[0], action)


def explore(policy: Policy, epsilon: float) -> None:
    """Set the probability of random actions, from the next weights on."""
    assert isinstance(policy, QPolicy)
    policy.head.epsilon.fill_(epsilon)
