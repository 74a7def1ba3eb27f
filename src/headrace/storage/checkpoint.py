"""Checkpoints: directories of safetensors and a manifest, complete or not there at all.

    checkpoints/step_000000012288/   policy_default.safetensors   weights and normalizers
                                     learner_default.safetensors  optimizer moments, running returns
                                     workers.safetensors          environments under way
                                     manifest.json                counters, specs, SHA-256 of files
    checkpoints/latest               the name of the newest, for people and scripts
    checkpoints/rows/                rows of replay buffers, which checkpoints share (`row_log.py`)

A checkpoint is written to a new directory, flushed, renamed, and then pointed to; the one before
is removed only afterwards. Reading unpickles nothing, and a file cannot name code to run.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

import headrace
from headrace.distributed.of_envs import OfEnvs
from headrace.distributed.ranks import Ranks
from headrace.errors import CheckpointError, HeadraceError, quoted
from headrace.spec import Agents, Array, EnvSpec
from headrace.storage.files import (
    flush_dir,
    memory_bytes,
    read_capped,
    refuse_trainers_file,
    write_flushed,
    write_whole,
)
from headrace.storage.manifest import FORMAT, MANIFEST, digest, read_manifest
from headrace.storage.row_log import FOLDER as ROWS
from headrace.storage.row_log import prune_rows, read_rows

LATEST = "latest"
_MOST_OF_LATEST = 1 << 10
_OLD_NAMES = {"workers": "samplers"}  # of files, before samplers were renamed to workers


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose checksums agree."""

    path: Path
    manifest: dict[str, Any]

    @property
    def sha256(self) -> str:
        """The SHA-256 of the manifest, which has those of all files."""
        return digest(self.manifest)

    @property
    def env_steps(self) -> int | None:
        """Env steps of the run until then; None: its directory has another name than at first.

        The manifest of a shared policy, whose directory has any name, says it.
        """
        step = re.fullmatch(r"step_(\d{12})", self.path.resolve().name)
        said = self.manifest.get("env_steps")
        return int(step[1]) if step else said if isinstance(said, int) else None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one of its files; CheckpointError if there are none."""
        file = self.path / self._file(name)
        try:
            # The header's shapes are checked against the file's size before memory is allocated.
            return dict(load(read_capped(file, memory_bytes(), CheckpointError)))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from None

    def arrays(self, name: str) -> dict[str, Array]:
        """Return the tensors of one of its files as NumPy arrays."""
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
    """Turn errors from malformed contents into CheckpointError."""
    try:
        yield
    except HeadraceError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint as headrace {headrace.__version__} writes them: "
            f"{quoted(error)}."
        ) from error


def write(
    parent: Path, env_steps: int, files: Mapping[str, Mapping[str, Any]], manifest: dict[str, Any]
) -> Path:
    """Write a checkpoint, and point `latest` to it.

    Args:
        files: file name (without suffix) -> named tensors or arrays.
        manifest: plain data beside format and checksums.

    Raises:
        OSError: the disk is full, for example; the earlier checkpoint stays, and no part of this.
    """
    parent.mkdir(mode=0o700, exist_ok=True)
    final = parent / f"step_{env_steps:012d}"
    new = parent / f".{final.name}.{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    try:
        new.mkdir(mode=0o700)
        checksums = {}
        for name, tensors in files.items():
            data = to_safetensors(tensors)
            checksums[f"{name}.safetensors"] = hashlib.sha256(data).hexdigest()
            write_flushed(new / f"{name}.safetensors", data)
        sealed = {"format": FORMAT, **manifest, "files": checksums}
        sealed["sha256"] = digest(sealed)
        write_flushed(new / MANIFEST, json.dumps(sealed, indent=1).encode())
        flush_dir(new)
        if final.exists():  # it was damaged, or `latest` was not written
            shutil.rmtree(final)
        os.rename(new, final)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
    flush_dir(parent)
    write_whole(parent / LATEST, final.name.encode())
    return final


def to_safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Return named tensors or arrays as the bytes of a safetensors file."""
    return save({key: _contiguous(tensor) for key, tensor in tensors.items()})


def from_safetensors(data: bytes) -> dict[str, Tensor]:
    """Undo `to_safetensors`: named tensors."""
    return load(data)


