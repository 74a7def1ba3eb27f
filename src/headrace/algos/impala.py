"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561), on one page.

An actor-critic whose samplers need not wait for it: what older weights did is corrected for by
V-trace. From top to bottom: the settings, what the policy must store with each step, the loss, and
the update: targets, then one step down the gradient of the whole batch. Details and metrics are in
docs/impala.md. Left out: collecting (`collectors/asynchronous.py`), `backward` (`optimizer.py`).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from headrace.algos import a2c
from headrace.algos.targets import minibatches, value_metrics, vtrace_targets
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import configclass
from headrace.distributed.ranks import Ranks
from headrace.models.policy import Policy


@configclass
class IMPALA:
    """Settings of IMPALA."""

    lr: float = 2e-3
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate, or let it fall to 0 over schedule_env_steps."""
    gamma: float = 0.99
    """Discount per env step."""
    gae_lambda: float = 1.0
    """Decay of V-trace's traces; 1: the n-step targets of the paper."""
    rho_clip: float = 1.0
    """Ratios of probabilities are cut off here in temporal differences and advantages."""
    c_clip: float = 1.0
    """Ratios are cut off here in V-trace's traces."""
    normalize_advantage: bool = False
    """Give the advantages of each batch mean 0 and deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients longer than this (L2) are shortened to it."""
    adam_eps: float = 3e-3
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""


CORRECTS_LAG = True
"""Whether it may learn from what older weights did, however old."""
STORED_OUTPUTS: StoredOutputs = {"log_prob": ((), torch.float32)}

# L = -E[log π_θ(a|s) ρ (r + γ v' - V)] + value and entropy terms (section 4.2): with V-trace's
# advantages and targets, which hold the ratio, it is A2C's.
loss = a2c.loss


def update(
    policy: Policy,
    descend: Callable[[Minibatch, float], dict[str, Tensor]],
    batch: Fragment,
    cfg: IMPALA,
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
        batch: `[T, N]` of experience, of this policy's weights or older ones.
        cfg: settings.
        ranks: of the job.
        progress: share of the schedules that has passed, in [0, 1].
        orders: not used.

    Returns:
        Metrics as scalars on the device.
    """
    lr = cfg.lr * (1 - progress if cfg.lr_schedule == "linear" else 1.0)
    rows, clipped = vtrace_targets(
        policy, batch, cfg.gamma, cfg.gae_lambda, cfg.rho_clip, cfg.c_clip, ranks
    )
    whole = minibatches(rows, None, ranks, normalize_advantage=cfg.normalize_advantage)[0]
    metrics = descend(whole, lr)
    return metrics | clipped | value_metrics(rows, ranks) | {"lr": torch.tensor(lr)}
