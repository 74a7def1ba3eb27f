"""Functions as CUDA graphs on a GPU, such as a gradient step.

A function of few rows takes a GPU less time than the host needs to start some hundred operations
for it. Left out: what the functions do, and which of them are recorded (`learner.py`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.algos.base import Named, Recordable
from headrace.models.cuda_graph import CudaGraph

_MOST_BYTES = 2**24
"""Bytes of arguments and results of what is recorded. The work of a larger function takes longer
than its starts, and the memory that a graph takes for its results is its own."""
_MOST_LAYOUTS = 4  # the memory of each graph is its own


class Recorded:
    """A function, recorded once for each layout of its arguments (names, shapes, dtypes).

    Args:
        function: uses the device's memory alone, always the same but for the arguments, and never
            waits for the device. A number among its arguments is a tensor `[]` there, int64 or
            float32.
    """

    def __init__(self, function: Recordable, device: torch.device) -> None:
        self._function, self._device = function, device
        self._layouts: dict[tuple[object, ...], _OfLayout] = {}

    def __call__(self, arguments: Named) -> Named:
        layout = tuple(_layout(arguments))
        of_layout = self._layouts.get(layout)
        if of_layout is not None:
            return of_layout(arguments)
        results = self._function(arguments)
        size = sum(_bytes(value) for named in (arguments, results) for value in _values(named))
        if size <= _MOST_BYTES and len(self._layouts) < _MOST_LAYOUTS:
            self._layouts[layout] = _OfLayout(self._function, arguments, self._device)
        return results


class _OfLayout:
    """The graph for one layout, and the memory that it reads and writes."""

    def __init__(self, function: Recordable, arguments: Named, device: torch.device) -> None:
        memory = _mapped(partial(_memory_for, device), arguments)
        self._memory: list[Tensor] = list(_values(memory))
        self._results = _Results()
        self._numbers: dict[int, float] = {}  # the numbers there, by place
        places: dict[torch.dtype, list[int]] = {}  # of tensors
        for place, value in enumerate(_values(arguments)):
            if isinstance(value, Tensor):
                places.setdefault(value.dtype, []).append(place)
        self._same_dtype = list(places.values())
        self._graph = CudaGraph(partial(self._results.fill, function, memory), device)

    def __call__(self, arguments: Named) -> Named:
        values = list(_values(arguments))
        for places in self._same_dtype:  # one operation copies them all
            torch._foreach_copy_([self._memory[i] for i in places], [values[i] for i in places])
        for place, value in enumerate(values):
            if not isinstance(value, Tensor) and self._numbers.get(place) != value:
                self._memory[place].fill_(value)
                self._numbers[place] = value
        self._graph()
        return self._results.copied()


class _Results:
    """The memory that a graph writes to.

    The graph knows this object, and not its owner: a cycle would keep the function's memory.
    """

    def __init__(self) -> None:
        self._others: Named = {}
        self._names: list[str] = []  # of scalars, which are one tensor
        self._scalars: Tensor | None = None

    def fill(self, function: Recordable, arguments: Named) -> None:
        results = function(arguments)
        self._names = [name for name, result in results.items() if _is_scalar(result)]
        self._others = {n: result for n, result in results.items() if n not in self._names}
        if self._names:
            self._scalars = torch.stack([results[name] for name in self._names])

    def copied(self) -> Named:
        """Return copies, since the next replay writes to the same memory."""
        results = _mapped(torch.clone, self._others)
        if self._scalars is not None:
            results |= zip(self._names, self._scalars.clone().unbind(), strict=True)
        return results


def _memory_for(device: torch.device, value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return torch.empty_like(value)
    dtype = torch.int64 if isinstance(value, int) else torch.float32
    return torch.zeros((), dtype=dtype, device=device)


def _mapped(function: Callable[[Any], Any], named: Named) -> Named:
    """Apply a function to each value, those of dicts within included."""
    return {
        name: _mapped(function, value) if isinstance(value, dict) else function(value)
        for name, value in named.items()
    }


def _values(named: Named) -> Iterator[Any]:
    for value in named.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value


def _layout(named: Named) -> Iterator[object]:
    for name, value in named.items():
        yield name
        if isinstance(value, dict):
            yield tuple(_layout(value))
        elif isinstance(value, Tensor):
            yield value.shape, value.dtype
        else:
            yield type(value)


def _bytes(value: Tensor | float) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _is_scalar(result: Any) -> bool:
    return isinstance(result, Tensor) and not result.dim()
