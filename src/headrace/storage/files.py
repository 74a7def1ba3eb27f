"""Files of a run: private, complete or not there at all, and patient when the disk is full."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import CheckpointError, ConfigError, HeadraceError

_MAX_WAITING_BYTES = 1 << 24


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file (mode 0600) and flush it to the disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_capped(path: Path, most_bytes: int, error: type[HeadraceError]) -> bytes:
    """Return the content of a file; raise `error` if it is too large, OSError if unreadable."""
    if (size := path.stat().st_size) > most_bytes:
        raise error(
            f"{path} has {size:,} bytes; none of its kind has more than {most_bytes:,}. "
            "It is damaged, or not headrace's."
        )
    return path.read_bytes()


def memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def refuse_trainers_file(path: Path) -> None:
    """Raise CheckpointError if, in place of a run's directory, it is a file of Lightning's."""
    if path.suffix == ".ckpt" and path.is_file():
        raise CheckpointError(
            f"{path} is a file, and no run's directory.\nA checkpoint of Lightning's Trainer "
            f'becomes one by headrace.lightning.write_run("{path}", "NEW_DIR").'
        )


def flush_dir(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file, completely or not at all; OSError if it cannot be written."""
    new = path.with_name(f".{path.name}.new")
    try:
        write_flushed(new, data)
        os.rename(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    flush_dir(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """Write the file that `--output` names, and its folder; ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}.\nName another file: --output."
        ) from None


class RetriedWrite:
    """A write that may fail for a while: one warning when that begins, and one when it ends.

    Attributes:
        error: of the last attempt; None: it was written.
    """

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self.error: OSError | None = None

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Go on after the `with` even if it raised an OSError."""
        try:
            yield
        except OSError as error:
            before, self.error = self.error, error
            if before is None:
                warnings.warn(
                    f"{self._name} cannot be written to {self._path}: {error.strerror or error}. "
                    "Training goes on, and tries again. Make room, or the result is lost.",
                    stacklevel=3,
                )
        else:
            before, self.error = self.error, None
            if before is not None:
                warnings.warn(f"{self._name} are written to {self._path} again.", stacklevel=3)


class AppendFile:
    """A file (mode 0600) to append to; while the disk is full, up to 16 MiB wait for room."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        """Append with the next `flush`."""
        if len(self._waiting) + len(data) <= _MAX_WAITING_BYTES:
            self._waiting += data

    def flush(self) -> None:
        """Write what waits; after an OSError, the rest waits for the next flush."""
        while self._waiting:
            del self._waiting[: os.write(self._fd, self._waiting)]

    def close(self) -> None:
        """Close without a flush."""
        os.close(self._fd)
