"""Advantages, value targets, and minibatches with row weights. `returns.py` has the recursions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch, Obs, each, stratify, whole_runs
from headrace.distributed.ranks import Ranks
from headrace.models.normalization import merged
from headrace.models.policy import Policy
from headrace.returns import gae, vtrace


@torch.no_grad()
def values(policy: Policy, batch: Fragment, acted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return V of every row of a batch, and of its true next observation: `[T, N]` each.

    They are for rewards as `Policy.scaled` has them now.

    The next observation is that of the next row, or the final one of a truncated episode. For the
    latter a recurrent core needs the state after the truncated step, from a pass over the sequence.

    Args:
        acted: `[T, N]`: values of the rows at acting; None: compute them.
    """
    final_obs, step, row = batch.finals()
    rows, last_obs = each(lambda o: o[:-1], batch.obs), each(lambda o: o[-1], batch.obs)
    last_state = final_state = None
    if policy.state_size:
        reset = batch.resets()
        computed, after = policy.values(rows, batch.recurrent_state[0], reset[:-1])
        last_state = after[batch.num_steps - 1].masked_fill(reset[-1].unsqueeze(-1), 0.0)
        if len(step):
            pairs = zip(step.clamp(max=batch.num_steps - 1).tolist(), row.tolist(), strict=True)
            final_state = torch.stack([after[t][i] for t, i in pairs])
        value = computed if acted is None else acted
    else:
        value = policy.value(rows) if acted is None else acted
    last = policy.value(last_obs, last_state).unsqueeze(0)
    # One extra row receives the unused entries of `final_obs`.
    next_value = torch.cat([value[1:], last, last])
    if len(step):
        next_value[step, row] = policy.value(final_obs, final_state)
    return policy.rescaled(value), policy.rescaled(next_value[:-1])


@torch.no_grad()
def advantages(policy: Policy, batch: Fragment, gamma: float, gae_lambda: float) -> Minibatch:
    """Compute GAE and value targets for every step of a batch.

    Returns:
        Rows `[T * N, ...]`: `obs, action, value, advantage, target, valid`; with a recurrent core
        also `reset`, and `state`, `[N, S]`: before the first row of each env.
    """
    value, next_value = values(policy, batch, batch.stored_outputs["value"])
    advantage = gae(
        policy.scaled(batch.reward), value, next_value, batch.terminated, batch.truncated,
        gamma, gae_lambda,
    )  # fmt: skip
    return _rows_of(policy, batch, value=value, advantage=advantage, target=advantage + value)


def _rows_of(policy: Policy, batch: Fragment, **more: Tensor) -> Minibatch:
    """Flatten a batch to rows, with more columns `[T, N]`."""
    obs: Obs = each(lambda o: o[:-1].flatten(0, 1), batch.obs)
    rows = {"action": batch.action, "valid": batch.valid} | more
    flat = {"obs": obs, **{name: tensor.flatten(0, 1) for name, tensor in rows.items()}}
    if policy.state_size:
        flat |= {"reset": batch.resets()[:-1].flatten(), "state": batch.recurrent_state[0]}
    return flat


@torch.no_grad()
def vtrace_targets(
    policy: Policy,
    batch: Fragment,
    gamma: float,
    gae_lambda: float,
    rho_clip: float,
    c_clip: float,
    ranks: Ranks,
) -> tuple[Minibatch, dict[str, Tensor]]:
    """Compute V-trace advantages and value targets of the current policy (`returns.vtrace`).

    Returns:
        Rows as those of `advantages`, with `log_prob` (at acting) and `log_prob_now`; and metrics:
        the shares of valid rows, over all ranks, whose ratio was clipped.
    """
    acted = batch.stored_outputs["log_prob"]
    memory = (batch.recurrent_state[0], batch.resets()[:-1]) if policy.state_size else ()
    rows = each(lambda o: o[:-1], batch.obs)
    log_prob, _, value = policy.evaluate(rows, batch.action, *memory)
    value, next_value = values(policy, batch, value)
    log_ratio = log_prob - acted
    targets = vtrace(
        log_ratio, policy.scaled(batch.reward), value, next_value,
        batch.terminated, batch.truncated, gamma, gae_lambda, rho_clip, c_clip,
    )  # fmt: skip
    flat = _rows_of(
        policy, batch, value=value, advantage=targets.advantage, target=targets.target,
        log_prob=acted, log_prob_now=log_prob,
    )  # fmt: skip
    ratio = log_ratio.exp()
    limits = rho_clip or math.inf, c_clip or math.inf
    clipped = torch.stack([*(ratio > limit for limit in limits), torch.ones_like(batch.valid)])
    counts = ranks.gather((clipped & batch.valid).sum((1, 2)).float()).sum(0)
    rho, c = counts[:2] / counts[2].clamp(min=1)
    return flat, {"rho_clip_fraction": rho, "c_clip_fraction": c}


