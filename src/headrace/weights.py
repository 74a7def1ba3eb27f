"""The weights of policies as one flat piece of memory. The learner publishes, workers pull."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace import batch
from headrace.spec import Array

Modules = Mapping[str, nn.Module]
"""Modules by name, such as the policies of a run."""


class FlatWeights:
    """Views of one buffer, laid out like the state of modules (parameters and buffers, any dtype).

    Modules that are built from the same settings have the same layout, in any process.

    Args:
        buffer: at least `num_bytes(modules)`; writable if it is published to.
    """

    def __init__(self, modules: Modules, buffer: Any) -> None:
        self._whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self._slots = list(batch.views(_layout(modules), self._whole).values())

    @staticmethod
    def num_bytes(modules: Modules) -> int:
        """Return the size of the flat vector."""
        return batch.num_bytes(_layout(modules))

    @torch.no_grad()
    def publish(self, modules: Modules) -> None:
        """Copy the modules' state into the buffer."""
        for slot, tensor in zip(self._slots, _state(modules), strict=True):
            slot.copy_(tensor)

    def copy(self, flat: Array) -> None:
        """Copy what lay in another buffer of the same modules, `[num_bytes(modules)]` uint8."""
        self._whole[: len(flat)].copy_(torch.from_numpy(flat))

    @torch.no_grad()
    def pull(self, modules: Modules) -> None:
        """Copy the buffer into the modules' state."""
        for slot, tensor in zip(self._slots, _state(modules), strict=True):
            tensor.copy_(slot)


def _layout(modules: Modules) -> dict[str, batch.Column]:
    return {str(i): (tensor.shape, tensor.dtype) for i, tensor in enumerate(_state(modules))}


def _state(modules: Modules) -> list[Tensor]:
    return [tensor for module in modules.values() for tensor in module.state_dict().values()]


class Published:
    """Numbered weights in memory that processes share: one writes them, the others read.

    Two versions lie side by side, so that one is read while the next is written. A reader that is
    overtaken twice while it reads takes the newest again.

    Args:
        modules: the owners of the weights; None: only version numbers are read.
        buffer: writable memory of `num_bytes(modules)`, zeroed at first; default: the heap.
    """

    _HEADER = 64

    def __init__(self, modules: Modules | None, buffer: Any = None) -> None:
        if buffer is None:
            assert modules is not None
            buffer = bytearray(self.num_bytes(modules))
        memory = memoryview(buffer)
        numbers = memory[: self._HEADER].cast("q")
        self._begun, self._written, self.stop = numbers[0:1], numbers[1:2], numbers[2:3]
        if modules is not None:
            size = FlatWeights.num_bytes(modules)
            parts = (memory[self._HEADER + i * size :][:size] for i in range(2))
            self._parts = [FlatWeights(modules, part) for part in parts]

    @classmethod
    def num_bytes(cls, modules: Modules) -> int:
        """Return the size of the buffer."""
        return cls._HEADER + 2 * FlatWeights.num_bytes(modules)

    @property
    def newest(self) -> int:
        """The newest published version."""
        return self._written[0]

    def publish(self, modules: Modules, version: int) -> None:
        """Write the version after `newest`, or any first version."""
        self._begun[0] = version
        self._parts[version % 2].publish(modules)
        self._written[0] = version

    def publish_copy(self, flat: Array, version: int) -> None:
        """Write a version that was published elsewhere; `flat`: as `FlatWeights` lays it out."""
        self._begun[0] = version
        self._parts[version % 2].copy(flat)
        self._written[0] = version

    def pull(self, modules: Modules, version: int | None = None) -> int:
        """Copy a version (default: the newest) and return its number.

        `version` must be the newest or the one before.
        """
        while True:
            pulled = self.newest if version is None else version
            self._parts[pulled % 2].pull(modules)
            # The next version lies in the other part, the one after it in this one. (Each of
            # torch's copies releases Python's lock, which orders it with the numbers.)
            if self._begun[0] < pulled + 2:
                return pulled
            assert version is None, f"version {version} is gone: {self._begun[0]} is being written"
