"""ONNX: a program in the form that other runtimes take, and onnxruntime, which runs it.

Left out: the program (`programs.py`), and weights in a file of their own, beyond ONNX's 2 GB.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from headrace.catalog import extras
from headrace.errors import ExportError, MissingExtraError, install_command
from headrace.interop.export.module import ExportedPolicy
from headrace.interop.export.normal import ndtri
from headrace.interop.export.programs import frames_in, not_traced, quiet
from headrace.spec import Array

OPSET = 18
"""The version of ONNX's operators: the oldest that torch's exporter writes."""
_LACKING: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.special_ndtri.default: ndtri}
"""Operations that ONNX lacks, by others."""
_MOST_BYTES = (1 << 31) - 1  # of one file, by ONNX's format


def check_packages() -> None:
    """Raise MissingExtraError without a package of the `export` extra."""
    if missing := sorted(extras.missing("headrace", "export")):
        raise MissingExtraError(
            f"To export to ONNX, {' and '.join(missing)} must be installed.\n"
            f"To install what is missing: {install_command('export')}\n"
            "--format torch-export needs nothing more."
        )


def is_ours(file: Path) -> bool:
    """Return whether a file is an ONNX file that Headrace has written."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(file, format="protobuf", load_external_data=False)
    except (OSError, DecodeError):
        return False
    return any(entry.key == "headrace" for entry in model.metadata_props)


def to_onnx(program: ExportedProgram, module: ExportedPolicy, metadata: Mapping[str, str]) -> bytes:
    """Return a program as an ONNX file.

    Raises:
        ExportError: ONNX lacks an operation of the network, or the file would be too large.
    """
    if any(node.target in _LACKING for node in program.graph.nodes):
        with quiet():
            program = program.run_decompositions(_LACKING)
    try:
        with quiet():
            converted: Any = torch.onnx.export(
                program,
                input_names=[array.name for array in module.inputs],
                output_names=[array.name for array in module.outputs],
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
            )
            converted.model.metadata_props.update(metadata)
            for node in converted.model.graph.all_nodes():
                node.metadata_props.clear()  # it has source lines, with their directories
            model = converted.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise not_traced(error, _frames_of_node(program, str(error))) from error
    if (size := model.ByteSize()) > _MOST_BYTES:
        raise ExportError(
            f"The policy has {size:,} bytes, and an ONNX file may have {_MOST_BYTES:,}.\n"
            "Use --format torch-export."
        )
    data: bytes = model.SerializeToString()
    return data


class OnnxSession:
    """A file, loaded by onnxruntime on the CPU.

    Args:
        num_threads: of an operation; 0: as onnxruntime chooses.
    """

    def __init__(self, file: Path, num_threads: int = 0) -> None:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        options.intra_op_num_threads = num_threads
        self._session = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]
        self.name = f"onnxruntime {onnxruntime.__version__}"

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name."""
        arrays = self._session.run(self._names, dict(inputs))
        return dict(zip(self._names, arrays, strict=True))


def _frames_of_node(program: ExportedProgram, said: str) -> list[tuple[str, int]]:
    """Return the stack of the operation that an error's message names."""
    named = re.search(r"translating node %(\w+) .*?target=torch\.ops\.\w+\.(\w+)", said)
    for node in program.graph.nodes if named else ():
        # The exporter has taken operations apart meanwhile: `special_sin` may have become `sin`.
        if named and (node.name == named[1] or named[2] in str(node.target)):
            return frames_in(node.meta.get("stack_trace") or "")
    return []
