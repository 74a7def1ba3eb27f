"""The machine on which figures were taken: what a figure means nothing without."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Where and when, and how busy it was."""
    # What the benchmarks before this one wrote is none: figures, and the tables in pages.
    unless = [":!benchmarks/results", ":!*.md"]
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ".", *unless)
    changes = _git(*changed)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_uncommitted_changes": None if changes is None else bool(changes),
        "cpu": _cpu(),
        "cores": cores(),
        "load_average_at_start": os.getloadavg()[0],
        "platform": platform.platform(),
    }


def _git(*arguments: str) -> str | None:
    """None: a copy of the files that is no repository, or no git on this machine."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    return subprocess.check_output(("git", *arguments), cwd=ROOT, text=True).strip()


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()