def prune(keep: int, written: Path) -> None:
    """Remove all but the `keep` newest checkpoints up to `written`, which was just written.

    Those with higher numbers are damaged: the run resumed from before them.
    """
    others = sorted(path for path in written.parent.glob("step_*") if path != written)
    earlier = [path for path in others if path < written]
    kept = earlier[-(keep - 1) :] if keep > 1 else []
    for path in (*others, *written.parent.glob(".step_*")):
        if path not in kept:
            shutil.rmtree(path)
    with contextlib.suppress(CheckpointError):  # of a damaged one, nobody knows what it needs
        prune_rows(written.parent, [read_manifest(path) for path in (*kept, written)])


def followed(path: Path) -> Path:
    """Return the checkpoint that a file `latest` names; any other path as it is."""
    if path.name != LATEST or not path.is_file():
        return path
    named = re.fullmatch(rb"step_\d{12}", read_capped(path, _MOST_OF_LATEST, CheckpointError))
    return path.with_name(named[0].decode()) if named else path


def newest(run_dir: Path, *, with_rows: bool = False) -> Checkpoint:
    """Return the newest whole checkpoint of a run, its `best`, or the checkpoint that `run_dir` is.

    A warning names damaged ones. The file `latest` stands for the checkpoint that it names.

    Args:
        with_rows: look at the rows of replay buffers as well, which a run needs to go on.

    Raises:
        CheckpointError: there is none.
    """
    run_dir = followed(run_dir)
    refuse_trainers_file(run_dir)
    if not run_dir.is_dir():
        raise CheckpointError(
            f"There is no directory {run_dir}.\nExpected a run's, as `headrace train` makes them "
            "(see runs/), its best/, or a checkpoint's."
        )
    if (run_dir / MANIFEST).is_file():
        return _read(run_dir, with_rows=with_rows)
    candidates = (*run_dir.glob("checkpoints/step_*"), *run_dir.glob("step_*"))
    for candidate in sorted(candidates, reverse=True):
        try:
            return _read(candidate, with_rows=with_rows)
        except CheckpointError as error:
            warnings.warn(f"{error} Passed over.", stacklevel=2)
    raise CheckpointError(
        f"{run_dir} holds no {'usable ' if candidates else ''}checkpoint "
        "(looked for checkpoints/step_*/manifest.json).\nA run writes one every "
        "--checkpoint-every-s seconds, and when it ends or is stopped, but none after an error.\n"
        "What ended before its first one can only be begun again, in another --run-dir."
    )


def _read(path: Path, *, with_rows: bool) -> Checkpoint:
    manifest = read_manifest(path)
    _check_files(path, path, manifest["files"])
    for entries in manifest.get("rows", {}).values() if with_rows else ():
        for entry in entries:
            _check_files(path, path.parent / ROWS, entry["files"])
    return Checkpoint(path, manifest)


