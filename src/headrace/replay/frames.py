"""Stacks of frames, of which a replay buffer stores each frame once.

Left out: where the frames of a stack are (`buffer.py`).
"""

import torch
from torch import Tensor


def continues(stack: Tensor, before: Tensor, dims: int) -> Tensor:
    """Return `[...]`: where frames `[..., k, *shape]` are those of `before`, and a newer one.

    Args:
        dims: of `[...]`.
    """
    now, earlier = stack.flatten(dims + 1), before.flatten(dims + 1)
    same: Tensor = (now[..., :-1, :] == earlier[..., 1:, :]).all(-1).all(-1)
    return same


def side_by_side(frames: Tensor, axis: int) -> Tensor:
    """Return frames with those of a pixel as neighbours in memory, as convolutions read them.

    Each network that sees the stacks would copy them otherwise.

    Args:
        axis: of the frames of a stack.
    """
    return torch.stack(frames.unbind(axis), -1).movedim(-1, axis)
