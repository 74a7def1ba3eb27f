"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): an actor-critic whose workers never wait.

V-trace corrects for older weights. The settings, the loss, and the algorithm. docs/impala.md
explains details and metrics.
"""

from typing import ClassVar

import torch

from headrace.algos import a2c
from headrace.algos.base import (
    ActorCriticConfig,
    Algorithm,
    LossSpec,
    Metrics,
    Modules,
    Share,
    UpdateContext,
    policy_loss,
)
from headrace.algos.targets import vtrace_targets
from headrace.batch import Fragment, StoredOutputs
from headrace.configclass import NonNegative, configclass


@configclass
class IMPALA(ActorCriticConfig):
    """Settings of IMPALA."""

    lr: NonNegative = 2e-3
    gae_lambda: Share = 1.0
    """Decay of V-trace's traces; 1: the n-step targets of the paper."""
    rho_clip: NonNegative = 1.0
    """Ratios of probabilities are cut off here in temporal differences and advantages. 0: each
    counts as 1."""
    c_clip: NonNegative = 1.0
    """Ratios are cut off here in V-trace's traces. 0: each counts as 1."""
    adam_eps: NonNegative = 3e-3


# L = -E[log π_θ(a|s) ρ (r + γ v' - V)] + value and entropy terms (section 4.2). This is A2C's
# loss: V-trace's advantages and targets include the ratio.
loss = a2c.loss


class IMPALAAlgorithm(Algorithm[IMPALA]):
    """IMPALA: A2C's step over V-trace targets, on data of older weights."""

    name, Config, data = "impala", IMPALA, "lag_corrected"
    recurrent = True
    stored_outputs: ClassVar[StoredOutputs] = {"log_prob": ((), torch.float32)}

    def losses(self, modules: Modules, config: IMPALA) -> dict[str, LossSpec]:
        return policy_loss(loss, modules, config)

    def update(self, source: Fragment, ctx: UpdateContext[IMPALA]) -> Metrics:
        cfg = ctx.config
        rows, clipped = vtrace_targets(
            ctx.policy, source, cfg.gamma, cfg.gae_lambda, cfg.rho_clip, cfg.c_clip, ctx.ranks
        )
        return clipped | a2c.one_step(rows, ctx)
