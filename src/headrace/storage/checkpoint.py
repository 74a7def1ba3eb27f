"""Checkpoints: directories of safetensors and a manifest, complete or not there at all.

    checkpoints/step_000000012288/   policy_default.safetensors   weights and normalizers
                                     learner_default.safetensors  optimizer moments, running returns
                                     workers.safetensors          environments under way
                                     manifest.json                counters, specs, SHA-256 of files
    checkpoints/latest               the name of the newest, for people and scripts

A checkpoint is written to a new directory, flushed, renamed, and then pointed to; the one before
is removed only afterwards. Nothing on the way back in is unpickled, and no code is named by a file.
Left out: what the tensors mean (whoever gives them).
"""

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

import headrace
from headrace.distributed.ranks import Ranks
from headrace.errors import CheckpointError, HeadraceError
from headrace.spec import Agents, Array, EnvSpec
from headrace.storage.files import flush_dir, read_capped, write_flushed, write_whole

FORMAT = 1
_MANIFEST = "manifest.json"
_OLD_NAMES = {"workers": "samplers"}  # of files, in checkpoints of headrace 0.1.0
_MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose checksums agree."""

    path: Path
    manifest: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The named tensors of one of its files; CheckpointError if it holds none."""
        file = self.path / self._file(name)
        try:
            # Its header's shapes are held against its size before anything is allocated.
            return dict(load(read_capped(file, _memory_bytes(), CheckpointError)))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from None

    def arrays(self, name: str) -> dict[str, Array]:
        """The same as NumPy arrays."""
        return {key: tensor.numpy() for key, tensor in self.tensors(name).items()}

    def section(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a section's tensors and plain data, {} for either; KeyError if it has neither."""
        if self._file(name) in self.manifest["files"]:
            return self.tensors(name), self.manifest.get(name, {})
        return {}, self.manifest[name]

    def _file(self, name: str) -> str:
        if (old := f"{_OLD_NAMES.get(name)}.safetensors") in self.manifest["files"]:
            return old
        return f"{name}.safetensors"


@contextlib.contextmanager
def as_written(path: Path) -> Iterator[None]:
    """CheckpointError if what is read within is not what a run writes, checksums or not."""
    try:
        yield
    except HeadraceError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint as headrace {headrace.__version__} writes them: {error!r}."
        ) from error


def write(
    parent: Path,
    env_steps: int,
    files: Mapping[str, Mapping[str, Any]],
    manifest: dict[str, Any],
) -> Path:
    """Write one checkpoint, and point `latest` to it.

    Args:
        parent: `checkpoints` or `best` in the run's directory.
        env_steps: names it.
        files: file name (without suffix) -> named tensors or arrays.
        manifest: plain data that goes into the manifest beside format and checksums.

    Raises:
        OSError: the disk is full, for example; nothing of it is left, and the one before is whole.
    """
    parent.mkdir(mode=0o700, exist_ok=True)
    final = parent / f"step_{env_steps:012d}"
    new = parent / f".{final.name}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    try:
        _write_parts(new, files, manifest)
        if final.exists():  # passed over as damaged, or written without the pointer
            shutil.rmtree(final)
        os.rename(new, final)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    flush_dir(parent)
    write_whole(parent / "latest", final.name.encode())
    return final


def _write_parts(
    new: Path, files: Mapping[str, Mapping[str, Any]], manifest: dict[str, Any]
) -> None:
    new.mkdir(mode=0o700)
    sums = {}
    for name, tensors in files.items():
        data = to_safetensors(tensors)
        sums[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
        write_flushed(new / f"{name}.safetensors", data)
    whole = {"format": FORMAT, **manifest, "files": sums}
    whole["sha256"] = _digest(whole)
    write_flushed(new / _MANIFEST, json.dumps(whole, indent=1).encode())
    flush_dir(new)


def to_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Named tensors or arrays as the bytes of a safetensors file."""
    return save({key: _contiguous(tensor) for key, tensor in tensors.items()})


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
    kept = earlier[-(keep - 1) :] if keep > 1 else []
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
        "(looked for checkpoints/step_*/manifest.json).\nA run writes one every "
        "--checkpoint-every-s seconds, and when it ends or is stopped, but none after an error.\n"
        "What ended before its first one can only be begun again, in another --run-dir."
    )


def _read(path: Path) -> Checkpoint:
    try:
        read = read_capped(path / _MANIFEST, _MAX_MANIFEST_BYTES, CheckpointError)
        manifest = json.loads(read)
        sums = dict(manifest["files"])
        number, digest = manifest["format"], manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
            if file.stat().st_size > _memory_bytes():
                raise CheckpointError(f"{file} is larger than this machine's memory.")
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


def policies(saved: Checkpoint) -> dict[str, tuple[EnvSpec, Agents]]:
    """What each of its policies is offered, and the agents that it acts for."""
    with as_written(saved.path):
        found = {}
        for name, of in saved.manifest["policies"].items():
            first, end = of.get("agents", (0, 1))
            found[name] = EnvSpec.from_json(of["spec"]), Agents(first, end - first)
        return found


def check_policies(
    theirs: Mapping[str, tuple[EnvSpec, Agents]], spec: EnvSpec, run_dir: Path
) -> None:
    """`check_fits`, of each policy with what its agents are offered here.

    Args:
        theirs: of the checkpoint; see `policies`.
        spec: of the environment.
        run_dir: named in messages.

    Raises:
        CheckpointError: spaces differ, or the number of agents.
    """
    count = sum(agents.size for _, agents in theirs.values())
    if count != spec.num_agents:
        raise CheckpointError(
            f"The checkpoint in {run_dir} is of another environment: its policies act for {count} "
            f"agents, and {spec.id} has {spec.num_agents}.\n"
            "Name the environment that it was trained on, or start a new run."
        )
    for of, agents in theirs.values():
        check_fits(of, spec.of(agents), run_dir)


def gather_arrays(ranks: Ranks, arrays: dict[str, Array]) -> dict[str, Array | Tensor]:
    """The named arrays of all ranks together."""
    if ranks.size == 1:
        return dict(arrays)
    together: dict[str, Array | Tensor] = {}
    for part in ranks.gather_bytes(to_safetensors(arrays)):
        together |= load(part)
    return together


def policy_name(saved: Checkpoint, wanted: str | None) -> str:
    """The name of one of its policies: the one that is wanted, or the only one.

    Raises:
        CheckpointError: there are several others.
    """
    with as_written(saved.path):
        names = list(saved.manifest["policies"])
        if wanted in names:
            return str(wanted)
        if len(names) == 1:
            return str(names[0])
    raise CheckpointError(
        f"{saved.path} holds the policies {' and '.join(names)}"
        + (f", none of the name {wanted!r}." if wanted else ".")
        + '\nName one: load_policy(directory, policy="'
        + names[0]
        + f'"), or --frozen {wanted or "NAME"}=RUN_DIR:{names[0]}.'
    )


def load_into(module: nn.Module, saved: Checkpoint, name: str) -> None:
    """Load a policy's tensors.

    Raises:
        CheckpointError: they are of another network.
    """
    module.load_state_dict(check_shapes(module, saved, name))


def check_shapes(module: nn.Module, saved: Checkpoint, name: str) -> dict[str, Tensor]:
    """A policy's tensors; CheckpointError if they are of another network."""
    tensors = saved.tensors(f"policy_{name}")
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
    return tensors


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _contiguous(tensor: Any) -> Tensor:
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(tensor).reshape(tensor.shape))
    # A copy: safetensors refuses tensors that share memory.
    return tensor.detach().cpu().clone().contiguous()  # type: ignore[no-any-return]
