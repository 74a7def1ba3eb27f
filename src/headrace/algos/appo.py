"""Asynchronous PPO after IMPACT (Luo et al. 2020, arXiv:1912.00167).

Three policies take part: the acting policy (older weights), the target policy (the weights at the
start of the update) and the learned policy. V-trace corrects from the first to the second. The
clipped surrogate keeps the third near the second. docs/appo.md explains details and metrics.
"""

import math
from typing import Annotated, ClassVar

import torch

from headrace.algos import ppo
from headrace.algos.base import Metrics, Share, UpdateContext
from headrace.algos.targets import vtrace_targets
from headrace.batch import Fragment, StoredOutputs
from headrace.configclass import Between, NonNegative, configclass


@configclass
class APPO(ppo.PPO):
    """Settings of APPO: those of PPO, and V-trace's."""

    gae_lambda: Share = 0.95
    """Decay of V-trace's traces."""
    rho_clip: NonNegative = 0.0
    """Ratios of probabilities are cut off here in temporal differences and advantages. 0: each
    counts as 1, for data that is little older than the policy."""
    c_clip: NonNegative = 0.0
    """Ratios are cut off here in V-trace's traces. 0: each counts as 1."""
    is_clip: Annotated[float, Between(1)] = 2.0
    """Before its weight is cut down, how many times likelier an action may have been for the
    policy that acted than for the target policy."""


# With r = min(π_acted / π_target, is_clip) π_θ / π_acted, L = E[min(r A, clip(r, 1-ε, 1+ε) A)]
# (section 3.1). This is PPO's loss; `update` computes what replaces π_old.
loss = ppo.loss


class APPOAlgorithm(ppo.PPOAlgorithm):
    """APPO: PPO's epochs over V-trace targets, on data of older weights."""

    name, Config, data, asynchronous_form = "appo", APPO, "lag_corrected", ""
    stored_outputs: ClassVar[StoredOutputs] = {"log_prob": ((), torch.float32)}

    def update(self, source: Fragment, ctx: UpdateContext[APPO]) -> Metrics:  # type: ignore[override]
        cfg = ctx.config
        rows, clipped = vtrace_targets(
            ctx.policy, source, cfg.gamma, cfg.gae_lambda, cfg.rho_clip, cfg.c_clip, ctx.ranks
        )
        # r = π_θ / max(π_target, π_acted / is_clip)
        acted, target = rows["log_prob"], rows.pop("log_prob_now")
        rows["log_prob"] = torch.maximum(target, acted - math.log(cfg.is_clip))
        return clipped | ppo.epochs(rows, ctx)
