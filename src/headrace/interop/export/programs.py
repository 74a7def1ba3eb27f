"""Programs of torch.export: what a module computes as a graph of operations, for any batch.

Left out: the module (`module.py`), and ONNX (`to_onnx.py`).
"""

import contextlib
import io
import linecache
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

import headrace
from headrace.errors import ExportError
from headrace.interop.export.module import ExportedPolicy
from headrace.spec import Array

METADATA_FILE = "headrace.json"
"""The name of the metadata in the file of a program, which is a zip archive."""
_EXAMPLES = 2  # rows; of 1 and 0, torch.export makes constants
_NO_USER = [Path(torch.__file__).parent, Path(headrace.__file__).parent]
_NO_USER += [Path(sysconfig.get_path("stdlib"))]


def program_of(module: ExportedPolicy, example: Mapping[str, Tensor]) -> ExportedProgram:
    """Return the program of a policy.

    Args:
        example: inputs of two rows or more.

    Raises:
        ExportError: torch.export cannot trace the network, with the line of the user's code.
    """
    inputs = {name: tensor[:_EXAMPLES] for name, tensor in example.items()}
    batch = torch.export.Dim("batch")
    shapes = ({name: {0: batch} for name in inputs},)
    first_error: Exception | None = None
    # The user's own forward may be traced by either way alone: the second one takes len(tensor).
    for strict in (False, True):
        try:
            with quiet(), torch.no_grad():
                return torch.export.export(module, (inputs,), dynamic_shapes=shapes, strict=strict)
        except Exception as error:  # of many types, which depend on the user's code
            first_error = first_error or error
    assert first_error is not None
    raise not_traced(first_error, _frames_of(first_error)) from first_error


def save(program: ExportedProgram, output: io.BytesIO, metadata: str) -> None:
    """Write a program with its metadata; what is composed, such as an LSTM, is taken apart."""
    with quiet():
        program = program.run_decompositions()
        torch.export.save(program, output, extra_files={METADATA_FILE: metadata})


class TorchSession:
    """A program that was saved, loaded to compute with arrays."""

    def __init__(self, file: Path) -> None:
        with quiet():
            self._module = torch.export.load(file).module()
        self.name = f"torch {torch.__version__}"

    @torch.no_grad()
    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in self._module(tensors).items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch and its exporter print, warn of and log away from the user."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def not_traced(error: Exception, frames: Iterable[tuple[str, int]]) -> ExportError:
    """Return the error that names the user's line: the innermost of the frames (file, line)."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    said = str(first).strip().partition("\n\n")[0]
    lines = [frame for frame in frames if _is_of_user(frame[0])]
    place = "in Headrace's own network"
    if lines:
        file, line = lines[-1]
        place = f"at {file}:{line}\n    {linecache.getline(file, line).strip()}"
    return ExportError(
        f"This network cannot be exported, {place}\n{type(first).__name__}: {said}\n"
        "Expected a network that torch.export can trace for a batch of any size: tensor operations "
        "that ONNX has, no Python branch on a value, no NumPy, no size of the batch as a number."
    )


def _frames_of(error: BaseException) -> list[tuple[str, int]]:
    """Return (file, line) of an error's stack; those that its message quotes come last."""
    stack = traceback.extract_tb(error.__traceback__)
    found = [(frame.filename, frame.lineno or 0) for frame in stack]
    return found + frames_in(str(error))


def frames_in(text: str) -> list[tuple[str, int]]:
    """Return (file, line) of each frame of a stack that is printed in a text."""
    return [(file, int(line)) for file, line in re.findall(r'File "([^"]+)", line (\d+)', text)]


def _is_of_user(file: str) -> bool:
    path = Path(file)
    return path.is_file() and not any(path.is_relative_to(folder) for folder in _NO_USER)
