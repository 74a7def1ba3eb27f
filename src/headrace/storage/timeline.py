"""The timeline that `--timeline` writes for each rank: what its processes did when."""

import contextlib
import io
import zipfile
from array import array
from pathlib import Path

import numpy as np

from headrace.distributed.ranks import Ranks
from headrace.errors import RunDirError, quoted
from headrace.meter import SPANS, Laps
from headrace.storage.files import RetriedWrite, read_capped, write_whole

_MOST_BYTES = 1 << 31


def tracks_of(
    ranks: Ranks, learner: Laps | None, workers: dict[str, Laps | None]
) -> dict[str, Laps]:
    """Return the laps of one rank's processes, by names that are unique over all ranks."""
    tracks = {name: laps for name, laps in {"learner": learner, **workers}.items() if laps}
    if ranks.size == 1:
        return tracks
    return {
        f"rank {ranks.rank}" + ("" if name == "learner" else f", {name}"): laps
        for name, laps in tracks.items()
    }


def write_timeline(run_dir: Path, ranks: Ranks, tracks: dict[str, Laps]) -> None:
    """Write the laps of a rank's processes; warn if there is no room.

    Rank 0 removes the timelines of ranks that the run had before it was resumed with fewer.
    """
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
    with RetriedWrite("The timeline", run_dir).attempt():
        write_whole(_path(run_dir, ranks.rank), file.getvalue())
        former = ranks.size
        while ranks.rank == 0 and (path := _path(run_dir, former)).exists():
            path.unlink()
            former += 1


def read_timeline(run_dir: Path) -> dict[str, Laps]:
    """Return the laps of each process, by name, {} without a timeline; RunDirError if damaged."""
    tracks: dict[str, Laps] = {}
    rank = 0
    while (path := _path(run_dir, rank)).exists():
        rank += 1
        try:
            data = io.BytesIO(read_capped(path, _MOST_BYTES, RunDirError))
            with contextlib.closing(np.load(data, allow_pickle=False)) as arrays:
                spans = [SPANS.index(span) for span in arrays["spans"].tolist()]
                for i, name in enumerate(arrays["names"].tolist()):
                    laps = tracks[name] = Laps(float(arrays["begin"][i]))
                    laps.spans = bytearray(spans[span] for span in arrays[f"span{i}"].tolist())
                    laps.ends = array("d", arrays[f"end{i}"].astype(np.float64))
                    if len(laps.spans) != len(laps.ends):
                        raise ValueError(f"{name}: {len(laps.spans)} spans, {len(laps.ends)} ends")
        except (OSError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile) as error:
            raise RunDirError(f"{path} is damaged: {quoted(error)}. Remove it.") from None
    return tracks


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / (f"timeline_rank{rank}.npz" if rank else "timeline.npz")
