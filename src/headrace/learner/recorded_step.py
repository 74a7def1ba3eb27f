"""A gradient step on a GPU as a CUDA graph.

A small minibatch takes a GPU less time than the host needs to start some hundred operations for it.
Left out: what a gradient step is (`optimizer.py`), and which ones are recorded (`learner.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.batch import Minibatch, each
from headrace.models.cuda_graph import Replayed

_MOST_BYTES = 2**24
"""Bytes of a minibatch that is recorded. The work of a larger one takes longer than its starts, and
the memory that a graph takes for its results is its own."""
_MOST_LAYOUTS = 4  # the memory of each graph is its own

Step = Callable[[Minibatch, float], dict[str, Tensor]]
"""(minibatch, lr) -> metrics."""
StepOnDevice = Callable[[Minibatch, float | Tensor], dict[str, Tensor]]
"""The same; the learning rate may be in the device's memory."""


class RecordedStep:
    """A gradient step, recorded once for each layout of minibatches (names, shapes, dtypes).

    Args:
        step: uses device memory alone, always the same but for the minibatch and the learning rate,
            and never waits for the device.
    """

    def __init__(self, step: StepOnDevice) -> None:
        self._step = step
        self._layouts: dict[tuple[object, ...], _OfLayout] = {}

    def __call__(self, minibatch: Minibatch, lr: float) -> dict[str, Tensor]:
        named = _named(minibatch)
        layout = tuple((name, column.shape, column.dtype) for name, column in named)
        of_layout = self._layouts.get(layout)
        if of_layout is None:
            size = sum(column.nbytes for _, column in named)
            if size > _MOST_BYTES or len(self._layouts) == _MOST_LAYOUTS:
                return self._step(minibatch, lr)
            of_layout = self._layouts[layout] = _OfLayout(self._step, minibatch)
        return of_layout([column for _, column in named], lr)


class _OfLayout:
    """The graph for one layout, and the memory that it reads and writes."""

    def __init__(self, step: StepOnDevice, minibatch: Minibatch) -> None:
        self._step = step
        self._minibatch: Minibatch = {
            name: each(torch.empty_like, column) for name, column in minibatch.items()
        }
        self._columns = [column for _, column in _named(self._minibatch)]
        device = self._columns[0].device
        self._lr, self._filled_lr = torch.zeros((), device=device), 0.0
        self._replayed = Replayed(self._run, device)

    def _run(self) -> None:
        metrics = self._step(self._minibatch, self._lr)
        self._of_rows = {name: metric for name, metric in metrics.items() if metric.dim()}
        self._names = [name for name in metrics if name not in self._of_rows]
        self._numbers = torch.stack([metrics[name] for name in self._names])

    def __call__(self, columns: list[Tensor], lr: float) -> dict[str, Tensor]:
        for memory, column in zip(self._columns, columns, strict=True):
            memory.copy_(column)
        if lr != self._filled_lr:
            self._lr.fill_(lr)
            self._filled_lr = lr
        self._replayed()
        # Copies: the next replay writes to the same memory.
        numbers = zip(self._names, self._numbers.clone().unbind(), strict=True)
        return dict(numbers) | {name: metric.clone() for name, metric in self._of_rows.items()}


def _named(minibatch: Minibatch) -> list[tuple[str, Tensor]]:
    """Return the columns; those of a dict one by one."""
    named: list[tuple[str, Tensor]] = []
    for name, column in minibatch.items():
        if isinstance(column, dict):
            named += [(f"{name}.{key}", part) for key, part in column.items()]
        else:
            named.append((name, column))
    return named
