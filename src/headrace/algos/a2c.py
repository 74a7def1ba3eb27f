"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, its synchronous form), on one page.

From top to bottom: the settings, what the policy must store with each step, the loss, and the
update: one step down the gradient of the whole batch. Details and metrics are in docs/a2c.md. Left
out: collecting (`collect/`), `backward` (`optimizer.py`).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from headrace.algos.targets import advantages, minibatches, value_metrics
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import configclass
from headrace.distributed.ranks import Ranks
from headrace.models.policy import Policy


@configclass
class A2C:
    """Settings of A2C."""

    lr: float = 7e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate, or let it fall to 0 over schedule_env_steps."""
    gamma: float = 0.99
    """Discount per env step."""
    gae_lambda: float = 1.0
    """Decay of the advantage trace; 1: the n-step returns of the paper."""
    normalize_advantage: bool = False
    """Give the advantages of each batch mean 0 and deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients longer than this (L2) are shortened to it."""
    adam_eps: float = 1e-5
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""


CORRECTS_LAG = False
"""Whether it may learn from what older weights did, however old."""
STORED_OUTPUTS: StoredOutputs = {"value": ((), torch.float32)}


def loss(policy: Policy, minibatch: Minibatch, cfg: A2C) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and what to report of it; pure.

    Args:
        policy: the policy that is being learned.
        minibatch: rows of `obs, action, advantage, target`, and each row's `weight` (they add up to
            1 over all valid rows of all ranks, times the number of ranks). With a recurrent core
            the rows are sequences, with `reset` for each row and `state` for each env.
        cfg: settings.
    """
    weight = minibatch["weight"]
    memory = (minibatch["state"], minibatch["reset"]) if "state" in minibatch else ()
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"], *memory)

    # L = -E[log π_θ(a|s) A]  (section 4 of the paper)
    policy_loss = -(log_prob * minibatch["advantage"] * weight).sum()
    value_loss = 0.5 * ((value - minibatch["target"]).square() * weight).sum()
    mean_entropy = (entropy * weight).sum()

    total = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
    metrics = {
        "loss": total,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": mean_entropy,
    }
    return total, {name: value.detach() for name, value in metrics.items()}


def update(
    policy: Policy,
    descend: Callable[[Minibatch, float], dict[str, Tensor]],
    batch: Fragment,
    cfg: A2C,
    *,
    ranks: Ranks,
    progress: float,
    orders: Callable[[int], Tensor],  # not used: one step, on all rows
) -> dict[str, Tensor]:
    """Learn from one batch: one step down the gradient over all of it.

    Args:
        policy: the policy that is being learned.
        descend: takes one step down the gradient of `loss` of a minibatch, at a learning rate, and
            gives the loss's metrics and the gradient's norm (`Optimizer.step`).
        batch: `[T, N]` of experience.
        cfg: settings.
        ranks: of the job.
        progress: share of the schedules that has passed, in [0, 1].
        orders: not used.

    Returns:
        Metrics as scalars on the device.
    """
    lr = cfg.lr * (1 - progress if cfg.lr_schedule == "linear" else 1.0)
    rows = advantages(policy, batch, cfg.gamma, cfg.gae_lambda)
    whole = minibatches(rows, None, ranks, normalize_advantage=cfg.normalize_advantage)[0]
    metrics = descend(whole, lr)
    return metrics | value_metrics(rows, ranks) | {"lr": torch.tensor(lr)}
