"""Shared by the fault tests: commands, disks that fill up, and what is heard meanwhile."""

import contextlib
import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from tests import python
from tests.python import Python

TINY = {"num_envs": 2, "num_steps": 16, "envs_per_vector": 1, "quiet": True, "num_workers": 0}
UPDATE = 2 * 16
"""Env steps of one update of TINY."""

FLAGS = ["--num-envs", "4", "--num-steps", "16", "--envs-per-vector", "2", "--num-minibatches", "4"]


def with_path(folder):
    """The environment variables of a process that can import a module from the folder."""
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def start(words, folder, **more):
    """Start it in a session of its own, with its output in pipes."""
    return (Python if python.can_fork(words) else subprocess.Popen)(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=with_path(folder), **more,
    )  # fmt: skip


def run(words, folder):
    """Run it to its end."""
    if python.can_fork(words):
        return python.run(words, cwd=folder, env=with_path(folder))
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=100, env=with_path(folder)
    )


def needs_mounts():
    """Skip, by name, where nothing can be mounted."""
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        capture_output=True,
    )
    if tried.returncode:
        pytest.skip("needs root and namespaces of its own (unshare --mount --uts)")


def mounted(script, *words):
    """The words, run where the script (of sh) has mounted something that nobody else sees."""
    return [
        "unshare",
        "--mount",
        "--uts",
        "sh",
        "-ec",
        f'{script}\nexec "$@"',
        "sh",
        *map(str, words),
    ]


class Disk:
    """A small file system of its own, which can be filled and cleared."""

    def __init__(self, path):
        self.path, self._filler = path, path / "filler"

    def fill(self, leave_bytes=0):
        """Take all of it but so much."""
        free = os.statvfs(self.path)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave_bytes)

    def clear(self):
        """Give it back."""
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(path, size):
    """A disk of `size` bytes at `path`."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small tmpfs")
    try:
        yield Disk(path)
    finally:
        left_open = subprocess.run(["umount", str(path)], capture_output=True).returncode
        if left_open:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
    assert not left_open, "something keeps a file on it open"


@contextlib.contextmanager
def heard():
    """Warnings, each as (when, text), in a list that fills up."""
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.append((time.monotonic(), str(message)))
        yield said


def modes(folder):
    """Path -> mode of everything in a folder, itself included."""
    return {path: path.stat().st_mode & 0o7777 for path in [Path(folder), *folder.rglob("*")]}
