"""What algorithms learn towards: advantages, value targets, and the weight of each row.

Left out: losses (the algorithms' pages), and the recursion itself (`returns.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch, Obs, each
from headrace.models.normalize import merged
from headrace.models.policy import Policy
from headrace.ranks import Ranks
from headrace.returns import gae, vtrace


@torch.no_grad()
def advantages(policy: Policy, batch: Fragment, gamma: float, gae_lambda: float) -> Minibatch:
    """Advantages and value targets for every step of a batch.

    Returns:
        Rows `[T * N, ...]`: `obs, action, value, advantage, target, valid`.
    """
    value = batch.policy_out["value"]
    advantage = gae(
        policy.scaled(batch.reward), value, _next_value(policy, batch, value),
        batch.terminated, batch.truncated, gamma, gae_lambda,
    )  # fmt: skip
    return _rows_of(batch, value=value, advantage=advantage, target=advantage + value)


def _next_value(policy: Policy, batch: Fragment, value: Tensor) -> Tensor:
    """The value of the true next observation: the next row's, or the final one's of a cut episode.

    Args:
        policy: for the rows that `value` does not have.
        batch: `[T, N]`.
        value: `[T, N]`.
    """
    last = policy.value(each(lambda o: o[-1], batch.obs))
    next_value = torch.cat([value[1:], last.unsqueeze(0)])
    final_obs, step, row = batch.finals()
    if len(step):
        next_value[step, row] = policy.value(final_obs)
    return next_value


def _rows_of(batch: Fragment, **more: Tensor) -> Minibatch:
    """The rows of a batch, flattened, with more columns `[T, N]`."""
    obs: Obs = each(lambda o: o[:-1].flatten(0, 1), batch.obs)
    rows = {"action": batch.action, "valid": batch.valid} | more
    return {"obs": obs, **{name: tensor.flatten(0, 1) for name, tensor in rows.items()}}


@torch.no_grad()
def corrected(
    policy: Policy,
    batch: Fragment,
    gamma: float,
    gae_lambda: float,
    rho_clip: float,
    c_clip: float,
    ranks: Ranks,
) -> tuple[Minibatch, dict[str, Tensor]]:
    """Advantages and value targets of `policy` as it is now, whichever versions of it have acted.

    By V-trace: see `returns.vtrace`, for the arguments too.

    Returns:
        Rows `[T * N, ...]`: `obs, action, value, advantage, target, valid`, `log_prob` (of who
        acted) and `log_prob_now`; and as metrics the shares of valid rows, over all ranks, whose
        ratio was clipped.
    """
    acted = batch.policy_out["log_prob"]
    log_prob, _, value = policy.evaluate(each(lambda o: o[:-1], batch.obs), batch.action)
    log_ratio = log_prob - acted
    found = vtrace(
        log_ratio, policy.scaled(batch.reward), value, _next_value(policy, batch, value),
        batch.terminated, batch.truncated, gamma, gae_lambda, rho_clip, c_clip,
    )  # fmt: skip
    rows = _rows_of(
        batch, value=value, advantage=found.advantage, target=found.target,
        log_prob=acted, log_prob_now=log_prob,
    )  # fmt: skip
    ratio = log_ratio.exp()
    clipped = torch.stack([ratio > rho_clip, ratio > c_clip, torch.ones_like(batch.valid)])
    counts = ranks.gather((clipped & batch.valid).sum((1, 2)).float()).sum(0)
    rho, c = counts[:2] / counts[2].clamp(min=1)
    return rows, {"rho_clip_fraction": rho, "c_clip_fraction": c}


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of an update, as far as they are made at once: all that is one number a row.

    Wider columns (observations, some actions) are picked when a minibatch's turn comes.
    """

    rows: Minibatch
    index: Tensor | None
    narrow: dict[str, tuple[Tensor, ...]]

    def __getitem__(self, number: int) -> Minibatch:
        """Minibatch `number` of the update."""
        picked = {
            name: each(lambda part: _rows(part, self.index, number), part)
            for name, part in self.rows.items()
            if name not in self.narrow
        }
        return picked | {name: of[number] for name, of in self.narrow.items()}


def minibatches(
    rows: Minibatch, index: Tensor | None, ranks: Ranks, *, normalize_advantage: bool
) -> Minibatches:
    """Cut rows into minibatches: the valid ones weighted equally, advantages normalized if wanted.

    The number of valid rows and the moments of the advantages are those over all ranks, in one
    exchange for all minibatches (Chan, Golub, LeVeque 1979).

    Args:
        rows: as `advantages` gives them, and more.
        index: `[minibatches, rows of each]`; None: one minibatch of all rows.
        ranks: of the job.
        normalize_advantage: to mean 0 and deviation 1.

    Returns:
        The rows without `valid`, and with `weight`: the weights of all ranks add up to their
        number, so that the mean over ranks is one over rows.
    """
    columns = {name: c for name, c in rows.items() if name != "obs" and c.dim() == 1}
    if index is None:
        narrow = {name: column.unsqueeze(0) for name, column in columns.items()}
    else:
        flat = index.flatten()
        narrow = {n: c.index_select(0, flat).view(index.shape) for n, c in columns.items()}
    advantage = narrow["advantage"]
    valid = narrow.pop("valid").to(advantage.dtype)
    count = valid.sum(-1)
    share = valid / count.clamp(min=1).unsqueeze(-1)
    mean = (advantage * share).sum(-1)
    variance = ((advantage - mean.unsqueeze(-1)).square() * share).sum(-1)
    count, mean, variance = merged(ranks.gather(torch.stack([count, mean, variance]))).unsqueeze(-1)
    narrow["weight"] = valid * ranks.size / count.clamp(min=1)
    if normalize_advantage:
        narrow["advantage"] = (advantage - mean) / (variance.sqrt() + 1e-8)
    wide = {name: part for name, part in rows.items() if name not in columns}
    return Minibatches(wide, index, {name: part.unbind() for name, part in narrow.items()})


def _rows(column: Tensor, index: Tensor | None, number: int) -> Tensor:
    return column if index is None else column.index_select(0, index[number])


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
