"""The rows of replay buffers on disk: each is written once, into files that checkpoints share.

    checkpoints/rows/learner_default_000000012288_0.safetensors    rows since the checkpoint before

A checkpoint's manifest names the files that hold the rows of its buffer, oldest first, and their
SHA-256. A file is removed once no checkpoint that is kept names it. Left out: which rows are new
(`replay/buffer.py`).
"""

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from headrace.distributed.of_envs import OfEnvs
from headrace.distributed.ranks import Ranks, gather_json
from headrace.errors import CheckpointError
from headrace.storage.files import flush_dir, memory_bytes, read_capped, write_flushed

FOLDER = "rows"


class RowLog:
    """The files of one section's rows.

    Args:
        folder: of the checkpoints.
        name: of the section.
        entries: those of the checkpoint that the run goes on from.
    """

    def __init__(
        self, folder: Path, name: str, rows: OfEnvs, entries: list[dict[str, Any]]
    ) -> None:
        self._folder, self._name, self._rows = folder / FOLDER, name, rows
        self._entries = entries

    def collect(self, ranks: Ranks) -> tuple[list[bytes], int]:
        """Return the new rows of each rank as files, and their least number in an environment."""
        tensors, least = self._rows.new_rows()
        return ranks.gather_bytes(save(tensors)), min(gather_json(ranks, least))

    def write(self, files: list[bytes], least: int, env_steps: int) -> list[dict[str, Any]]:
        """Write files, and return the entries of the manifest with them.

        Raises:
            OSError: the disk is full, for example.
        """
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        names = [f"{self._name}_{env_steps:012d}_{rank}.safetensors" for rank in range(len(files))]
        for name, data in zip(names, files, strict=True):
            write_flushed(self._folder / name, data)
        flush_dir(self._folder)
        checksums = {
            name: hashlib.sha256(data).hexdigest() for name, data in zip(names, files, strict=True)
        }
        # A new first learner may write again what the one before wrote at its end.
        before = [entry for entry in self._entries if not entry["files"].keys() & checksums.keys()]
        return self._needed([*before, {"files": checksums, "rows": least}])

    def _needed(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave out entries all of whose rows were overwritten by those of later ones."""
        later = 0
        for i in reversed(range(len(entries))):
            if later >= self._rows.capacity:
                return entries[i + 1 :]
            later += entries[i]["rows"]
        return entries

    def mark_saved(self, entries: list[dict[str, Any]]) -> None:
        """Note that a checkpoint with these entries was written."""
        self._entries = entries
        self._rows.mark_saved()


def read_rows(folder: Path, entries: list[dict[str, Any]], rows: OfEnvs) -> None:
    """Give a module the rows of a checkpoint.

    Args:
        folder: of the checkpoints.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for entry in entries:
        for name, expected in entry["files"].items():
            path = folder / FOLDER / name
            if path.name != name or path.suffix != ".safetensors":
                raise CheckpointError(f"A checkpoint names a file that is none of ours: {name!r}.")
            try:
                data = read_capped(path, memory_bytes(), CheckpointError)
                tensors = load(data)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}.") from None
            if hashlib.sha256(data).hexdigest() != expected:
                raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's.")
            rows.put_rows(tensors)


def prune_rows(folder: Path, manifests: list[dict[str, Any]]) -> None:
    """Remove the files that no checkpoint names any more."""
    named = {
        file
        for manifest in manifests
        for entries in manifest.get("rows", {}).values()
        for entry in entries
        for file in entry["files"]
    }
    for path in (folder / FOLDER).glob("*.safetensors"):
        if path.name not in named:
            path.unlink()
