"""The processes of a program, as Linux tells of them: who descends from whom, and what each is.

Left out: what is made of it (`watch_phases.py`, `measure_bytes.py`).
"""

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One of them.

    Attributes:
        pid: its id.
        parent: its parent's.
        words: its command line; Ray names its workers by what they run.
        cpu_s: what it has computed so far.
    """

    pid: int
    parent: int
    words: tuple[str, ...]
    cpu_s: float


def every():
    """All that are there, by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
            pid, parts = int(folder.name), tuple(words.rstrip("\0").split("\0"))
            found[pid] = Process(pid, int(fields[1]), parts, cpu_s)
    return found


def descendants(pid):
    """That process and all that descend from it, by id."""
    known = every()
    children = {}
    for process in known.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, left = {}, [pid]
    while left:
        each = left.pop()
        if each in known:
            found[each] = known[each]
        left += children.get(each, [])
    return found
