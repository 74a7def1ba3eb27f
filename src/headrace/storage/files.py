"""Files that a run writes: private, whole or not there at all, and what a full disk does to them.

Left out: what is in them, and checkpoints, which are directories (`checkpoint.py`).
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import HeadraceError

_KEPT_BYTES = 1 << 24  # of what waits for room on the disk


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file (private: 0600) that is on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_capped(path: Path, most_bytes: int, refusal: type[HeadraceError]) -> bytes:
    """A file's content, if it is no larger than any of its kind.

    Raises:
        refusal: it is larger.
        OSError: it cannot be read.
    """
    if (size := path.stat().st_size) > most_bytes:
        raise refusal(
            f"{path} has {size:,} bytes; none of its kind has more than {most_bytes:,}. "
            "It is damaged, or not headrace's."
        )
    return path.read_bytes()


def flush_dir(path: Path) -> None:
    """Bring to the disk which names are in a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in place of the one before, whole or not at all.

    Raises:
        OSError: the disk is full, for example; the one before is as it was.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        write_flushed(new, data)
        os.rename(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    flush_dir(path.parent)


class Obstacle:
    """What stands in the way of writing something that a run can do without for a while.

    Said once when it begins, and once when it is over.

    Args:
        what: in the plural, as it is in the warning.
        path: where to.
    """

    def __init__(self, what: str, path: Path) -> None:
        self._what, self._path = what, path
        self.error: OSError | None = None
        """Why it cannot be written now."""

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """Go on after what is within, even if it cannot be written."""
        try:
            yield
        except OSError as error:
            before, self.error = self.error, error
            if before is None:
                warnings.warn(
                    f"{self._what} cannot be written to {self._path}: {error.strerror or error}. "
                    "Training goes on, and tries again. Make room, or the result is lost.",
                    stacklevel=3,
                )
        else:
            before, self.error = self.error, None
            if before is not None:
                warnings.warn(f"{self._what} are written to {self._path} again.", stacklevel=3)


class Appended:
    """A file (private: 0600) that grows, and waits while the disk is full.

    What could not be written is kept, up to 16 MiB, and written once there is room: nothing in the
    file is torn or doubled.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._waiting = bytearray()

    def write(self, data: bytes) -> None:
        """Append, with the next `flush`."""
        if len(self._waiting) + len(data) <= _KEPT_BYTES:
            self._waiting += data

    def flush(self) -> None:
        """Bring it to the file.

        Raises:
            OSError: there is no room, for example; what is left comes with the next flush.
        """
        while self._waiting:
            del self._waiting[: os.write(self._fd, self._waiting)]

    def close(self) -> None:
        """Close it, as it is."""
        os.close(self._fd)