def most_rows(valid: Tensor, ranks: Ranks, multiple_of: int) -> int:
    """Return how many first rows of `[T, N]` have all valid ones, on any rank; at least one.

    Args:
        multiple_of: divides T, and the result.
    """
    has_valid = valid.any(1).nonzero()
    last = has_valid[-1, 0] + 1 if len(has_valid) else has_valid.new_ones(())
    return -(-int(ranks.gather(last).max()) // multiple_of) * multiple_of


@dataclass(frozen=True)
class Cuts:
    """The rows of a flattened batch `[T * n, ...]` in each minibatch.

    Attributes:
        index: `[minibatches, R]`.
        sizes: the number of the R entries that count (`batch.whole_runs`); None: all.
        num_steps: T.
    """

    index: Tensor
    sizes: list[int] | None
    num_steps: int


def cuts(rows: Minibatch, orders: Tensor, num_minibatches: int, ranks: Ranks) -> Cuts:
    """Choose minibatches of equally many steps of every env, or of whole runs of envs.

    Args:
        rows: `[T * n, ...]`. All ranks have the same number of envs n.
        orders: `[E, T, n]`: for each epoch, a permutation of the steps of each env; or, for a
            recurrent core, `[E, n]`: the position of each env among those of all ranks.
        num_minibatches: per epoch.
    """
    valid, n = rows["valid"], orders.shape[-1]
    num_steps = len(valid) // n
    if orders.dim() == 3:
        index = torch.cat([stratify(order, num_minibatches) for order in orders])
        return Cuts(index, None, num_steps)
    index, sizes = whole_runs(orders, num_steps, n * ranks.size, num_minibatches)
    return Cuts(index.to(valid.device), sizes, num_steps)


@dataclass(frozen=True)
class Minibatches:
    """The minibatches of an update.

    Columns in `cut` are already divided into minibatches. Those in `rows` are indexed when a
    minibatch is read.
    """

    rows: Minibatch
    index: list[Tensor] | None
    num_steps: int
    cut: dict[str, list[Tensor]]

    def __getitem__(self, number: int) -> Minibatch:
        """Return minibatch `number` of the update."""
        cut = {name: parts[number] for name, parts in self.cut.items()}
        if self.index is None:
            return self.rows | cut
        index = self.index[number]
        picked = {
            name: each(lambda part: part.index_select(0, index), part)
            for name, part in self.rows.items()
            if name != "state"
        }
        if "state" in self.rows:  # the first rows are of step 0: their indices are env indices
            envs = index[: len(index) // self.num_steps]
            picked["state"] = self.rows["state"].index_select(0, envs)
        return picked | cut


def minibatches(
    rows: Minibatch, cuts: Cuts | None, ranks: Ranks, *, normalize_advantage: bool
) -> Minibatches:
    """Cut rows into minibatches. All valid rows have the same weight.

    The counts of valid rows and the moments of the advantages are over all ranks. One exchange
    serves all minibatches (Chan, Golub, LeVeque 1979).

    Args:
        cuts: None: one minibatch of all rows. A minibatch without rows on this rank has a run of
            weight 0, since every rank must join each step.
        normalize_advantage: to mean 0 and deviation 1, over each minibatch; with a recurrent core
            over the batch, since the mean of a few environments tells these apart, not actions. A
            deviation below a twentieth of that of the value targets counts as that: once a task is
            solved, what is left is noise.

    Returns:
        The rows without `valid`, and with `weight`: the weights of all ranks add up to the number
        of ranks, so that the mean over ranks is a mean over rows. Where many rows are not valid,
        they are left out.
    """
    columns = {name: c for name, c in rows.items() if name != "obs" and c.dim() == 1}
    if cuts is None:
        narrow = {name: column.unsqueeze(0) for name, column in columns.items()}
    else:
        flat, shape = cuts.index.flatten(), cuts.index.shape
        narrow = {n: c.index_select(0, flat).view(shape) for n, c in columns.items()}
    advantage = narrow["advantage"]
    valid = narrow.pop("valid").to(advantage.dtype)
    if (sizes := None if cuts is None else cuts.sizes) is not None:
        places = torch.arange(valid.shape[1], device=valid.device)
        valid *= places < torch.tensor(sizes, device=valid.device).unsqueeze(-1)
    count = valid.sum(-1)
    share = valid / count.clamp(min=1).unsqueeze(-1)
    seen = [advantage, narrow["target"]] if normalize_advantage else [advantage]
    moments = [moment for column in seen for moment in _moments(column, share)]
    of_all = ranks.gather(torch.stack([count, *moments]))
    narrow["weight"] = valid * ranks.size / of_all[:, 0].sum(0).clamp(min=1).unsqueeze(-1)
    if normalize_advantage:
        narrow["advantage"] = _normalized(advantage, of_all, over_batch="state" in rows)
    wide = {name: part for name, part in rows.items() if name not in columns}
    columns_of = {name: list(part) for name, part in narrow.items()}
    index = None if cuts is None else list(cuts.index)
    chosen: Sequence[slice | Tensor] = ()
    if cuts is not None and sizes is not None:
        chosen = [slice(size or cuts.num_steps) for size in sizes]
    elif "state" not in rows:
        chosen = _rows_that_count(narrow["weight"])
    if chosen:
        whole = [torch.arange(valid.shape[1], device=valid.device)] if index is None else index
        index = _each_of(whole, chosen)
        columns_of = {name: _each_of(parts, chosen) for name, parts in columns_of.items()}
    if index is not None:
        small = [name for name, part in wide.items() if name != "state" and _is_small(part, index)]
        for name in small:
            picked = wide.pop(name).index_select(0, torch.cat(index))
            columns_of[name] = [*picked.split([len(of) for of in index])]
    return Minibatches(wide, index, 0 if cuts is None else cuts.num_steps, columns_of)


def _moments(column: Tensor, share: Tensor) -> list[Tensor]:
    """Return mean and variance of each minibatch `[M, R]`; shares of its rows add up to 1."""
    mean = (column * share).sum(-1)
    return [mean, ((column - mean.unsqueeze(-1)).square() * share).sum(-1)]


def _normalized(advantage: Tensor, moments: Tensor, *, over_batch: bool) -> Tensor:
    """Normalize advantages `[M, R]`, each minibatch by itself or all alike.

    Args:
        moments: `[ranks, 5, M]` counts, means and variances of them, and of value targets.
    """
    merge = _pooled if over_batch else merged
    _, mean, variance = merge(moments[:, :3]).unsqueeze(-1)
    spread = merge(moments[:, [0, 3, 4]])[2].unsqueeze(-1).sqrt()
    deviation = torch.maximum(variance.sqrt(), _LEAST_SPREAD * spread)
    normalized: Tensor = (advantage - mean) / (deviation + 1e-8)
    return normalized


def _pooled(moments: Tensor) -> Tensor:
    """Merge count, mean and variance of all ranks' minibatches, `[ranks, 3, M]`, to `[3]`."""
    count, mean, variance = moments.transpose(0, 1).flatten(1)
    total = count.sum().clamp(min=1)
    of_all = (mean * count).sum() / total
    return torch.stack(
        [total, of_all, ((variance + (mean - of_all).square()) * count).sum() / total]
    )


# Of the value targets' deviation: below it, a solved task was unlearned by its noise.
_LEAST_SPREAD = 0.05

_SMALL = 64 << 20  # bytes of all minibatches, beyond which they are picked one by one


def _is_small(part: Any, index: list[Tensor]) -> bool:
    return isinstance(part, Tensor) and part[0].nbytes * sum(map(len, index)) < _SMALL


def _each_of(parts: Sequence[Tensor], chosen: Sequence[slice | Tensor]) -> list[Tensor]:
    return [part[rows] for part, rows in zip(parts, chosen, strict=True)]


_MANY = 0.125  # of the rows: to leave out those of resets alone would save less than it costs


def _rows_that_count(weight: Tensor) -> list[Tensor]:
    """Return the positions of the rows whose weight is not 0, of each minibatch `[M, R]`.

    Returns:
        Of each minibatch at least one row. []: leave out none, since they are few, or since a
        device would make the host wait.
    """
    if weight.device.type != "cpu" or float((weight == 0).float().mean()) < _MANY:
        return []
    first = torch.zeros(1, dtype=torch.long)
    return [row.nonzero().flatten() if row.any() else first for row in weight]


def value_metrics(rows: Minibatch, ranks: Ranks) -> dict[str, Tensor]:
    """Compute metrics of the column `value`, over the valid rows of all ranks."""
    value, target = rows["value"], rows["target"]
    both = torch.stack([value, target, target - value])
    # Weights, since selecting the valid rows would make the host wait for the device.
    valid = rows["valid"].to(value.dtype)
    count = valid.sum()
    weight = valid / count.clamp(min=1)
    mean = (both * weight).sum(-1)
    variance = ((both - mean.unsqueeze(-1)).square() * weight).sum(-1)
    moments = torch.stack([count.expand(3), mean, variance])
    _, mean, variance = merged(ranks.gather(moments))
    return {"explained_variance": 1 - variance[2] / variance[1], "mean_value": mean[0]}
