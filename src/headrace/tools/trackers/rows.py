"""Reads the rows of a `metrics.jsonl` that another process writes. Left out: when to read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.storage.metrics import Row, parse_row


class RowReader:
    """Reads new rows: those with more env steps than every row before.

    A resumed run replaces its file by one without the rows after the checkpoint, and makes these
    updates again. The file is then read again from its beginning, and what was made again is left
    out.

    Args:
        after: env steps of the last row that is known already; 0: none is.
    """

    def __init__(self, path: Path, after: int) -> None:
        self._path, self._after = path, after
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[Row]:
        """Yield the new rows. A damaged line is left out; the last waits until it has an end."""
        if self._file is None or self._is_replaced(self._file):
            self.close()
            with contextlib.suppress(FileNotFoundError):  # no update has been made yet
                self._file = self._path.open("rb")
        if self._file is None:
            return
        while line := self._file.readline():
            if not line.endswith(b"\n"):
                self._file.seek(-len(line), os.SEEK_CUR)
                return
            row = parse_row(line)
            if row is not None and row["env_steps"] > self._after:
                self._after = row["env_steps"]
                yield row

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Return whether the path leads to another file, or to one that lost what was read."""
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False  # nothing is lost: what is open can still be read
        # While it is open, no new file can have its number.
        return not os.path.samestat(now, os.fstat(file.fileno())) or now.st_size < file.tell()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
