"""A fragment as it travels between machines: one or two pieces of memory.

Left out: its legend and memory (`batch.py`), and who sends it
(`collectors/backends/ray_worker.py`).
"""

import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from headrace.batch import (
    Column,
    Fragment,
    allocate,
    extents,
    named,
    num_bytes,
    of_named,
    views,
    written,
)
from headrace.spec import Array


def pack(layout: Mapping[str, Column], memory: Array) -> tuple[int, list[Array]]:
    """A fragment on the CPU, to be sent: without the room for final observations that is unused.

    Args:
        layout: from `columns`.
        memory: `[num_bytes(layout)]` uint8: where the fragment lies.

    Returns:
        How many final observations there are, and parts of one dimension, uint8: a piece of the
        memory itself, and, if there are any, these.
    """
    fragment = allocate(layout, memory, fresh=False)
    k = int(fragment.num_final)
    finals = _finals(layout, k)
    first = next(offset for name, offset, _ in extents(layout) if name == next(iter(finals)))
    parts: list[Array] = [memory[:first]]
    if k:
        parts.append(np.empty(num_bytes(finals), np.uint8))
        whole = named(written(fragment))
        for name, view in views(finals, torch.from_numpy(parts[1])).items():
            view.copy_(whole[name])
    return k, parts


def unpack(layout: Mapping[str, Column], k: int, parts: Iterator[Array]) -> Fragment:
    """The inverse of `pack`: takes a fragment's parts from those of several.

    Where parts are read-only, nobody may write to the fragment.
    """
    finals = _finals(layout, k)
    head = {name: column for name, column in layout.items() if name not in finals}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        first = torch.from_numpy(next(parts))
        rest = torch.from_numpy(next(parts)) if k else None
    if rest is None:
        rest = torch.zeros(num_bytes(finals), dtype=torch.uint8)
    return of_named(views(head, first) | views(finals, rest))


def _finals(layout: Mapping[str, Column], k: int) -> dict[str, Column]:
    """The columns of final observations, which are the last, with room for k of them."""
    of = {name: column for name, column in layout.items() if name.startswith("final_")}
    return {
        **{name: ((k, *shape[1:]), dtype) for name, (shape, dtype) in of.items()},
        "num_final": layout["num_final"],
    }
