"""What a search has found, as data and in words. Left out: the search (`search.py`)."""

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace
from headrace.config.resolve import cpu_cores
from headrace.storage.files import write_whole
from headrace.tools.autoscale.sizes import FREE
from headrace.tools.autoscale.trial import gib

_HEADS = ("learners", "workers", "envs", "steps", "envs/vector", "env steps/s", "memory", "")


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        settings: the sizes, by name, that were not fixed: `headrace.train(env, **found.settings)`.
        env_steps_per_s: of training with them.
        trials: plain data of each, in order: sizes, outcome, rate, memory.
        largest: sizes of the largest batch that fits the GPU, where environments are on one.
        finished: nothing that was left promised more; else the budget of time ended the search.
        budget_s: that it had.
        path: where this is kept; None: it is not, because the environment is code without a name.
        reused: it was kept, and nothing was measured now.
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
        """Plain data."""
        return vars(self) | {"path": None if self.path is None else str(self.path)}

    def describe(self) -> str:
        """The table, and what was found, for people."""
        sizes = " ".join(f"{name}={value}" for name, value in self.settings.items())
        lines = [self.table(), f"Found: {sizes or 'nothing was open'}"]
        lines[-1] += f" ({self.env_steps_per_s:,.0f} env steps/s)"
        if not self.finished:
            lines.append(
                f"Time ended the search ({self.budget_s:g} s): there may be better sizes. With "
                f"more time: --budget-s {2 * self.budget_s:g}"
            )
        if self.largest is not None:
            most = " ".join(f"{name}={value}" for name, value in self.largest.items())
            lines.append(f"The largest batch that fits the GPU: {most}")
        return "\n".join(lines)

    def table(self) -> str:
        """All trials, the fastest first, for people."""
        lines: list[tuple[str, ...]] = [_HEADS]
        for of in sorted(self.trials, key=lambda of: -(of["rate"] or 0.0)):
            rate = "-" if of["rate"] is None else f"{of['rate']:,.0f}"
            below = "< " if of["outcome"] == "slow" and of["rate"] is not None else ""
            took = gib(of["gpu_bytes"] or of["memory_bytes"])
            said = "" if of["outcome"] == "measured" else f"{of['outcome']}: {of['why']}"
            lines.append((*(str(of[name]) for name in FREE), below + rate, took, said))
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]) - 1)]
        return "\n".join(
            "  ".join(
                [*(cell.rjust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]
            ).rstrip()
            for line in lines
        )


# What a measurement holds for: this machine with these packages; and measurements that are kept.


_MOST_BYTES = 1 << 20


def fingerprint() -> dict[str, Any]:
    """Plain data that differs where another result is to be expected."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu(),
        "cores": cpu_cores(),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _cpu() -> str:
    """The processor's model, as it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def kept_at(key: dict[str, Any]) -> Path:
    """The file for what was measured under a key (plain data)."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return Path.home() / ".cache" / "headrace" / "autoscale" / f"{name}.json"


def keep(key: dict[str, Any], found: dict[str, Any]) -> Path:
    """Write down what was found; where. OSError: there is no room."""
    path = kept_at(key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, json.dumps({"key": key, "found": found}, indent=1).encode())
    return path


def kept(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was found under the same key; None: nothing, or the file is not whole."""
    path = kept_at(key)
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        saved = json.loads(path.read_text(encoding="utf-8"))
        return saved["found"] if saved["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
