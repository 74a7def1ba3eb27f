"""A module's parameters and buffers as one flat piece of memory, for publishing and pulling.

The learner writes, samplers read; who tells whom that a new version is there is the collector's
business. Left out: files (`run/checkpoint.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 16


class FlatWeights:
    """Views of one buffer, laid out like the state of a module (parameters and buffers, any dtype).

    Modules that are built from the same settings have the same layout, in any process.
    """

    def __init__(self, module: nn.Module, buffer: Any = None) -> None:
        """Lay out `buffer` (writable, at least `num_bytes(module)`; default: the heap)."""
        if buffer is None:
            raw = torch.empty(self.num_bytes(module), dtype=torch.uint8)
        else:
            raw = torch.frombuffer(buffer, dtype=torch.uint8)
        self._slots: list[Tensor] = []
        offset = 0
        for tensor in module.state_dict().values():
            size = tensor.numel() * tensor.element_size()
            slot = raw[offset : offset + size].view(tensor.dtype)
            self._slots.append(slot.view(tensor.shape))
            offset += _aligned(size)

    @staticmethod
    def num_bytes(module: nn.Module) -> int:
        """The size of the flat vector."""
        tensors = module.state_dict().values()
        return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)

    @torch.no_grad()
    def publish(self, module: nn.Module) -> None:
        """Copy the module's state into the buffer."""
        for slot, tensor in zip(self._slots, module.state_dict().values(), strict=True):
            slot.copy_(tensor)

    @torch.no_grad()
    def pull(self, module: nn.Module) -> None:
        """Copy the buffer into the module's state."""
        for slot, tensor in zip(self._slots, module.state_dict().values(), strict=True):
            tensor.copy_(slot)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
