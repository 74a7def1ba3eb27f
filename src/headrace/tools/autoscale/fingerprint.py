"""What a measurement holds for: this machine with these packages; and measurements that are kept.

Left out: what is measured (`autoscale.py`).
"""

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace
from headrace.config.resolve import cpu_cores
from headrace.storage.files import write_whole

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
