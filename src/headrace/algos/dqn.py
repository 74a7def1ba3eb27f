"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236), double (van Hasselt et al. 2016).

The settings, the loss of a minibatch, and the algorithm. docs/dqn.md explains details and metrics.
"""

import copy

import torch
from torch import Tensor, nn

from headrace.algos.base import (
    LossSpec,
    Metrics,
    Modules,
    Share,
    UpdateContext,
    mean_of,
    policy_loss,
)
from headrace.algos.off_policy import ReplayConfig, due, follow, replay_of
from headrace.algos.q_learning import QLearning, QLearningConfig, explore, value_of
from headrace.batch import Fragment, Minibatch
from headrace.configclass import PositiveInt, configclass
from headrace.models.distributions import at
from headrace.models.policy import Network, Policy
from headrace.models.q_policy import QPolicy
from headrace.replay.buffer import ReplayBuffer
from headrace.spec import EnvSpec


@configclass
class DQN(ReplayConfig, QLearningConfig):
    """Settings of DQN."""

    double_q: bool = True
    """Let the network choose the next action whose value the target network gives."""
    target_update_interval: PositiveInt = 250
    """Gradient steps between updates of the target network."""
    tau: Share = 1.0
    """Share of the network's weights in an update of the target network; 1: a copy. Small ones go
    with a target_update_interval of 1."""


def loss(policy: QPolicy, minibatch: Minibatch, cfg: DQN) -> tuple[Tensor, Metrics]:
    """Return the loss of a minibatch, and its metrics.

    Args:
        minibatch: rows of `obs, action, target, weight`.
    """
    value = value_of(policy, minibatch["obs"], minibatch["action"])
    # The error is clipped to ±1 (section "Training algorithm"): Huber's loss.
    each = nn.functional.smooth_l1_loss(value, minibatch["target"], reduction="none")
    total = (each * minibatch["weight"]).sum()
    with torch.no_grad():
        td_error = ((value - minibatch["target"]).abs() * minibatch["weight"]).sum()
        mean_value = (value * minibatch["weight"]).sum()
    return total, {"loss": total.detach(), "td_error": td_error, "mean_value": mean_value}


@torch.no_grad()
def targets(policy: nn.Module, target: nn.Module, rows: Minibatch, cfg: DQN) -> Tensor:
    """Return the targets of transitions, `[B]`."""
    # y = r + γ Q_target(s', argmax_a Q(s', a));  without double_q: the argmax of Q_target
    values = target(rows["next_obs"])[0]
    chooses = policy(rows["next_obs"])[0] if cfg.double_q else values
    future = at(values, chooses.argmax(-1))
    return torch.addcmul(rows["reward"], rows["discount"], future)


@torch.no_grad()
def priorities(policy: nn.Module, rows: Minibatch, cfg: DQN) -> Tensor:
    """Return the priorities of transitions `[B]`, |Q(s, a) - y|^α (Schaul et al. 2016, eq. 1)."""
    error: Tensor = value_of(policy, rows["obs"], rows["action"]) - rows["target"]
    return (error.abs() + 1e-6).pow(cfg.priority_alpha)


class DQNAlgorithm(QLearning[DQN]):
    """DQN: acts greedily but for epsilon, and learns from replay."""

    name, Config, data = "dqn", DQN, "replay"

    def build(
        self, policy: Policy, spec: EnvSpec, network: Network, config: DQN, num_rows: int
    ) -> Modules:
        target = copy.deepcopy(policy).requires_grad_(False)
        target.normalize_obs = policy.normalize_obs  # the same input for both
        replay = ReplayBuffer(
            spec, config.replay_size, num_rows, prioritized=config.priority_alpha > 0
        )
        return {"policy": policy, "target": target, "replay": replay}

    def losses(self, modules: Modules, config: DQN) -> dict[str, LossSpec]:
        return policy_loss(loss, modules, config)

    def minibatch_rows(self, run: object, config: DQN) -> int:
        return config.batch_size

    def update(self, source: Fragment, ctx: UpdateContext[DQN]) -> Metrics:
        cfg, policy, target = ctx.config, ctx.modules["policy"], ctx.modules["target"]
        replay = replay_of(ctx)
        replay.insert(source)
        seen: list[Metrics] = []
        for step, drawn, rows in due(ctx):
            rows["target"] = targets(policy, target, rows, cfg)
            if replay.priorities:
                replay.set_priorities(drawn, priorities(policy, rows, cfg))
            seen.append(ctx.step("policy", rows, ctx.lr))
            if (step + 1) % cfg.target_update_interval == 0:
                follow(target, policy, cfg.tau)
        epsilon = cfg.epsilon(ctx.progress)
        explore(ctx.policy, epsilon)
        return mean_of(seen) | {"lr": torch.tensor(ctx.lr), "epsilon": torch.tensor(epsilon)}
