"""Sections: what each part of a run puts into a checkpoint, and takes back on resume."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace.storage.checkpoint import Checkpoint, as_written

SectionState = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Tensors or arrays by name, and plain data; {} where there is none."""


@dataclass(frozen=True)
class Section:
    """One part of a run in its checkpoints.

    Attributes:
        name: of the file of tensors, and of the plain data in the manifest.
        state: returns what is saved.
        load: takes back the tensors and the plain data.
        is_collective: `state` must be called on all ranks at once. Without it, all ranks hold the
            same state, and rank 0 may call it alone.
    """

    name: str
    state: Callable[[], SectionState]
    load: Callable[[dict[str, Any], dict[str, Any]], object]
    is_collective: bool = False


def module_section(name: str, module: nn.Module) -> Section:
    """Return the section of a module's parameters and buffers."""
    return Section(
        name, lambda: (module.state_dict(), {}), lambda tensors, _: module.load_state_dict(tensors)
    )


def restore(sections: Iterable[Section], saved: Checkpoint) -> None:
    """Load every section; CheckpointError if one is missing, or holds what no run writes."""
    with as_written(saved.path):
        for section in sections:
            section.load(*saved.section(section.name))
