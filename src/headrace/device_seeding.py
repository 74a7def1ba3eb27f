"""Random numbers by address, computed on a device.

Those that `seeding.py` has too are the same, to the bit. Normal numbers differ by rounding between
devices.

Words of 32 bits are held in int64, as torch has no unsigned arithmetic.
"""

import math

import torch
from torch import Tensor

from headrace.seeding import PHILOX, derive, philox

_LOW32, _32 = PHILOX[4:]


def _words(seed: int, role: str, row_id: Tensor, *counter: Tensor | int) -> Tensor:
    """Return Philox words `[..., 4, n]` for each row and each counter, of four parts."""
    words = philox((derive(seed, role), row_id), counter, PHILOX)  # type: ignore[arg-type]
    return torch.stack(torch.broadcast_tensors(*words), -2)  # type: ignore[no-untyped-call]


def action_noise(
    seed: int, row_id: Tensor, first_step: int, num_steps: int, num_draws: int
) -> Tensor:
    """Return `seeding.action_noise`; `row_id` is `[n]` int64, on the device."""
    first, end = first_step * num_draws, (first_step + num_steps) * num_draws
    four = torch.arange(first // 4, -(-end // 4), device=row_id.device).unsqueeze(1)
    words = _words(seed, "action", row_id, four & _LOW32, four >> _32, 0, 0)
    bits = words.reshape(-1, len(row_id))[first % 4 :][: end - first]
    bits = bits.reshape(num_steps, num_draws, len(row_id)).swapaxes(1, 2)
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def replay_draws(
    seed: int, first_step: int | Tensor, num_steps: int, batch_size: int, device: torch.device
) -> Tensor:
    """Return uniform numbers of [0, 1), for each slot of the batches of gradient steps.

    They are `[num_steps, batch_size]` float64, on a grid of 2^-32. The number of the first step may
    be on the device, which nothing waits for.
    """
    step = torch.arange(num_steps, device=device).unsqueeze(1) + first_step
    slot = torch.arange(batch_size, device=device)
    words = _words(seed, "replay", slot, step & _LOW32, step >> _32, 0, 0)
    return words[:, 0].double() * 2.0**-32


def league_draws(seed: int, env_id: Tensor, episode: Tensor) -> Tensor:
    """Return `seeding.league_draws`; both are `[n]` int64, on the device."""
    words = _words(seed, "league", env_id, 0, 0, episode & _LOW32, episode >> _32)
    return words.double() * 2.0**-32


def normal_noise(
    seed: int, number: int | Tensor, use: int, count: int, device: torch.device
) -> Tensor:
    """Return `[count]` normal numbers, float64, that belong to (seed, number, use).

    The number may be on the device, which nothing waits for.
    """
    four = torch.arange(-(-count // 4), device=device)
    words = _words(seed, "noise", four, number & _LOW32, number >> _32, use, 0)
    return _box_muller((words.double() + 0.5) * 2.0**-32).flatten()[:count]


def goal_draws(seed: int, step: int | Tensor, slot: Tensor) -> Tensor:
    """Return two uniform numbers of [0, 1) for slots `[B]` of batches: `[2, B]`, float64.

    `step` as in `batch_noise`.
    """
    words = _words(seed, "goal", slot, step & _LOW32, step >> _32, 0, 0)
    return words[:2].double() * 2.0**-32


def batch_noise(seed: int, step: int | Tensor, slot: Tensor, count: int) -> Tensor:
    """Return normal numbers `[B, count]`, float32, that belong to slots of batches.

    Args:
        step: of the gradient step, or `[B]` of the step of each slot.
        slot: `[B]`, the place of a row in its batch.
    """
    four = torch.arange(-(-count // 4), device=slot.device).unsqueeze(1)
    words = _words(seed, "sample", slot, step & _LOW32, step >> _32, four, 0)
    normal = _box_muller((words.double() + 0.5) * 2.0**-32)
    return normal.flatten(0, 1)[:count].T.float()


def _box_muller(uniform: Tensor) -> Tensor:
    """Return as many normal numbers from numbers in (0, 1), `[..., 2 k, n]`."""
    # Box and Muller 1958, doi:10.1214/aoms/1177706645: two normal numbers from two uniform ones
    radius, angle = uniform.chunk(2, -2)
    radius, angle = (-2 * radius.log()).sqrt(), angle * (2 * math.pi)
    return torch.cat((radius * angle.cos(), radius * angle.sin()), -2)


def permutations(seed: int, row_id: Tensor, update: int, num_epochs: int, num_steps: int) -> Tensor:
    """Return `seeding.permutations`; `row_id` is `[n]` int64, on the device."""
    step = torch.arange(num_steps, device=row_id.device).unsqueeze(1)
    four = torch.arange(-(-num_epochs // 4), device=row_id.device).view(-1, 1, 1)
    words = _words(seed, "minibatch", row_id, step, four, update & _LOW32, update >> _32)
    words = words.movedim(-2, 1).reshape(-1, num_steps, len(row_id))[:num_epochs]
    # Shifted by half of the range, so that signed numbers sort as the words do.
    keys = (words - (1 << 31)) << _32 | step
    return keys.sort(1).values & _LOW32