def _check_files(path: Path, folder: Path, checksums: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the files of a checkpoint at `path` are as they were written."""
    for name, expected in checksums.items():
        file = folder / name
        if file.name != name or file.suffix != ".safetensors":
            raise CheckpointError(f"{path / MANIFEST} names a file that is none of ours: {name!r}.")
        try:
            if file.stat().st_size > memory_bytes():
                raise CheckpointError(f"{file} is larger than this machine's memory.")
            with file.open("rb") as opened:
                actual = hashlib.file_digest(opened, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from None
        if actual != expected:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's.")


SectionState = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Tensors or arrays by name, and plain data; {} where there is none."""


@dataclass(frozen=True)
class Section:
    """One part of a run in its checkpoints.

    Attributes:
        name: of the file of tensors, and of the plain data in the manifest.
        state: returns what is saved.
        load: takes back the tensors and the plain data.
        is_collective: `state` must be called on all ranks at once. Without it, all ranks hold the
            same state, and rank 0 may call it alone.
        rows: more of its state, of which each checkpoint writes only what is new.
    """

    name: str
    state: Callable[[], SectionState]
    load: Callable[[dict[str, Any], dict[str, Any]], object]
    is_collective: bool = False
    rows: OfEnvs | None = None


def module_section(name: str, module: nn.Module) -> Section:
    """Return the section of a module's parameters and buffers."""
    return Section(
        name, lambda: (module.state_dict(), {}), lambda tensors, _: module.load_state_dict(tensors)
    )


def restore(sections: Iterable[Section], saved: Checkpoint) -> None:
    """Load every section; CheckpointError if one is missing, or holds what no run writes."""
    sections = list(sections)
    if "counters" not in saved.manifest and any(each.name == "counters" for each in sections):
        raise CheckpointError(
            f"{saved.path} holds policies alone, and no run to go on with.\n"
            f"To begin a new run with their weights: headrace train ENV --init-from {saved.path}"
        )
    with as_written(saved.path):
        for section in sections:
            section.load(*saved.section(section.name))
            if section.rows is not None:
                read_rows(saved.path.parent, saved.manifest["rows"][section.name], section.rows)
                section.rows.mark_saved()


def check_fits(saved: EnvSpec, spec: EnvSpec, run_dir: Path) -> None:
    """Raise CheckpointError if the spaces of a checkpoint and of the environment differ."""
    differing = [
        f"  {role}: checkpoint {a.describe()}, environment {b.describe()}"
        for role, a, b in (
            ("observation", saved.observation, spec.observation),
            ("action", saved.action, spec.action),
        )
        if a != b
    ]
    if differing:
        raise CheckpointError(
            f"The checkpoint in {run_dir} is of another environment ({saved.id}, not {spec.id}):\n"
            + "\n".join(differing)
            + "\nName the environment that it was trained on, or start a new run."
        )


def policies(saved: Checkpoint) -> dict[str, tuple[EnvSpec, Agents]]:
    """Return the spec and the agents of each of a checkpoint's policies."""
    with as_written(saved.path):
        specs = {}
        for name, policy in saved.manifest["policies"].items():
            first, end = policy.get("agents", (0, 1))
            specs[name] = EnvSpec.from_json(policy["spec"]), Agents(first, end - first)
        return specs


def check_policies(
    saved: Mapping[str, tuple[EnvSpec, Agents]], spec: EnvSpec, run_dir: Path
) -> None:
    """Raise CheckpointError if saved policies do not fit the agents of an environment."""
    count = sum(agents.size for _, agents in saved.values())
    if count != spec.num_agents:
        raise CheckpointError(
            f"The checkpoint in {run_dir} is of another environment: its policies act for {count} "
            f"agents, and {spec.id} has {spec.num_agents}.\n"
            "Name the environment that it was trained on, or start a new run."
        )
    for saved_spec, agents in saved.values():
        check_fits(saved_spec, spec.for_agents(agents), run_dir)


def gather_arrays(ranks: Ranks, arrays: dict[str, Array]) -> dict[str, Array | Tensor]:
    """Return the named arrays of all ranks together; of one that several have, the greatest.

    That is `steps`, by which action noise is drawn: where workers never stop, ranks differ, and a
    resumed run must not draw the noise of the fastest one again.
    """
    if ranks.size == 1:
        return dict(arrays)
    gathered: dict[str, Array | Tensor] = {}
    for part in map(load, ranks.gather_bytes(to_safetensors(arrays))):
        for name, tensor in part.items():
            if isinstance(before := gathered.get(name), Tensor):
                tensor = torch.maximum(before, tensor)
            gathered[name] = tensor
    return gathered


def policy_name(saved: Checkpoint, wanted: str | None) -> str:
    """Return the name of the wanted policy, or of the only one; CheckpointError if neither is."""
    with as_written(saved.path):
        names = list(saved.manifest["policies"])
        if wanted in names:
            return str(wanted)
        if len(names) == 1:
            return str(names[0])
    missing = f", none of the name {wanted!r}" if wanted else ""
    raise CheckpointError(
        f"{saved.path} holds the policies {' and '.join(names)}{missing}.\nName one: load_policy("
        f'directory, policy="{names[0]}"), export --policy {names[0]}, or --frozen '
        f"{wanted or 'NAME'}=RUN_DIR:{names[0]}."
    )


def load_into(module: nn.Module, saved: Checkpoint, name: str) -> None:
    """Load a policy's tensors; CheckpointError if they are of another network."""
    module.load_state_dict(check_shapes(module, saved, name))


def check_shapes(module: nn.Module, saved: Checkpoint, name: str) -> dict[str, Tensor]:
    """Return a policy's tensors; CheckpointError if they are of another network."""
    tensors = saved.tensors(f"policy_{name}")
    here = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    there = {name: tuple(t.shape) for name, t in tensors.items()}
    if here != there:
        differing = [
            f"  {name}: checkpoint {there.get(name, 'has none')}, here {here.get(name, 'is none')}"
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]
        raise CheckpointError(
            f"The policy in {saved.path} is of another network:\n"
            + "\n".join(differing[:6])
            + (f"\n  ... and {len(differing) - 6} more" if len(differing) > 6 else "")
            + "\nUse the network's settings that it was trained with (in its config.json)."
        )
    return tensors


def _contiguous(tensor: Any) -> Tensor:
    if isinstance(tensor, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(tensor).reshape(tensor.shape))
    # A copy: safetensors refuses tensors that share memory.
    return tensor.detach().cpu().clone().contiguous()  # type: ignore[no-any-return]
