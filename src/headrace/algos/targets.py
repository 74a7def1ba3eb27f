"""What PPO and A2C learn towards: advantages, value targets, and the weight of each row.

Left out: losses (the algorithms' pages), and the recursion itself (`returns.py`).
"""

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch, Obs, each
from headrace.models.policy import Policy
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


def pick(rows: Minibatch, index: Tensor | slice, *, normalize_advantage: bool) -> Minibatch:
    """Some of the rows; the valid ones weighted equally, their advantages normalized if asked for.

    Returns:
        The rows without `valid`, and with `weight`, which adds up to 1.
    """
    picked: Minibatch = {name: each(lambda part: part[index], part) for name, part in rows.items()}
    valid = picked.pop("valid").float()
    picked["weight"] = weight = valid / valid.sum()
    if normalize_advantage:
        advantage = picked["advantage"]
        mean = (advantage * weight).sum()
        deviation = ((advantage - mean).square() * weight).sum().sqrt()
        picked["advantage"] = (advantage - mean) / (deviation + 1e-8)
    return picked


def quality(rows: Minibatch) -> dict[str, Tensor]:
    """How good the values that acted were, over the valid rows: metrics."""
    # By weights: picking the valid rows would make the host wait for the device.
    weight: Tensor = rows["valid"].float() / rows["valid"].sum()

    def variance(x: Tensor) -> Tensor:
        return ((x - (x * weight).sum()).square() * weight).sum()

    value: Tensor = rows["value"]
    target: Tensor = rows["target"]
    return {
        "explained_variance": 1 - variance(target - value) / variance(target),
        "mean_value": (value * weight).sum(),
    }
