"""Asynchronous PPO, as IMPACT has it (Luo et al. 2020, arXiv:1912.00167), on one page.

PPO whose samplers need not wait for it. Three policies take part: the one that acted (whichever
version of the weights a step is stamped with), the *target* policy (the weights at the start of the
update) and the one that is being learned. V-trace corrects from the first to the second, the
clipped surrogate keeps the third near the second. From top to bottom: the settings, the loss, and
the update. Details and metrics are in docs/appo.md. Left out: collecting
(`collectors/asynchronous.py`), `backward` (`optimizer.py`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.algos import ppo
from headrace.algos.targets import vtrace_targets
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import configclass
from headrace.distributed.ranks import Ranks
from headrace.models.policy import Policy


@configclass
class APPO(ppo.PPO):
    """Settings of APPO: those of PPO, and V-trace's."""

    gae_lambda: float = 0.95
    """Decay of V-trace's traces."""
    rho_clip: float = 1.0
    """Ratios of probabilities are cut off here in temporal differences and advantages."""
    c_clip: float = 1.0
    """Ratios are cut off here in V-trace's traces."""
    adam_eps: float = 1e-3
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""
    is_clip: float = 2.0
    """How many times as likely an action may have been to who acted as to the target policy before
    its weight is cut down."""


CORRECTS_LAG = True
"""Whether it may learn from what older weights did, however old."""
STORED_OUTPUTS: StoredOutputs = {"log_prob": ((), torch.float32)}

# With r = min(π_acted / π_target, is_clip) π_θ / π_acted, L = E[min(r A, clip(r, 1-ε, 1+ε) A)]
# (section 3.1): it is PPO's, over a policy in place of π_old that `update` works out.
loss = ppo.loss


def update(
    policy: Policy,
    descend: Callable[[Minibatch, float], dict[str, Tensor]],
    batch: Fragment,
    cfg: APPO,
    *,
    ranks: Ranks,
    progress: float,
    orders: Callable[[int], Tensor],
) -> dict[str, Tensor]:
    """Learn from one batch: targets once, then `num_epochs` passes in minibatches.

    Args:
        policy: the policy that is being learned.
        descend: takes one step down the gradient of `loss` of a minibatch, at a learning rate, and
            gives the loss's metrics and the gradient's norm (`Optimizer.step`).
        batch: `[T, N]` of experience, of this policy's weights or older ones.
        cfg: settings.
        ranks: of the job.
        progress: share of the schedules that has passed, in [0, 1].
        orders: as `ppo.update` has it.

    Returns:
        Metrics as scalars on the device: means over the update's minibatches.
    """
    rows, clipped = vtrace_targets(
        policy, batch, cfg.gamma, cfg.gae_lambda, cfg.rho_clip, cfg.c_clip, ranks
    )
    # r = π_θ / max(π_target, π_acted / is_clip)
    acted, target = rows["log_prob"], rows.pop("log_prob_now")
    rows["log_prob"] = torch.maximum(target, acted - math.log(cfg.is_clip))
    return clipped | ppo.epochs(rows, descend, cfg, ranks, progress, orders)
