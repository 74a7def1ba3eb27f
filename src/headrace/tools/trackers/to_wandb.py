"""Sends rows to Weights & Biases. Left out: its system metrics, console and code capture.

W&B numbers rows by steps that only rise, and tells a run that goes on its last step. Without a
server (`WANDB_MODE=offline`) nobody tells: then it is read from the files that W&B has written.
"""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from headrace.storage.metrics import Row
from headrace.tools.trackers.api import End, Tracker, numbers

_FILE_HEADER, _BLOCK, _HEADER = 7, 1 << 15, struct.Struct("<IHB")  # of LevelDB's log, as W&B has it
_FULL, _LAST = 1, 4


class WandbRun(Tracker):
    """A run of W&B."""

    def __init__(self, project: str, name: str, settings: dict[str, Any], run_id: str) -> None:
        self._run = wandb.init(
            project=project,
            name=name,
            id=run_id or None,
            resume="allow" if run_id else None,
            config=settings,
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",
                save_code=False,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self.run_id = self._run.id
        # Its first step is one above the last that the server has; 0 for a run that is new there.
        self.sent = max(0, self._run.starting_step - 1)
        if self._run.offline:
            folder = Path(self._run.dir).parents[1]
            files = folder.glob(f"*-{self.run_id}/run-{self.run_id}.wandb")
            self.sent = max(map(_last_step, files), default=0)

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(numbers(row), step=int(row["env_steps"]))

    def close(self, end: End) -> None:
        self._run.finish(exit_code=1 if end in ("failed", "vanished") else 0)


def records_of(path: Path) -> Iterator[Any]:
    """Yield the records in a file of a run, as far as it was written.

    The file is a log as LevelDB writes it (its documentation's `log_format.md`): blocks of 32 KiB
    with pieces of records. A record is a message `wandb_internal.Record`.
    """
    data, at, record = path.read_bytes(), _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _checksum, size, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size + size
        if not kind or at > len(data):  # it was still being written
            return
        record += data[at - size : at]
        if kind in (_FULL, _LAST):
            yield Record.FromString(record)
            record = b""


def _last_step(path: Path) -> int:
    """Return the step of the last row in a file; 0 without one."""
    rows = (record.history for record in records_of(path) if record.HasField("history"))
    return max((row.step.num for row in rows), default=0)
