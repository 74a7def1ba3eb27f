"""Parallelised Q-learning (Gallici et al. 2024, arXiv:2407.04811): no replay, no target network.

The settings, the loss of a minibatch, and the algorithm. docs/pqn.md explains details and metrics.
"""

from typing import ClassVar

import torch
from torch import Tensor

from headrace.algos.action_values.q_learning import QLearning, QLearningConfig, explore, value_of
from headrace.algos.base import (
    Divides,
    EpochsConfig,
    LossSpec,
    Metrics,
    Modules,
    Share,
    Sizes,
    UpdateContext,
    epoch_divides,
    mean_of,
    policy_loss,
)
from headrace.algos.schedules import Schedule
from headrace.algos.targets import advantages, cuts, minibatches, value_metrics
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import NonNegative, configclass
from headrace.models.action_values.q_policy import QPolicy
from headrace.models.policy import Network


@configclass
class PQN(EpochsConfig, QLearningConfig):
    """Settings of PQN."""

    lr: NonNegative = 2.5e-4
    lr_schedule: Schedule = "linear"
    q_lambda: Share = 0.65
    """Decay of the trace of later rewards; 0: targets look one step ahead."""
    exploration_fraction: Share = 0.5
    layer_norm: bool = True


def loss(policy: QPolicy, minibatch: Minibatch, cfg: PQN) -> tuple[Tensor, Metrics]:
    """Return the loss of a minibatch, and its metrics.

    Args:
        minibatch: rows of `obs, action, target, weight`. The weights of all ranks add up to the
            number of ranks.
    """
    # L = E[(Q_θ(s, a) - G)²]  (algorithm 1)
    error = value_of(policy, minibatch["obs"], minibatch["action"]) - minibatch["target"]
    error = error.masked_fill(minibatch["weight"] == 0, 0.0)  # a mask may allow nothing there
    total = (error.square() * minibatch["weight"]).sum()
    with torch.no_grad():
        td_error = (error.abs() * minibatch["weight"]).sum()
    return total, {"loss": total.detach(), "td_error": td_error}


class PQNAlgorithm(QLearning[PQN]):
    """PQN: `num_epochs` passes over each batch, towards its λ-returns."""

    name, Config = "pqn", PQN
    stored_outputs: ClassVar[StoredOutputs] = {"value": ((), torch.float32)}

    def losses(self, modules: Modules, config: PQN) -> dict[str, LossSpec]:
        return policy_loss(loss, modules, config)

    def divides(self, run: Sizes, network: Network, config: PQN) -> list[Divides]:
        return epoch_divides(run, network, config)

    def minibatch_rows(self, run: Sizes, config: PQN) -> int:
        return run.num_envs * run.num_steps // config.num_minibatches

    def update(self, source: Fragment, ctx: UpdateContext[PQN]) -> Metrics:
        cfg = ctx.config
        # G_t = r_t + γ [(1 - λ) max_a Q(s_{t+1}, a) + λ G_{t+1}]: a λ-return of the policy's value,
        # max_a Q, which is what GAE adds to that value.
        rows = advantages(ctx.policy, source, cfg.gamma, cfg.q_lambda)
        cut = cuts(rows, ctx.minibatch_order(cfg.num_epochs), cfg.num_minibatches, ctx.ranks)
        picked = minibatches(rows, cut, ctx.ranks, normalize_advantage=False)
        numbers = range(cfg.num_epochs * cfg.num_minibatches)
        seen = [ctx.step("policy", picked[i], ctx.config.lr) for i in numbers]
        epsilon = cfg.epsilon(ctx.progress)
        explore(ctx.policy, epsilon)
        return (
            mean_of(seen)
            | value_metrics(rows, ctx.ranks)
            | {"lr": torch.tensor(ctx.config.lr), "epsilon": torch.tensor(epsilon)}
        )
