"""The memory and the file that a replay buffer takes: checked, and made, at the start."""

import math
import mmap
import os
import tempfile

import torch

from headrace.batch import columns
from headrace.errors import ConfigError
from headrace.machine.limits import available_bytes
from headrace.spec import EnvSpec


def obs_bytes(spec: EnvSpec) -> int:
    """Return the bytes of an observation."""
    layout = columns(spec, {}, 1, 1, capacity=0)
    names = [name for name in layout if name.startswith("obs")]
    return sum(math.prod(layout[name][0][2:]) * layout[name][1].itemsize for name in names)


def row_bytes(spec: EnvSpec, *, prioritized: bool = False, hindsight: bool = False) -> int:
    """Return the memory of one row, in bytes; that of a priority's sums is left out."""
    layout = columns(spec, {}, 1, 1, capacity=0)
    names = "action", "reward", "terminated", "truncated"
    sizes = [math.prod(layout[name][0][2:]) * layout[name][1].itemsize for name in names]
    in_list = torch.int64.itemsize  # of the transitions
    frame = obs_bytes(spec) // frames_in(spec)
    more = torch.float64.itemsize * prioritized + 2 * torch.int64.itemsize * hindsight
    return frame + sum(sizes) + in_list + more


def frames_in(spec: EnvSpec) -> int:
    """Return how many frames an observation is a stack of; 1 for any other observation."""
    return max(1, spec.num_frames) if spec.observation.kind == "box" else 1


def check_memory(
    spec: EnvSpec,
    size: int,
    device: torch.device,
    directory: str = "",
    *,
    prioritized: bool,
    hindsight: bool = False,
    taken: int = 0,
    num_ranks: int = 1,
    num_local: int = 1,
) -> int:
    """Raise ConfigError if a device cannot have the buffer, or does not have the memory for it.

    On a CPU, rows take memory when they are first written. So without this check the kernel would
    end the process hours later.

    Args:
        size: rows of all ranks.
        directory: of the file that holds the observations; "": the device's memory holds them.
        taken: bytes that other buffers of this process will take.
        num_ranks: each has its part of the rows.
        num_local: how many of them share the memory of a CPU.

    Returns:
        The bytes that this rank's buffer will take.
    """
    row = row_bytes(spec, prioritized=prioritized, hindsight=hindsight)
    is_cpu = device.type == "cpu"
    if directory and not is_cpu:
        raise ConfigError(
            f"replay_dir={directory!r}, but the learner is on {device}, and its buffer is in the "
            'memory there.\nUse --replay-dir "", or --device cpu.'
        )
    free = available_bytes() // num_local if is_cpu else _free_gpu_memory(device)
    if directory:
        row -= obs_bytes(spec) // frames_in(spec)
    needed = size // num_ranks * row
    if needed + taken <= free:
        return needed
    where, other = "memory", ", or --replay-dir DIR to keep the observations on a disk"
    if directory:
        other = ""
    elif not is_cpu:
        where, other = "GPU memory", ", or --device cpu"
    for_each = f" for each of {num_local} learners here" if num_local > 1 and is_cpu else ""
    which = "the buffer" if num_ranks == 1 else f"the part of each of {num_ranks} learners"
    raise ConfigError(
        f"replay_size={size}: {which} needs {needed / 1e9:.1f} GB, {row} bytes for a "
        f"transition, and {(free - taken) / 1e9:.1f} GB of {where} are free{for_each}.\n"
        f"Use --replay-size {int(0.8 * (free - taken) / row) * num_ranks} or less{other}."
    )


def check_room(num_rows: int, room: int) -> None:
    """Raise ConfigError if a batch has more rows of one environment than the buffer keeps."""
    if num_rows > room:
        raise ConfigError(
            f"A batch has {num_rows} rows of one environment, with the older frames of each "
            f"episode, but the buffer keeps {room}.\nUse a --replay-size that is "
            f"{math.ceil(num_rows / room)} times as large, or a smaller --num-steps."
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


def _free_gpu_memory(device: torch.device) -> int:
    """Return the bytes that a GPU can still give, those that torch keeps for later included."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
