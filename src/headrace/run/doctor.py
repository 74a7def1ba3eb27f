"""What this machine has, and what is missing for which extra. Left out: changing any of it."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from typing import Any

import torch

import headrace


def examine() -> dict[str, Any]:
    """Versions, devices, cores, shared memory, limits, extras: plain data."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name, version in _core_packages().items() if version},
        "cpu_cores": cores,
        "torch_threads": torch.get_num_threads(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "anonymous_shared_memory": hasattr(os, "memfd_create"),
        "dev_shm_bytes": None if shm is None else {"total": shm.total, "free": shm.free},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
            for name in ("nofile", "nproc", "memlock")
        },
        "missing_for_extra": _missing(),
    }


def _core_packages() -> dict[str, str | None]:
    names = [re.split(r"[^\w.-]", line)[0] for line in _requirements() if "extra ==" not in line]
    return {name: _version(name) for name in names}


def _requirements() -> list[str]:
    return importlib.metadata.requires("headrace") or []


def _missing() -> dict[str, list[str]]:
    """Extra -> packages that it asks for and that are not here."""
    missing: dict[str, list[str]] = {}
    for line in _requirements():
        if found := re.search(r"extra == ['\"]([\w-]+)['\"]", line):
            name = re.split(r"[^\w.-]", line)[0]
            missing.setdefault(found[1], [])
            absent = [package for package in _asked_for(name, line) if not _version(package)]
            missing[found[1]] += absent
    return {extra: sorted(set(names)) for extra, names in sorted(missing.items())}


def _asked_for(name: str, line: str) -> list[str]:
    """The packages of a requirement: itself, or with extras (`gymnasium[box2d]`) those of them."""
    extras = re.match(r"[\w.-]+\[([\w,-]+)\]", line)
    if not extras:
        return [name]
    if name == "headrace":  # extras of ours stand on lines of their own
        return []
    return [
        re.split(r"[^\w.-]", inner)[0]
        for inner in importlib.metadata.requires(name) or []
        if any(re.search(rf"extra == ['\"]{extra}['\"]", inner) for extra in extras[1].split(","))
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(found: dict[str, Any]) -> str:
    """The same for people."""
    gib = 1 << 30
    shm = found["dev_shm_bytes"]
    lines = [
        f"headrace {found['headrace']}, Python {found['python']}, {found['platform']}",
        "packages: " + ", ".join(f"{n} {v}" for n, v in found["packages"].items()),
        f"CPU cores: {found['cpu_cores']}; memory: {found['memory_bytes'] / gib:.1f} GiB",
        "CUDA devices: " + (", ".join(found["cuda_devices"]) or "none"),
        "workers: "
        + (
            "yes"
            if found["anonymous_shared_memory"]
            else f"no (memfd is missing on {sys.platform})"
        )
        + ("" if shm is None else f"; /dev/shm {shm['free'] / gib:.1f} GiB free (not needed)"),
        "limits: "
        + ", ".join(
            f"{n} {'unlimited' if v == resource.RLIM_INFINITY else v}"
            for n, v in found["limits"].items()
        ),
        "extras:",
    ]
    for extra, names in found["missing_for_extra"].items():
        state = f"missing {', '.join(names)}: pip install 'headrace[{extra}]'" if names else "ready"
        lines.append(f"  {extra:<16} {state}")
    return "\n".join(lines)
