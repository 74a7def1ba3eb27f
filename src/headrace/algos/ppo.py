"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347), whole, on one page.

From top to bottom: the settings, what the policy must store with each step, the loss of one
minibatch, and the update (advantages, then epochs of minibatches). Each implementation detail is
numbered and sourced in docs/ppo.md. Left out: collecting (`collect/`), `backward` (`optimizer.py`).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from headrace.algos.targets import advantages, cuts, minibatches, value_metrics
from headrace.batch import Fragment, Minibatch, StoredOutputs
from headrace.configclass import configclass
from headrace.distributed.ranks import Ranks
from headrace.models.policy import Policy


@configclass
class PPO:
    """Settings of PPO."""

    lr: float = 3e-4
    """Learning rate of Adam."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """Keep the learning rate, or let it fall to 0 over schedule_env_steps."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 4
    """Minibatches per epoch; must divide num_steps (with a recurrent core: num_envs)."""
    gamma: float = 0.99
    """Discount per env step."""
    gae_lambda: float = 0.95
    """Decay of the advantage trace."""
    clip_coef: float = 0.2
    """Distance from 1 at which the probability ratio is clipped."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """Keep clip_coef, or let it fall to 0 over schedule_env_steps."""
    clip_value_loss: bool = False
    """Clip the value's change by clip_coef as well."""
    normalize_advantage: bool = True
    """Give the advantages of each minibatch mean 0 and deviation 1."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients longer than this (L2) are shortened to it."""
    adam_eps: float = 1e-5
    """Added to Adam's root mean square of each gradient: well below it, steps are smaller."""
    target_kl: float = 0.0
    """Stop the epochs of an update once the mean KL of one exceeds this (nats; 0: never)."""


CORRECTS_LAG = False
"""Whether it may learn from what older weights did, however old."""
STORED_OUTPUTS: StoredOutputs = {"log_prob": ((), torch.float32), "value": ((), torch.float32)}


def loss(policy: Policy, minibatch: Minibatch, cfg: PPO) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one minibatch, and what to report of it; pure.

    Args:
        policy: the policy that is being learned.
        minibatch: rows of `obs, action, log_prob, value, advantage, target`, each row's `weight`
            (they add up to 1 over all valid rows of all ranks, times the number of ranks), and the
            scalar `clip_coef` of this update. With a recurrent core the rows are sequences of
            several envs, with `reset` for each row and `state` for each env (`Policy.forward`).
        cfg: settings.
    """
    weight, clip = minibatch["weight"], minibatch["clip_coef"]
    memory = (minibatch["state"], minibatch["reset"]) if "state" in minibatch else ()
    log_prob, entropy, value = policy.evaluate(minibatch["obs"], minibatch["action"], *memory)

    # r_t(θ) = π_θ(a|s) / π_old(a|s);  L = E[min(r A, clip(r, 1-ε, 1+ε) A)]  (eq. 7)
    log_ratio = log_prob - minibatch["log_prob"]
    ratio = log_ratio.exp()
    advantage = minibatch["advantage"]
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    policy_loss = -(surrogate * weight).sum()

    squared_error = (value - minibatch["target"]).square()
    if cfg.clip_value_loss:
        near = minibatch["value"] + (value - minibatch["value"]).clamp(-clip, clip)
        squared_error = torch.max(squared_error, (near - minibatch["target"]).square())
    value_loss = 0.5 * (squared_error * weight).sum()
    mean_entropy = (entropy * weight).sum()

    total = policy_loss + cfg.vf_coef * value_loss - cfg.ent_coef * mean_entropy
    with torch.no_grad():
        metrics = {
            "loss": total,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": mean_entropy,
            # The estimator of KL(old || new) that is never negative: http://joschu.net/blog/kl-approx
            "approx_kl": ((ratio - 1 - log_ratio) * weight).sum(),
            "clip_fraction": (((ratio - 1).abs() > clip) * weight).sum(),
        }
    return total, {name: value.detach() for name, value in metrics.items()}


def update(
    policy: Policy,
    descend: Callable[[Minibatch, float], dict[str, Tensor]],
    batch: Fragment,
    cfg: PPO,
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
        batch: `[T, N]` of experience.
        cfg: settings.
        ranks: of the job.
        progress: share of the schedules that has passed, in [0, 1].
        orders: number of epochs E -> `[E, T, N]`: permutations of the steps of each env; with a
            recurrent core `[E, N]`: the place of each env among those of all ranks.

    Returns:
        Metrics as scalars on the device: means over the update's minibatches.
    """
    rows = advantages(policy, batch, cfg.gamma, cfg.gae_lambda)
    rows["log_prob"] = batch.stored_outputs["log_prob"].flatten()
    return epochs(rows, descend, cfg, ranks, progress, orders)


def epochs(
    rows: Minibatch,
    descend: Callable[[Minibatch, float], dict[str, Tensor]],
    cfg: PPO,
    ranks: Ranks,
    progress: float,
    orders: Callable[[int], Tensor],
) -> dict[str, Tensor]:
    """`num_epochs` passes over rows that have all that `loss` needs, and `valid`; see `update`."""
    lr = cfg.lr * (1 - progress if cfg.lr_schedule == "linear" else 1.0)
    clip_coef = cfg.clip_coef * (1 - progress if cfg.clip_schedule == "linear" else 1.0)
    clip = torch.tensor(clip_coef, device=rows["advantage"].device)
    cut = cuts(rows, orders(cfg.num_epochs), cfg.num_minibatches, ranks)
    picked = minibatches(rows, cut, ranks, normalize_advantage=cfg.normalize_advantage)
    seen: list[dict[str, Tensor]] = []

    for epoch in range(cfg.num_epochs):
        first = epoch * cfg.num_minibatches
        numbers = range(first, first + cfg.num_minibatches)
        seen += [descend(picked[number] | {"clip_coef": clip}, lr) for number in numbers]
        if cfg.target_kl:
            kl = ranks.gather(_mean(seen[first:], "approx_kl")).mean()
            if kl > cfg.target_kl:
                break

    return (
        {name: _mean(seen, name) for name in seen[0]}
        | value_metrics(rows, ranks)
        | {
            "lr": torch.tensor(lr),
            "clip_coef": clip,
            "num_epochs": torch.tensor(float(epoch + 1)),
        }
    )


def _mean(metrics: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([m[name] for m in metrics]).mean()
