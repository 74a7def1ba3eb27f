"""What PPO and A2C learn towards: advantages, value targets, and the weight of each row.

Left out: losses (the algorithms' pages), and the recursion itself (`returns.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch, Obs, each
from headrace.models.normalize import merged
from headrace.models.policy import Policy
from headrace.ranks import Ranks
from headrace.returns import gae


@torch.no_grad()
def advantages(policy: Policy, batch: Fragment, gamma: float, gae_lambda: float) -> Minibatch:
    """Advantages and value targets for every step of a batch.

    Returns:
        Rows `[T * N, ...]`: `obs, action, value, advantage, target, valid`.
    """
    value = batch.policy_out["value"]
    # The value of the true next observation: the next row's, or of the final one of a cut episode.
    last = policy.value(each(lambda o: o[-1], batch.obs))
    next_value = torch.cat([value[1:], last.unsqueeze(0)])
    final_obs, step, row = batch.finals()
    if len(step):
        next_value[step, row] = policy.value(final_obs)
    advantage = gae(
        policy.scaled(batch.reward), value, next_value, batch.terminated, batch.truncated,
        gamma, gae_lambda,
    )  # fmt: skip
    rows = {
        "action": batch.action,
        "value": value,
        "advantage": advantage,
        "target": advantage + value,
        "valid": batch.valid,
    }
    obs: Obs = each(lambda o: o[:-1].flatten(0, 1), batch.obs)
    return {"obs": obs, **{name: tensor.flatten(0, 1) for name, tensor in rows.items()}}


@dataclass(frozen=True)
class Picked:
    """Rows of one minibatch, as `minibatches` prepares them; scalars are over all ranks."""

    index: Tensor | slice
    num_valid: Tensor
    mean: Tensor
    variance: Tensor


def minibatches(rows: Minibatch, indices: Sequence[Tensor | slice], ranks: Ranks) -> list[Picked]:
    """The number of valid rows of each minibatch and the moments of their advantages.

    Over all ranks, in one exchange for all minibatches of an update (Chan, Golub, LeVeque 1979).
    """
    moments = []
    for index in indices:
        valid = rows["valid"][index].to(rows["advantage"].dtype)
        advantage, count = rows["advantage"][index], valid.sum()
        weight = valid / count.clamp(min=1)
        mean = (advantage * weight).sum()
        moments.append(torch.stack([count, mean, ((advantage - mean).square() * weight).sum()]))
    count, mean, variance = merged(ranks.gather(torch.stack(moments, -1)))
    scalars = zip(count.unbind(), mean.unbind(), variance.unbind(), strict=True)
    return [Picked(index, *of) for index, of in zip(indices, scalars, strict=True)]


def pick(rows: Minibatch, of: Picked, ranks: Ranks, *, normalize_advantage: bool) -> Minibatch:
    """The rows of a minibatch; the valid ones weighted equally, advantages normalized if asked for.

    Returns:
        The rows without `valid`, and with `weight`: the weights of all ranks add up to their
        number, so that the mean over ranks is one over rows.
    """
    picked: Minibatch = {
        name: each(lambda part: part[of.index], part) for name, part in rows.items()
    }
    valid = picked.pop("valid").to(of.num_valid.dtype)
    picked["weight"] = valid * ranks.size / of.num_valid.clamp(min=1)
    if normalize_advantage:
        picked["advantage"] = (picked["advantage"] - of.mean) / (of.variance.sqrt() + 1e-8)
    return picked


def quality(rows: Minibatch, ranks: Ranks) -> dict[str, Tensor]:
    """How good the values that acted were, over the valid rows of all ranks: metrics."""
    value, target = rows["value"], rows["target"]
    both = torch.stack([value, target, target - value])
    # By weights: picking the valid rows would make the host wait for the device.
    valid = rows["valid"].to(value.dtype)
    count = valid.sum()
    weight = valid / count.clamp(min=1)
    mean = (both * weight).sum(-1)
    variance = ((both - mean.unsqueeze(-1)).square() * weight).sum(-1)
    moments = torch.stack([count.expand(3), mean, variance])
    _, mean, variance = merged(ranks.gather(moments))
    return {"explained_variance": 1 - variance[2] / variance[1], "mean_value": mean[0]}
