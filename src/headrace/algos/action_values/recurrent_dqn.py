"""The losses of DQN with a recurrent core.

R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX), without its scaling of
values. Left out: settings and algorithm (`dqn.py`).
"""

from typing import Any

import torch
from torch import Tensor

from headrace.algos.action_values.q_learning import loss_of_outputs, of_action
from headrace.algos.base import Metrics
from headrace.algos.sequences import sequence_of
from headrace.batch import Minibatch, each
from headrace.models.action_values.q_policy import QPolicy


def loss(policy: QPolicy, minibatch: Minibatch, cfg: Any) -> tuple[Tensor, Metrics]:
    """Return the loss of sequences, and its metrics, as `dqn.loss`.

    Args:
        minibatch: of `SequenceBuffer.sequences`, and `targets`, of their rows.
    """
    outputs = policy.outputs_of_sequence(*sequence_of(minibatch), cfg.burn_in)
    learned = outputs[: cfg.sequence_length].flatten(0, 1)
    return loss_of_outputs(
        policy.returns, of_action(learned, minibatch["action"].flatten()), minibatch
    )


@torch.no_grad()
def targets(rows: Minibatch, *, policy: QPolicy, target: QPolicy, cfg: Any) -> Minibatch:
    """Return the targets of the rows of sequences, as `dqn.targets`, `[length * B, ...]`."""
    sequence = sequence_of(rows)
    outputs = target.outputs_of_sequence(*sequence, cfg.burn_in)
    own = policy.outputs_of_sequence(*sequence, cfg.burn_in) if cfg.double_q else outputs
    obs = each(lambda o: o[cfg.burn_in :], rows["obs"])
    after = of_action(outputs.flatten(0, 1), policy.best(own, obs).flatten())
    column = torch.arange(len(rows["state"]), device=outputs.device)
    next_row = rows["next_row"], column
    after = after.view(*outputs.shape[:2], after.shape[-1])[next_row].flatten(0, 1)
    is_worth = policy.if_any_is_allowed(torch.ones_like(outputs[..., 0, 0]), obs)[next_row]
    reward, discount = rows["reward"].flatten(), (rows["discount"] * is_worth).flatten()
    return target.returns.target(after, reward, discount)
