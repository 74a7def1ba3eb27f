"""Returns and advantages: pure functions over time-major `[T, n]` tensors.

An episode ends in one of two ways, kept apart: `terminated` (the future is worth nothing) and
`truncated` (the future goes on, we do not see it: bootstrap from the value of the true next
observation). Either cuts the trace; only termination cuts the value.

Left out: policies, losses, and which steps are valid (a step that is not is preceded by an end, so
that nothing flows back from it).
"""

import torch
from torch import Tensor


def _check(name: str, reference: Tensor, **others: Tensor) -> None:
    """Rank and shape at the door: broadcasting would make a wrong answer of a wrong shape."""
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
    """Generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    Args:
        reward: `[T, n]`, r_t.
        value: `[T, n]`, V(s_t).
        next_value: `[T, n]`, V of the true next observation (of the final one where it ended).
        terminated: `[T, n]` bool: the episode ended here for good.
        truncated: `[T, n]` bool: it was cut off here.
        gamma: discount.
        gae_lambda: trace decay λ.

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
    advantage = torch.empty_like(delta)
    trace = torch.zeros_like(delta[0])
    rows = zip(delta.unbind(), decay.unbind(), advantage.unbind(), strict=True)
    for delta_t, decay_t, advantage_t in reversed(list(rows)):
        trace = torch.addcmul(delta_t, decay_t, trace, out=advantage_t)
    return advantage


def discounted_sum(reward: Tensor, done: Tensor, start: Tensor, gamma: float) -> Tensor:
    """The return so far, R_t = r_t + γ R_{t-1}, begun anew after each end of an episode.

    Its spread scales rewards (Engstrom et al. 2020, arXiv:2005.12729, section 3).

    Args:
        reward: `[T, n]`.
        done: `[T, n]` bool: an episode ended with this step.
        start: `[n]`: the sum carried in from before the first row (0 after an end).
        gamma: discount.

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
