"""The manifest of a checkpoint, read without its tensors. This file imports nothing heavy."""

import hashlib
import json
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError
from headrace.storage.files import read_capped

FORMAT = 1
MANIFEST = "manifest.json"
_MAX_BYTES = 1 << 20


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; CheckpointError if it is not as it was written."""
    try:
        manifest: dict[str, Any] = json.loads(
            read_capped(path / MANIFEST, _MAX_BYTES, CheckpointError)
        )
        manifest["files"] = dict(manifest["files"])
        number, sealed = manifest["format"], manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST} is missing or damaged ({error}).") from None
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {number}; this version of headrace reads {FORMAT}."
        )
    if sealed != digest(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: its SHA-256 does not match.")
    return manifest


def digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest, but for the field that holds it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
