"""Asynchronous PPO after IMPACT (Luo et al. 2020, arXiv:1912.00167).

Three policies take part: the acting policy (older weights), the target policy (the weights at the
start of the update) and the learned policy. V-trace corrects from the first to the second. The
clipped surrogate keeps the third near both. docs/appo.md explains details and metrics.
"""

from typing import ClassVar

import torch

from headrace.algos import ppo
from headrace.algos.base import Metrics, Share, UpdateContext
from headrace.algos.targets import vtrace_targets
from headrace.batch import Fragment, StoredOutputs
from headrace.configclass import NonNegative, configclass


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


# With r = π_θ / sqrt(π_acted π_target), L = E[min(r A, clip(r, 1-ε, 1+ε) A)]. This is PPO's loss;
# `update` computes what replaces π_old (Li et al. 2025, arXiv:2512.06547, with equal weights).
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
        # log sqrt(π_acted π_target)
        rows["log_prob"] = (rows["log_prob"] + rows.pop("log_prob_now")) / 2
        return clipped | ppo.epochs(rows, ctx)
