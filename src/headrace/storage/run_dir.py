"""The directory of a run: created, locked, marked during a run, described in config.json."""

import contextlib
import faulthandler
import fcntl
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config.old_names import settings_of_file
from headrace.distributed import stuck
from headrace.errors import CheckpointError, HeadraceError, RunDirError, UsageError, quoted
from headrace.storage.files import read_capped, refuse_trainers_file, write_whole
from headrace.storage.metrics import FILE as METRICS

_CONFIG = "config.json"
STUDY = "study.json"  # in the directory of a study, which has many runs below it
_MARK = ".running"
_ERROR = "error.txt"
_SIZES = ("num_envs", "num_learners", "envs_per_vector")
_KINDS = {"env": str, "env_kwargs": dict, "algo": str, "seed": int, "num_workers": int}
_KINDS |= {"lag": int, "device": str, "cluster": str}
_KINDS |= {"wrapper": list, "model": str, **dict.fromkeys(_SIZES, int)}
_MAX_CONFIG_BYTES = 1 << 20
_MAX_ERROR = 1 << 16  # characters, the last of its text


def default(env: str, algo: str, seed: int) -> Path:
    """Return an unused name below `runs/`, with environment, algorithm, seed and time."""
    return unused(f"{env}_{algo}_s{seed}")


def unused(words: str) -> Path:
    """Return an unused name below `runs/`: the words, in letters that a file may have, and time."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in words)
    stem = f"{plain}_{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{stem}_{number}"
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Create the directory if needed (mode 0700) and lock it, or raise RunDirError."""
    with writable(path):
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
        fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    if not _lock(fd):
        owner = os.read(fd, 32).decode() or "unknown"
        os.close(fd)
        raise RunDirError(
            f"The directory {path} is in use by process {owner}.\n"
            "Wait for it, stop it, or choose another directory: --run-dir, for a study --study."
        )
    try:
        with writable(path):
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
        yield
    finally:
        if not any((path / name).exists() for name in (_CONFIG, STUDY)):
            # Nothing began: leave no trace.
            with contextlib.suppress(OSError):  # it is gone, or something else is in it
                (path / ".lock").unlink(missing_ok=True)
                path.rmdir()
        os.close(fd)  # the last: until the file is gone, nobody else may lock it


def _lock(fd: int) -> bool:
    """Lock a file; False if a run holds it. Whoever only looks (`is_locked`) is waited for."""
    while not _takes(fd, fcntl.LOCK_EX):
        if not _takes(fd, fcntl.LOCK_SH):
            return False
    return True


