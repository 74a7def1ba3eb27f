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
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

import headrace
from headrace.errors import ExportError
from headrace.interop.export.module import ExportedPolicy
from headrace.spec import Array

METADATA_FILE = "headrace.json"
"""The name of the metadata in the file of a program, which is a zip archive."""
_EXAMPLES = 2  # rows; of 1 and 0, torch.export makes constants
_DTYPE_CHECK = torch.ops.aten._assert_tensor_metadata.default
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
    """Write a program with its metadata; what is composed, such as an LSTM, is taken apart.

    Left out: the example inputs, what no output needs, and the source lines of the operations.
    """
    with quiet():
        program = program.run_decompositions()
        program.example_inputs = None
        _drop_unused(program)
        _drop_sources(program)
        torch.export.save(program, output, extra_files={METADATA_FILE: metadata})


def _drop_unused(program: ExportedProgram) -> None:
    """Remove operations and weights that no output needs, and symbols that no operation has."""
    graph, signature = program.graph, program.graph_signature
    needed = _needed(graph)
    for node in list(graph.nodes):
        if node.target is _DTYPE_CHECK and node.args[0] not in needed:
            graph.erase_node(node)  # or what it checks would be kept
    graph.eliminate_dead_code()
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    kept = []
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT or nodes[spec.arg.name].users:
            kept.append(spec)
            continue
        graph.erase_node(nodes[spec.arg.name])
        for tensors in (program.state_dict, program.constants):
            tensors.pop(spec.target, None)
    signature.input_specs[:] = kept
    program.graph_module.recompile()
    used = set[Any]().union(*(free_symbols(node.meta.get("val")) for node in graph.nodes))
    for symbol in program.range_constraints.keys() - used:
        del program.range_constraints[symbol]


def _needed(graph: Graph) -> set[Node]:
    """Return the nodes that the outputs of a graph are computed from."""
    found, waiting = set[Node](), [graph.output_node()]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _drop_sources(program: ExportedProgram) -> None:
    """Remove source lines with their directories, and addresses in memory, from the nodes."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            for name in ("stack_trace", "from_node"):
                node.meta.pop(name, None)


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
