"""What this machine has, and what is missing for which extra. Left out: changing any of it."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from typing import Any

import torch
from packaging.requirements import Requirement
from torch.distributed import is_backend_available

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
        "backends": [name for name in ("nccl", "gloo", "mpi") if is_backend_available(name)],
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
    return {r.name: _version(r.name) for r in _requirements("headrace", "")}


def _requirements(package: str, extra: str) -> list[Requirement]:
    """What `package` asks for here: in any case (extra ""), or besides that for one extra."""
    asked = [Requirement(line) for line in importlib.metadata.requires(package) or []]
    return [
        requirement
        for requirement in asked
        if (requirement.marker is None and not extra)
        or (
            requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and not (extra and requirement.marker.evaluate({"extra": ""}))
        )
    ]


def _missing() -> dict[str, list[str]]:
    """Extra -> packages that it asks for and that are not here."""
    extras = importlib.metadata.metadata("headrace").get_all("Provides-Extra") or []
    return {extra: sorted(_absent("headrace", extra)) for extra in sorted(extras)}


def _absent(package: str, extra: str) -> set[str]:
    absent: set[str] = set()
    for requirement in _requirements(package, extra):
        if not _version(requirement.name):
            absent.add(requirement.name)
            continue
        for inner in requirement.extras:
            absent |= _absent(requirement.name, inner)
    return absent


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(found: dict[str, Any]) -> str:
    """The same for people."""
    gib = 1 << 30
    shm = found["dev_shm_bytes"]
    shared = ", shared memory (on one machine's CPU)" if found["anonymous_shared_memory"] else ""
    lines = [
        f"headrace {found['headrace']}, Python {found['python']}, {found['platform']}",
        "packages: " + ", ".join(f"{n} {v}" for n, v in found["packages"].items()),
        f"CPU cores: {found['cpu_cores']}; memory: {found['memory_bytes'] / gib:.1f} GiB",
        "CUDA devices: " + (", ".join(found["cuda_devices"]) or "none"),
        "between learners: " + (", ".join(found["backends"]) or "nothing") + shared,
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
