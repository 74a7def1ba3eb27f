"""A module's parameters and buffers as one flat piece of memory, for publishing and pulling.

The learner writes, samplers read. Left out: files (`storage/checkpoint.py`).
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
        """Lay out `buffer` (at least `num_bytes(module)`; writable, to publish; default: the heap).

        A tensor of uint8 will do, or what has a buffer.
        """
        if buffer is None:
            raw = torch.empty(self.num_bytes(module), dtype=torch.uint8)
        else:
            is_raw = isinstance(buffer, Tensor)
            raw = buffer if is_raw else torch.frombuffer(buffer, dtype=torch.uint8)
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


class Published:
    """Numbered weights in memory that processes share: one writes them, the others read.

    Two versions lie side by side, so that one is read while the next is written. A reader that is
    overtaken twice while it reads takes the newest again.

    Args:
        module: whose weights; None: only their numbers are of interest here.
        buffer: writable memory of `num_bytes(module)`; default: the heap. Zeroed, at first.
    """

    _HEADER = 64

    def __init__(self, module: nn.Module | None, buffer: Any = None) -> None:
        if buffer is None:
            assert module is not None
            buffer = bytearray(self.num_bytes(module))
        memory = memoryview(buffer)
        numbers = memory[: self._HEADER].cast("q")
        self._begun, self._written, self.stop = numbers[0:1], numbers[1:2], numbers[2:3]
        if module is not None:
            size = FlatWeights.num_bytes(module)
            parts = (memory[self._HEADER + i * size :][:size] for i in range(2))
            self._parts = [FlatWeights(module, part) for part in parts]

    @classmethod
    def num_bytes(cls, module: nn.Module) -> int:
        """How much memory it takes."""
        return cls._HEADER + 2 * FlatWeights.num_bytes(module)

    @property
    def newest(self) -> int:
        """The version that was published last."""
        return self._written[0]

    def publish(self, module: nn.Module, version: int) -> None:
        """Write a version: the one after `newest`, but for the first."""
        self._begun[0] = version
        self._parts[version % 2].publish(module)
        self._written[0] = version

    def pull(self, module: nn.Module, version: int | None = None) -> int:
        """Copy a version into the module, and say which.

        Args:
            module: of the same layout.
            version: the newest or the one before; None: the newest.
        """
        while True:
            found = self.newest if version is None else version
            self._parts[found % 2].pull(module)
            # The next one lies elsewhere; the one after it, here. (Around each of torch's copies
            # Python's lock is given and taken: on any machine, that orders them with the numbers.)
            if self._begun[0] < found + 2:
                return found
            assert version is None, f"version {version} is gone: {self._begun[0]} is being written"