def _takes(fd: int, kind: int) -> bool:
    """Take a lock of a file, in place of one that `fd` has; False if another's is in the way."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def is_locked(path: Path) -> bool:
    """Return whether a process holds the run's lock, without disturbing it or writing anything."""
    try:
        fd = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False  # a copy of a run has no lock
    try:
        return not _takes(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Mark:
    """What a running process says of itself in the run's directory.

    Attributes:
        stacks: where a crash of a library leaves Python's stack; "": nowhere.
        may_have_workers: True if the environments run in this process and could run in workers.
    """

    pid: int
    host: str
    stacks: str
    may_have_workers: bool


@contextlib.contextmanager
def marked(path: Path, *, may_have_workers: bool) -> Iterator[None]:
    """Keep a mark in the directory within the `with`; RunDirError if there is no room.

    An exception removes it, and so does the end of a stuck process. What ends the process at once
    (`os._exit`, a crash, SIGKILL, a power cut) leaves it behind. An exception is written down, for
    `error_of`; a later process of the run removes what the one before it has written.
    """
    mark = Mark(os.getpid(), os.uname().nodename, _place_of_stacks(), may_have_workers)
    with writable(path):
        write_whole(path / _MARK, json.dumps(asdict(mark)).encode())
    remove = partial((path / _MARK).unlink, missing_ok=True)
    stuck.before_end.append(remove)
    try:
        (path / _ERROR).unlink(missing_ok=True)
        yield
    except Exception as error:
        # Without a config nothing began, and the directory is to go. What was refused did not fail.
        is_refusal = isinstance(error, UsageError | CheckpointError)
        if (path / _CONFIG).exists() and not is_refusal:
            with contextlib.suppress(OSError):  # no room may be what the error is about
                write_whole(path / _ERROR, _described(error).encode())
        raise
    finally:
        stuck.before_end.remove(remove)
        remove()


def _described(error: Exception) -> str:
    """Return an error's message; with its traceback if it is none of ours."""
    is_ours = isinstance(error, HeadraceError)
    text = str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip()
    return text[-_MAX_ERROR:] + "\n"


def error_of(path: Path) -> str:
    """Return the error that ended the last process of the run; "" if none did.

    Raises:
        RunDirError: the file is not one of Headrace's.
    """
    try:
        text = read_capped(path / _ERROR, _MAX_CONFIG_BYTES, RunDirError)
    except FileNotFoundError:
        return ""
    return text.decode(errors="replace").rstrip()


def _place_of_stacks() -> str:
    if not faulthandler.is_enabled():
        return ""
    stderr = os.path.realpath("/proc/self/fd/2")
    return stderr if os.path.isfile(stderr) else "the standard error of that process"


def is_marked(path: Path) -> bool:
    """Return whether a mark is there: of a process under way, or of one that vanished."""
    return (path / _MARK).exists()


def left_mark(path: Path) -> Mark | None:
    """Return the mark of the last process if it vanished. Call it with the directory locked.

    Raises:
        RunDirError: the mark is damaged.
    """
    if not is_marked(path):
        return None
    mark = path / _MARK
    try:
        return Mark(**json.loads(read_capped(mark, _MAX_CONFIG_BYTES, RunDirError)))
    except (ValueError, TypeError) as error:
        raise RunDirError(f"{mark} is damaged: {quoted(error)}.\nRemove it.") from None


def last_written(path: Path) -> float:
    """Return when a run was last written to: its config, mark, metrics or checkpoints.

    In seconds since 1970; 0 for a directory without any of these.
    """
    times = [0.0]
    for name in (_CONFIG, _MARK, METRICS, "checkpoints"):
        with contextlib.suppress(FileNotFoundError):  # a mark may go at any moment
            times.append((path / name).stat().st_mtime)
    return max(times)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Raise RunDirError for an OSError within the `with`."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"The directory {path} cannot be used: {error.strerror or error}.\n"
            "Make it writable, make room, or choose another: --run-dir, for a study --study."
        ) from None


def has_checkpoint(path: Path) -> bool:
    """Return whether a run directory has a checkpoint."""
    return any(path.glob("checkpoints/step_*"))


def refuse_used(path: Path) -> None:
    """Raise RunDirError if the directory holds a run already."""
    if (path / _CONFIG).exists():
        begun = has_checkpoint(path)
        raise RunDirError(
            f"The run directory {path} holds a run already"
            + (
                f".\nTo go on with it: headrace resume {path}\n"
                if begun
                else ", which ended before its first checkpoint: remove it.\n"
            )
            + "For a new run choose another directory with --run-dir."
        )


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write config.json, completely or not at all; RunDirError if there is no room."""
    with writable(path):
        write_whole(path / _CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json; RunDirError if there is none, or it is damaged."""
    refuse_trainers_file(path)
    try:
        config = dict(json.loads(read_capped(path / _CONFIG, _MAX_CONFIG_BYTES, RunDirError)))
        settings = config["settings"] = settings_of_file(dict(config["settings"]))
        wrong = [name for name, kind in _KINDS.items() if not isinstance(settings.get(name), kind)]
        wrong += [name for name in _SIZES if name not in wrong and settings[name] < 1]
        config["env_is_code"] = bool(config["env_is_code"])
        config["eval_env_is_code"] = bool(config.get("eval_env_is_code"))  # old files lack it
        if wrong or not isinstance(config["origin"], dict):
            raise ValueError(f"no usable {', '.join(wrong) or 'origin'}")
        config["origin"] = settings_of_file(config["origin"])
    except FileNotFoundError:
        hint = "Expected one that `headrace train` has written to (see runs/)."
        if (path / STUDY).exists():
            hint = (
                f"It is a study. To see it: headrace tune --show {path}\n"
                f"To go on with it: headrace tune --resume {path} (name an environment of your own "
                "again)."
            )
        raise RunDirError(f"{path} is not a run directory: it has no {_CONFIG}.\n{hint}") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDirError(f"{path / _CONFIG} is damaged: {quoted(error)}.") from None
    return config
