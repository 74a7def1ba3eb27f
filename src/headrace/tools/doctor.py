"""Describes this machine: versions, devices, limits, missing extras."""

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from typing import Any

import torch
from torch.distributed import is_backend_available

import headrace
from headrace.catalog import extras
from headrace.errors import install_command
from headrace.machine.limits import available_bytes, cpu_cores


def examine() -> dict[str, Any]:
    """Collect versions, devices, cores, shared memory, limits and extras as plain data."""
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    names = importlib.metadata.metadata("headrace").get_all("Provides-Extra") or []
    return {
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            r.name: version
            for r in extras.requirements("headrace", "")
            if (version := extras.version(r.name))
        },
        "cpu_cores": cpu_cores(),
        "torch_threads": torch.get_num_threads(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": [name for name in ("nccl", "gloo", "mpi") if is_backend_available(name)],
        "anonymous_shared_memory": hasattr(os, "memfd_create"),
        "dev_shm_bytes": None if shm is None else {"total": shm.total, "free": shm.free},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_bytes": available_bytes(),
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[0]
            for name in ("nofile", "nproc", "memlock")
        },
        "missing_for_extra": {
            extra: sorted(extras.missing("headrace", extra)) for extra in sorted(names)
        },
    }


def describe(facts: dict[str, Any]) -> str:
    """Format the result of `examine` as text."""
    gib = 1 << 30
    shm, memfd = facts["dev_shm_bytes"], facts["anonymous_shared_memory"]
    shared = ", shared memory (on one machine's CPU)" if memfd else ""
    limits = {
        n: "unlimited" if v == resource.RLIM_INFINITY else v for n, v in facts["limits"].items()
    }
    free = "" if shm is None else f"; /dev/shm {shm['free'] / gib:.1f} GiB free (not needed)"
    lines = [
        f"headrace {facts['headrace']}, Python {facts['python']}, {facts['platform']}",
        "packages: " + ", ".join(f"{n} {v}" for n, v in facts["packages"].items()),
        f"CPU cores: {facts['cpu_cores']}; memory: {facts['memory_bytes'] / gib:.1f} GiB, of which "
        f"{facts['available_bytes'] / gib:.1f} GiB can be used now (a container's limits count)",
        "CUDA devices: " + (", ".join(facts["cuda_devices"]) or "none"),
        "between learners: " + (", ".join(facts["backends"]) or "nothing") + shared,
        "workers: " + ("yes" if memfd else f"no (memfd is missing on {sys.platform})") + free,
        "limits: " + ", ".join(f"{name} {value}" for name, value in limits.items()),
        "extras:",
    ]
    for extra, names in facts["missing_for_extra"].items():
        state = f"missing {', '.join(names)}: {install_command(extra)}" if names else "ready"
        lines.append(f"  {extra:<16} {state}")
    return "\n".join(lines)
