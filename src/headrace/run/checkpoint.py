"""Checkpoints: directories of safetensors and a manifest, complete or not there at all.

    checkpoints/step_000000012288/   policy_default.safetensors   weights and normalizers
                                     learner_default.safetensors  optimizer moments, running returns
                                     samplers.safetensors         environments under way
                                     manifest.json                counters, specs, SHA-256 of files
    checkpoints/latest               the name of the newest, for people and scripts

A checkpoint is written to a new directory, flushed, renamed, and then pointed to; the one before
is removed only afterwards. Nothing on the way back in is unpickled, and no code is named by a file.
Left out: what the tensors mean (whoever gives them).
"""

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from headrace.errors import CheckpointError
from headrace.ranks import Ranks
from headrace.spec import Array, EnvSpec

FORMAT = 1
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose checksums agree."""

    path: Path
    manifest: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The named tensors of one of its files."""
        return dict(load((self.path / f"{name}.safetensors").read_bytes()))

    def arrays(self, name: str) -> dict[str, Array]:
        """The same as NumPy arrays."""
        return {key: tensor.numpy() for key, tensor in self.tensors(name).items()}


def write(
    parent: Path, env_steps: int, files: dict[str, dict[str, Any]], manifest: dict[str, Any]
) -> Path:
    """Write one checkpoint, and point `latest` to it.

    Args:
        parent: `checkpoints` or `best` in the run's directory.
        env_steps: names it.
        files: file name (without suffix) -> named tensors or arrays.
        manifest: plain data that goes into the manifest beside format and checksums.
    """
    parent.mkdir(mode=0o700, exist_ok=True)
    final = parent / f"step_{env_steps:012d}"
    new = parent / f".{final.name}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    sums = {}
    for name, tensors in files.items():
        data = save({key: _contiguous(tensor) for key, tensor in tensors.items()})
        sums[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
        _write_flushed(new / f"{name}.safetensors", data)
    whole = {"format": FORMAT, **manifest, "files": sums}
    whole["sha256"] = _digest(whole)
    _write_flushed(new / _MANIFEST, json.dumps(whole, indent=1).encode())
    _flush_dir(new)
    if final.exists():  # it was passed over as damaged: a run never saves the same step twice
        shutil.rmtree(final)
    new.rename(final)
    _flush_dir(parent)
    pointer = parent / ".latest.new"
    _write_flushed(pointer, final.name.encode())
    pointer.rename(parent / "latest")
    _flush_dir(parent)
    return final


def prune(keep: int, written: Path) -> None:
    """Remove old checkpoints, damaged ones, and what interrupted writers left.

    Args:
        keep: how many to keep, the one just written among them.
        written: that one. Any with a higher number was passed over as damaged when the run went on
            from an earlier one.
    """
    parent = written.parent
    others = sorted(path for path in parent.glob("step_*") if path != written)
    earlier = [path for path in others if path < written]
    kept = earlier[len(earlier) - (keep - 1) :] if keep > 1 else []
    for path in others:
        if path not in kept:
            shutil.rmtree(path)
    for left in parent.glob(".step_*"):
        shutil.rmtree(left)


def newest(run_dir: Path) -> Checkpoint:
    """The newest checkpoint that is whole; one that is not is named in a warning and passed over.

    Args:
        run_dir: a run directory, its `best`, or one checkpoint's own directory.

    Raises:
        CheckpointError: there is none.
    """
    if not run_dir.is_dir():
        raise CheckpointError(
            f"There is no directory {run_dir}.\nExpected a run's, as `headrace train` makes them "
            "(see runs/), its best/, or a checkpoint's."
        )
    if (run_dir / _MANIFEST).is_file():
        return _read(run_dir)
    found = (*run_dir.glob("checkpoints/step_*"), *run_dir.glob("step_*"))
    candidates = sorted(found, reverse=True)
    for candidate in candidates:
        try:
            return _read(candidate)
        except CheckpointError as error:
            warnings.warn(f"{error} Passed over.", stacklevel=2)
    raise CheckpointError(
        f"{run_dir} holds no {'usable ' if candidates else ''}checkpoint "
        "yet (looked for checkpoints/step_*/manifest.json).\nA run writes one every "
        "--checkpoint-every-s seconds, and one when it ends or is stopped."
    )


def _read(path: Path) -> Checkpoint:
    try:
        if (path / _MANIFEST).stat().st_size > _MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path / _MANIFEST} is larger than any manifest.")
        manifest = json.loads((path / _MANIFEST).read_bytes())
        sums = dict(manifest["files"])
        number, digest = manifest["format"], manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} is missing or damaged ({error}).") from None
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {number}; this version of headrace reads {FORMAT}."
        )
    if digest != _digest(manifest):
        raise CheckpointError(f"{path / _MANIFEST} is damaged: its SHA-256 is not its own.")
    for name, expected in sums.items():
        file = path / name
        if file.name != name or file.suffix != ".safetensors":
            raise CheckpointError(
                f"{path / _MANIFEST} names a file that is none of ours: {name!r}."
            )
        try:
            with file.open("rb") as opened:
                actual = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from None
        if actual != expected:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")
    return Checkpoint(path, manifest)


def check_fits(theirs: EnvSpec, spec: EnvSpec, run_dir: Path) -> None:
    """A checkpoint of another environment could load, and would then act on nonsense.

    Raises:
        CheckpointError: the spaces of the checkpoint (`theirs`) and the environment differ.
    """
    differing = [
        f"  {role}: checkpoint {a.describe()}, environment {b.describe()}"
        for role, a, b in (
            ("observation", theirs.observation, spec.observation),
            ("action", theirs.action, spec.action),
        )
        if a != b
    ]
    if differing:
        raise CheckpointError(
            f"The checkpoint in {run_dir} is of another environment ({theirs.id}, not {spec.id}):\n"
            + "\n".join(differing)
            + "\nName the environment that it was trained on, or start a new run."
        )


def gathered(ranks: Ranks, arrays: dict[str, Array]) -> dict[str, Array | Tensor]:
    """The named arrays of all ranks together."""
    if ranks.size == 1:
        return dict(arrays)
    together: dict[str, Array | Tensor] = {}
    for part in ranks.gather_bytes(save({k: _contiguous(a) for k, a in arrays.items()})):
        together |= load(part)
    return together


def load_into(module: nn.Module, saved: Checkpoint) -> None:
    """Load the policy's tensors.

    Raises:
        CheckpointError: they are of another network.
    """
    tensors = saved.tensors("policy_default")
    own = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    theirs = {name: tuple(t.shape) for name, t in tensors.items()}
    if own != theirs:
        differing = [
            f"  {name}: checkpoint {theirs.get(name, 'has none')}, here {own.get(name, 'is none')}"
            for name in sorted(own.keys() | theirs.keys())
            if own.get(name) != theirs.get(name)
        ]
        raise CheckpointError(
            f"The policy in {saved.path} is of another network:\n"
            + "\n".join(differing[:6])
            + (f"\n  ... and {len(differing) - 6} more" if len(differing) > 6 else "")
            + "\nUse the network's settings that it was trained with (in its config.json)."
        )
    module.load_state_dict(tensors)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _contiguous(tensor: Any) -> Tensor:
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(tensor).reshape(tensor.shape))
    # A copy: safetensors refuses tensors that share memory.
    return tensor.detach().cpu().clone().contiguous()  # type: ignore[no-any-return]


def _write_flushed(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
