"""The memory and the file that a replay buffer takes: checked, and made, at the start."""

import math
import mmap
import os
import tempfile
from pathlib import Path

import torch

from headrace.batch import columns
from headrace.errors import ConfigError
from headrace.spec import EnvSpec


def obs_bytes(spec: EnvSpec) -> int:
    """Return the bytes of an observation."""
    layout = columns(spec, {}, 1, 1, capacity=0)
    names = [name for name in layout if name.startswith("obs")]
    return sum(math.prod(layout[name][0][2:]) * layout[name][1].itemsize for name in names)


def row_bytes(spec: EnvSpec, *, prioritized: bool = False) -> int:
    """Return the memory of one row, in bytes; that of a priority's sums is left out."""
    layout = columns(spec, {}, 1, 1, capacity=0)
    names = "action", "reward", "terminated", "truncated"
    sizes = [math.prod(layout[name][0][2:]) * layout[name][1].itemsize for name in names]
    in_list = torch.int64.itemsize  # of the transitions
    frame = obs_bytes(spec) // frames_in(spec)
    return frame + sum(sizes) + in_list + (torch.float64.itemsize if prioritized else 0)


def frames_in(spec: EnvSpec) -> int:
    """Return how many frames an observation is a stack of; 1 for any other observation."""
    return max(1, spec.num_frames) if spec.observation.kind == "box" else 1


def check_memory(
    spec: EnvSpec, size: int, directory: str = "", *, prioritized: bool = False
) -> None:
    """Raise ConfigError if this machine's memory does not hold the buffer. A GPU's is not asked.

    Rows take memory when they are first written. So without this check the kernel would end the
    process hours later.

    Args:
        directory: of the file that holds the observations; "": memory holds them.
    """
    row, free = row_bytes(spec, prioritized=prioritized), _free_memory()
    in_file = obs_bytes(spec) // frames_in(spec)
    if directory:
        row -= in_file
    if free is not None and size * row > free:
        elsewhere = (
            ""
            if directory
            else "; or, for a learner on a CPU, --replay-dir DIR to keep the observations on a disk"
        )
        raise ConfigError(
            f"replay_size={size}: the buffer needs {size * row / 1e9:.1f} GB, {row} bytes for a "
            f"transition, and {free / 1e9:.1f} GB of memory are free.\n"
            f"Use --replay-size {int(0.8 * free / row)} or less{elsewhere}."
        )


def zeros_in_file(directory: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a file without a name, which is removed with the process.

    Raises:
        ConfigError: the directory cannot be written, or its disk has not enough room.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            if hasattr(os, "posix_fallocate"):  # else a full disk would end the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).view(shape)
    except OSError as error:
        raise ConfigError(
            f"replay_dir={directory!r} cannot hold the {size / 1e9:.1f} GB of observations: "
            f"{error.strerror or error}.\nMake that directory, use another one, or use a smaller "
            "--replay-size."
        ) from None


def _free_memory() -> int | None:
    """Return the bytes that this machine can still give; None where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = dict(line.split(":") for line in lines)["MemAvailable"].split()[0]
    return int(kib) * 1024
