"""The file of an exported policy: its format, its name, and what it does not overwrite."""

import os
import zipfile
from pathlib import Path
from typing import Literal, get_args

from headrace.errors import ConfigError
from headrace.interop.export.programs import METADATA_FILE
from headrace.interop.export.to_onnx import is_ours as is_our_onnx

Format = Literal["onnx", "torch-export"]
SUFFIX: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
_OF_SUFFIX = {suffix: format for format, suffix in SUFFIX.items()}


def format_of(wanted: Format | None, output: Path | None) -> Format:
    """Return the wanted format, or that of the file's suffix, or ONNX; ConfigError."""
    if wanted is not None and wanted not in get_args(Format):
        raise ConfigError(f"format={wanted!r}: expected one of {', '.join(get_args(Format))}.")
    named = None
    if output is not None and not output.is_dir():
        named = _OF_SUFFIX.get(output.suffix.lower())
    if wanted and named and wanted != named:
        raise ConfigError(
            f"{output} has the suffix of --format {named}, and the format is {wanted}.\n"
            f"Name a file that ends in {SUFFIX[wanted]}, or choose --format {named}."
        )
    return wanted or named or "onnx"


def refuse_existing(path: Path, format: Format) -> None:
    """Raise ConfigError if there is something at a path, unless it is such a file of ours."""
    if os.path.lexists(path) and not _is_ours(path, format):
        raise ConfigError(
            f"{path} exists already, and is no {format} file of Headrace's.\n"
            "Name another file: --output FILE."
        )


def _is_ours(path: Path, format: Format) -> bool:
    if not path.is_file():
        return False
    if format == "onnx":
        return is_our_onnx(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(f"/{METADATA_FILE}") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False
