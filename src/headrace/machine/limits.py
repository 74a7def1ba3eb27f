"""How many CPU cores and how much memory this process may use, within a container's limits.

Linux keeps such limits in control groups (cgroups(7)): a process is in one of them, and the limits
of all groups around that one hold as well. Left out: GPUs, and what processes use
(`distributed/sessions.py`).
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def cpu_cores() -> int:
    """Return the number of CPU cores that this process may use.

    A container's quota of CPU time counts as cores, rounded up.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min([cores or 1, *map(math.ceil, _quotas())]))


def available_bytes() -> int:
    """Return the memory that this process can still take without swapping."""
    return min([_available_here(), *_available_in_groups()])


def _available_here() -> int:
    with contextlib.suppress(OSError):
        lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _quotas() -> Iterator[float]:
    """Yield the cores' worth of CPU time that each control group may use, where it has a quota."""
    for group in _groups("cpu"):
        words = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),  # version 1 of control groups
            *_words(group / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            yield int(words[0]) / int(words[1])


def _available_in_groups() -> Iterator[int]:
    """Yield the memory that each control group can still take, where it has a limit."""
    for group in _groups("memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            names = _words(group / "memory.stat")
            numbers = dict(zip(names[::2], map(int, names[1::2]), strict=True))
            # The kernel gives up files that it keeps in memory when something else needs the room.
            files = numbers.get("total_inactive_file", numbers.get("inactive_file", 0))
            yield max(0, int(limit[0]) - int(used[0]) + files)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group, and of those around it."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # Version 1 has a tree for each controller, version 2 has one for all.
            top = _GROUPS / controller if controllers else _GROUPS
            own = top / path.lstrip("/")
            yield from (own, *(folder for folder in own.parents if folder.is_relative_to(top)))


def _words(file: Path) -> list[str]:
    """Return the words of a file; [] where there is none."""
    with contextlib.suppress(OSError):
        return file.read_text().split()
    return []
