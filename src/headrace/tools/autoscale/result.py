"""The result of a search, as data and as text, and its cache."""

import hashlib
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace
from headrace.machine.limits import cpu_cores
from headrace.storage.files import write_whole
from headrace.tools.autoscale.sizes import SIZE_NAMES
from headrace.tools.autoscale.trial import format_gib

_COLUMNS = ("learners", "workers", "envs", "steps", "envs/vector", "env steps/s", "memory", "")


@dataclass(frozen=True)
class AutoscaleResult:
    """The result of a search.

    Attributes:
        settings: sizes by name, except fixed ones: `headrace.train(env, **result.settings)`.
        trials: plain data of each trial in order: sizes, outcome, rate, memory.
        largest: sizes of the largest batch that fits the GPU, if the environments are there.
        finished: False if the time budget ended the search.
        path: file of the cached result; None if the environment is code without a name.
        reused: True if the result comes from the cache.
    """

    settings: dict[str, int]
    env_steps_per_s: float
    trials: list[dict[str, Any]]
    largest: dict[str, int] | None = None
    finished: bool = True
    budget_s: float = 0.0
    path: Path | None = None
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return vars(self) | {"path": None if self.path is None else str(self.path)}

    def describe(self) -> str:
        """Format all trials as a table, the fastest first, and the result."""
        sizes = " ".join(f"{name}={value}" for name, value in self.settings.items())
        rate = f"({self.env_steps_per_s:,.0f} env steps/s)"
        lines = [*self._table(), f"Found: {sizes or 'nothing was open'} {rate}"]
        if not self.finished:
            lines.append(
                f"The search ran out of time ({self.budget_s:g} s): there may be better sizes. "
                f"With more time: --budget-s {2 * self.budget_s:g}"
            )
        if self.largest is not None:
            most = " ".join(f"{name}={value}" for name, value in self.largest.items())
            lines.append(f"The largest batch that fits the GPU: {most}")
        return "\n".join(lines)

    def _table(self) -> list[str]:
        lines: list[tuple[str, ...]] = [_COLUMNS]
        for trial in sorted(self.trials, key=lambda trial: -(trial["rate"] or 0.0)):
            outcome, rate = trial["outcome"], trial["rate"]
            below = "< " if outcome == "slow" and rate is not None else ""
            speed = below + ("-" if rate is None else f"{rate:,.0f}")
            memory = format_gib(trial["gpu_bytes"] or trial["memory_bytes"])
            reason = "" if outcome == "measured" else f"{outcome}: {trial['why']}"
            lines.append((*(str(trial[name]) for name in SIZE_NAMES), speed, memory, reason))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
        return ["  ".join([*map(str.rjust, line, widths), line[-1]]).rstrip() for line in lines]


def fingerprint() -> dict[str, Any]:
    """Return what a result depends on: machine and versions, as plain data."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)", cpus.read_text() if cpus.exists() else "", re.M)
    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": cpu_cores(),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def cache_path(key: dict[str, Any]) -> Path:
    """Return the file of the result for a key (plain data)."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "headrace" / "autoscale" / f"{name}.json"


def write_cache(key: dict[str, Any], result: AutoscaleResult) -> Path:
    """Write a result to the cache and return its file; OSError if that fails."""
    path = cache_path(key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {name: v for name, v in vars(result).items() if name not in ("path", "reused")}
    write_whole(path, json.dumps({"key": key, "found": values}, indent=1).encode())
    return path


def read_cache(key: dict[str, Any]) -> dict[str, Any] | None:
    """Read the result for a key; None if there is none, or its file is damaged."""
    path = cache_path(key)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return saved["found"] if saved["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
