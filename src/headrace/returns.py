"""Returns and advantages: pure functions over time-major `[T, n]` tensors.

An end is `terminated` (the future is worth nothing) or `truncated` (bootstrap from the value of
the true next observation). Both cut the trace. An invalid step follows an end, so that nothing
flows back from it.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def _check(name: str, reference: Tensor, **others: Tensor) -> None:
    """Check shapes: broadcasting would turn a wrong shape into a wrong result."""
    if reference.dim() != 2:
        raise ValueError(f"{name}: expected [T, n] tensors, got shape {tuple(reference.shape)}")
    for key, tensor in others.items():
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name}: {key} has shape {tuple(tensor.shape)}, "
                f"expected {tuple(reference.shape)} like the reward"
            )


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Return generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    All tensors are `[T, n]`. `value` is V(s_t), and `next_value` V of the true next observation
    (the final one where the episode ended).

    Returns:
        `[T, n]`: Σ_k (γλ)^k δ_{t+k} up to the episode's end. The value target is this plus `value`.

    Raises:
        ValueError: if the shapes are not all the same `[T, n]`.
    """
    _check(
        "gae",
        reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
    )
    # δ_t = r_t + γ (1 - terminated) V(s_{t+1}) - V(s_t)
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    decay = torch.full_like(delta, gamma * gae_lambda).masked_fill(terminated | truncated, 0.0)
    return _accumulated(delta, decay)


def _accumulated(delta: Tensor, decay: Tensor) -> Tensor:
    """Return A_t = δ_t + decay_t A_{t+1}, with 0 after the last row."""
    total = torch.empty_like(delta)
    trace = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), decay.unbind(), total.unbind(), strict=True)
    for delta_t, decay_t, total_t in reversed(list(rows)):
        trace = torch.addcmul(delta_t, decay_t, trace, out=total_t)
    return total


class VTrace(NamedTuple):
    """Value targets v_t and advantages of the actions, `[T, n]` each."""

    target: Tensor
    advantage: Tensor


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    rho_clip: float,
    c_clip: float,
) -> VTrace:
    """Return V-trace targets and advantages (Espeholt et al. 2018, arXiv:1802.01561, section 4.1).

    With equal policies (all ratios 1) and λ = 1, the targets are those of GAE(1). λ is the trace
    decay of the paper's remark 2. The other tensors are as in `gae`.

    Args:
        log_ratio: `[T, n]`, log π(a_t|s_t) - log μ(a_t|s_t), for the learned policy π and the
            acting policy μ.
        rho_clip: ρ̄, upper bound of ratios in temporal differences and advantages. It decides the
            fixed point of the targets. 0: each counts as 1.
        c_clip: c̄, upper bound of ratios in the traces. It decides the speed of convergence. 0: each
            counts as 1.

    Raises:
        ValueError: if the shapes are not all the same `[T, n]`.
    """
    _check(
        "vtrace",
        reward,
        log_ratio=log_ratio,
        value=value,
        next_value=next_value,
        terminated=terminated,
        truncated=truncated,
    )
    ratio = log_ratio.exp()
    rho, c = (
        ratio.clamp(max=clip) if clip else torch.ones_like(ratio) for clip in (rho_clip, c_clip)
    )
    bootstrap = next_value.masked_fill(terminated, 0.0)
    # δ_t = ρ_t (r_t + γ V(s_{t+1}) - V(s_t));  v_t = V(s_t) + δ_t + γ λ c_t (v_{t+1} - V(s_{t+1}))
    delta = rho * (reward + gamma * bootstrap - value)
    ended = terminated | truncated
    decay = (gamma * gae_lambda * c).masked_fill(ended, 0.0)
    target = value + _accumulated(delta, decay)
    # ρ_t (r_t + γ v_{t+1} - V(s_t)): v_{t+1} is unknown after an end and after the last row
    next_target = bootstrap.clone()
    next_target[:-1] = torch.where(ended[:-1], bootstrap[:-1], target[1:])
    advantage = rho * (reward + gamma * next_target - value)
    return VTrace(target, advantage)


def discounted_sum(reward: Tensor, done: Tensor, start: Tensor, gamma: float) -> Tensor:
    """Return the return so far, R_t = r_t + γ R_{t-1}, with 0 before each episode.

    Its spread scales rewards (Engstrom et al. 2020, arXiv:2005.12729, section 3).

    Args:
        done: `[T, n]` bool: an episode ended with this step.
        start: `[n]`: the sum carried in from before the first row (0 after an end).

    Returns:
        `[T + 1, n]`: row t is R_t; the last row is what to carry into the next batch.

    Raises:
        ValueError: if the shapes do not fit.
    """
    _check("discounted_sum", reward, done=done)
    if start.shape != reward.shape[1:]:
        raise ValueError(
            f"discounted_sum: start {tuple(start.shape)} against {tuple(reward.shape)}"
        )
    total = torch.empty(
        (len(reward) + 1, reward.shape[1]), dtype=reward.dtype, device=reward.device
    )
    carry = start
    for t in range(len(reward)):
        torch.add(reward[t], carry, alpha=gamma, out=total[t])
        carry = total[t].masked_fill(done[t], 0.0)
    total[-1] = carry
    return total
