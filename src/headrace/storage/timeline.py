"""What every process of a run did when: `timeline.npz`, which `--timeline` leaves in its directory.

One file for each rank, with its learner and its samplers. Left out: keeping laps (`meter.py`), and
what can be seen in them (`scale/`).
"""

import contextlib
import io
import zipfile
from array import array
from pathlib import Path

import numpy as np

from headrace.distributed.ranks import Ranks
from headrace.errors import RunDirError
from headrace.meter import SPANS, Laps
from headrace.storage.files import Obstacle, read_capped, write_whole

_MOST_BYTES = 1 << 31


def tracks_of(ranks: Ranks, own: Laps | None, samplers: dict[str, Laps]) -> dict[str, Laps]:
    """The laps of one rank's processes, by the name of each over all ranks."""
    of_rank = {} if own is None else {"learner": own}
    if ranks.size == 1:
        return of_rank | samplers
    return {
        f"rank {ranks.rank}" + ("" if name == "learner" else f", {name}"): laps
        for name, laps in (of_rank | samplers).items()
    }


def write_timeline(run_dir: Path, rank: int, tracks: dict[str, Laps]) -> None:
    """Write what the processes of a rank did; a warning if there is no room."""
    arrays: dict[str, np.ndarray] = {
        "names": np.array(list(tracks)),
        "spans": np.array(SPANS),
        "begin": np.array([laps.begin for laps in tracks.values()]),
    }
    for i, laps in enumerate(tracks.values()):
        arrays[f"span{i}"] = np.frombuffer(bytes(laps.spans), np.uint8)
        arrays[f"end{i}"] = np.array(laps.ends)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    obstacle = Obstacle("The timeline", run_dir)
    with obstacle.passed_over():
        write_whole(_path(run_dir, rank), file.getvalue())


def read_timeline(run_dir: Path) -> dict[str, Laps]:
    """What each process of a run did when, by name; {}: it was not kept.

    Raises:
        RunDirError: a file is damaged.
    """
    tracks: dict[str, Laps] = {}
    rank = 0
    while (path := _path(run_dir, rank)).exists():
        rank += 1
        try:
            data = io.BytesIO(read_capped(path, _MOST_BYTES, RunDirError))
            with contextlib.closing(np.load(data, allow_pickle=False)) as found:
                of_file = [SPANS.index(span) for span in found["spans"].tolist()]
                for i, name in enumerate(found["names"].tolist()):
                    laps = tracks[name] = Laps(float(found["begin"][i]))
                    laps.spans = bytearray(of_file[span] for span in found[f"span{i}"].tolist())
                    laps.ends = array("d", found[f"end{i}"].astype(np.float64))
                    if len(laps.spans) != len(laps.ends):
                        raise ValueError(f"{name}: {len(laps.spans)} spans, {len(laps.ends)} ends")
        except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
            raise RunDirError(f"{path} is damaged: {error!r}. Remove it.") from None
    return tracks


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / (f"timeline_rank{rank}.npz" if rank else "timeline.npz")
