"""A policy that is shared: a directory of weights, settings, a card for people, and maybe a film.

    README.md                     the model card, which is not checked
    config.json                   the run's settings
    manifest.json                 specs, networks, SHA-256 of all files below and above
    policy_default.safetensors    weights and normalizers of each policy
    film.mp4                      the newest film of the run, if there is one

Nothing in it is executed or unpickled. The directory is read as a run's is (`load_policy`,
`headrace eval`). Left out: the card's text (`model_card.py`), and the hub (`hub.py`).
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import headrace
from headrace.config.policies import RANDOM
from headrace.errors import CheckpointError, ConfigError, RunDirError
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.storage.checkpoint import Checkpoint
from headrace.storage.files import memory_bytes, read_capped, write_flushed
from headrace.storage.manifest import MANIFEST, read_manifest

CARD, CONFIG, FILM = "README.md", "config.json", "film.mp4"
_OF_HUB = ".gitattributes"  # which the hub adds
_LOCAL = ("init_from", "data", "replay_dir")
"""Settings that name directories of the machine."""


def write_shared(
    config: Mapping[str, Any], saved: Checkpoint, card: str, film: Path | None, folder: Path
) -> None:
    """Write the directory of a shared policy, which must not exist; completely or not at all.

    Args:
        config: from `shareable_config`.
        card: text of the model card.

    Raises:
        CheckpointError: the checkpoint is gone, or damaged.
        RunDirError: it cannot be written.
    """
    with checkpoint.as_written(saved.path):
        described = saved.manifest["policies"]
        tensors = {f"policy_{name}": saved.tensors(f"policy_{name}") for name in described}
        beside = {CONFIG: (json.dumps(config, indent=1) + "\n").encode()}
        if film is not None:
            beside[FILM] = read_capped(film, memory_bytes(), RunDirError)
        manifest = {
            "headrace": headrace.__version__,
            "seed": saved.manifest["seed"],
            "env_steps": saved.env_steps,
            "policies": described,
            **{name: saved.manifest[name] for name in ("imported",) if name in saved.manifest},
            "beside": {name: hashlib.sha256(data).hexdigest() for name, data in beside.items()},
        }
    with rundir.writable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".headrace-") as scratch:
            new = checkpoint.write(Path(scratch), 0, tensors, manifest)
            for name, data in (beside | {CARD: card.encode()}).items():
                write_flushed(new / name, data)
            _let_others_read(new)
            new.rename(folder)


def _let_others_read(folder: Path) -> None:
    """Give a directory and its files the modes that new ones have, by the umask."""
    probe = folder.parent / "probe"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777
    for path in folder.iterdir():
        path.chmod(mode & 0o666)
    folder.chmod(mode)


def shareable_config(run_dir: Path) -> dict[str, Any]:
    """Return a run's config.json without the directories of this machine."""
    config = rundir.read_config(run_dir)
    settings = config["settings"]
    settings |= {name: "" for name in _LOCAL if name in settings}
    frozen = dict(settings.get("frozen", {}))
    settings["frozen"] = {name: of if of == RANDOM else "" for name, of in frozen.items()}
    settings["league_members"] = [of for of in settings.get("league_members", []) if of == RANDOM]
    return config


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse files that a shared policy does not have, such as pickles and code.

    Raises:
        CheckpointError: naming them.
    """
    known = {CARD, CONFIG, FILM, MANIFEST, _OF_HUB}
    found = set(names)
    unexpected = sorted(
        name
        for name in found - known
        if not (name.startswith("policy_") and name.endswith(".safetensors") and "/" not in name)
    )
    if unexpected:
        raise CheckpointError(
            f"{where} has files that no shared policy of Headrace has: "
            f"{', '.join(unexpected[:5])}.\nExpected {CARD}, {CONFIG}, {MANIFEST}, "
            f"policy_*.safetensors and {FILM}. Nothing of it was read."
        )
    if missing := sorted({CONFIG, MANIFEST} - found):
        raise CheckpointError(
            f"{where} is no shared policy of Headrace: it has no {' and no '.join(missing)}.\n"
            "Expected what `headrace push` writes."
        )


def names_in(folder: Path) -> list[str]:
    """Return the names of a directory's entries; a directory has a final slash.

    Raises:
        ConfigError: it is no directory.
    """
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file: expected the directory of a shared policy, or hf:USER/NAME.\n"
            "If it is an archive, unpack it first."
        )
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no directory: expected that of a shared policy, or hf:USER/NAME."
        )
    return [
        f"{path.name}{'/' if path.is_dir() else ' (a link)' if path.is_symlink() else ''}"
        for path in folder.iterdir()
    ]


def take_over(source: Path, run_dir: Path, place: str) -> dict[str, Any]:
    """Copy a shared policy, check the copy, and return its manifest.

    Args:
        source: whose names were checked.
        place: how messages name it.
        run_dir: a directory that does not exist, or is empty.

    Raises:
        CheckpointError: a file is missing or damaged.
        RunDirError: the directory is not empty, or cannot be written.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise RunDirError(f"{run_dir} exists already.\nName another directory: --run-dir.")
    with rundir.writable(run_dir):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=run_dir.parent, prefix=".headrace-") as scratch:
            copy = Path(scratch) / "policy"
            copy.mkdir()
            for path in source.iterdir():
                shutil.copyfile(path, copy / path.name, follow_symlinks=False)
            try:
                manifest = _checked(copy)
            except RunDirError as error:  # the copy is removed: the source is what people can find
                raise type(error)(str(error).replace(str(copy), place)) from None
            copy.rename(run_dir)
    return manifest


def _checked(folder: Path) -> dict[str, Any]:
    """Return the manifest of a copy, all of whose files but the card are as it says."""
    saved = checkpoint.newest(folder)  # the checksums of weights
    manifest = read_manifest(folder)
    with checkpoint.as_written(folder):
        listed = {*manifest["files"], *manifest["beside"], MANIFEST, CARD, _OF_HUB}
        if extra := sorted(path.name for path in folder.iterdir() if path.name not in listed):
            raise CheckpointError(f"The manifest does not name {', '.join(extra)}.")
        for name, expected in manifest["beside"].items():
            if name not in (CONFIG, FILM):
                raise CheckpointError(f"The manifest names a file that is none of ours: {name!r}.")
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise CheckpointError(f"{name} is damaged: its SHA-256 is not the manifest's.")
        for name in manifest["policies"]:
            saved.tensors(f"policy_{name}")
    rundir.read_config(folder)
    return manifest
