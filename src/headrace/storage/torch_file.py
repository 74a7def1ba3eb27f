"""Reads what other programs have written with `torch.save`, without running anything of it.

Left out: Headrace's own files, which are safetensors (`checkpoint.py`).
"""

from pathlib import Path
from typing import IO, Any

import torch

from headrace.errors import CheckpointError


def load_plain(file: Path | IO[bytes], name: str, expected: str) -> Any:
    """Return the tensors and plain data in a file that torch wrote, on the CPU.

    Args:
        name: of the file, for the error.
        expected: the end of the error: what the file should be.

    Raises:
        CheckpointError: it is damaged, or has more than tensors and plain data.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of what its unpickler refuses, torch raises errors of any class
        raise CheckpointError(
            f"{name} cannot be read as tensors and plain data, and nothing of it was run.\n"
            f"torch says: {(str(error) or repr(error)).splitlines()[0]}\n{expected}"
        ) from None
