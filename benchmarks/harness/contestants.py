"""Who takes part in a comparison: Headrace, its peers, and the limits of the machine.

Left out: running them (`one_turn.py`, `turns.py`), and what is compared (`cartpole.py` and others).
"""

import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import ROOT
from benchmarks.peers import install

SCRATCH = "{scratch}"
"""In a command: the turn's own folder, in which it runs; empty at its start, removed after it."""
TURN = "{turn}"
"""In a command: the number of the turn, from 0: a seed that all contestants share."""
COMMON_PACKAGES = ("torch", "gymnasium", "numpy", "ale-py", "mujoco")


@dataclass(frozen=True)
class Contestant:
    """Something that is measured.

    Attributes:
        name: in tables.
        command: program (absolute path) and arguments; run in a folder of its own.
        threads: for the math libraries (OMP_NUM_THREADS and the like).
        packages: whose versions are written down, as the command's Python has them.
        venv: the peer's virtual environment (`peers/install.py`); None: this Python's own.
        is_peer: others are compared with it.
        is_limit: it does not do the work, but measures what the machine could do of it at best.
        compared_with: the name of its limit; "": the first limit of its comparison.
        must_say: what stands in its output if it did the work that is meant, such as the shape of
            an observation; without it, the turn fails.
        cores: how many of the machine's it may use; None: all.
        turns: it takes no more of them than this (one that is slow to start); None: all.
    """

    name: str
    command: Sequence[str]
    threads: int = 1
    packages: Sequence[str] = ()
    venv: str | None = None
    is_peer: bool = False
    is_limit: bool = False
    compared_with: str = ""
    must_say: str = ""
    cores: int | None = None
    turns: int | None = None

    @property
    def python(self) -> str:
        """The interpreter whose packages it uses."""
        return str(install.python_of(self.venv)) if self.venv else sys.executable

    @property
    def missing(self) -> str | None:
        """Why it can not run at all, if so."""
        if self.venv is None or install.is_installed(self.venv):
            return None
        return f"not installed: python benchmarks/peers/install.py {self.venv}"

    def describe(self) -> dict[str, Any]:
        """Plain data, without what is particular to this checkout."""
        missing = self.missing
        return {
            "name": self.name,
            "is_peer": self.is_peer,
            "is_limit": self.is_limit,
            "command": shlex.join(_outside_of_root(word) for word in self.command),
            "threads": self.threads,
            "cores": self.cores,
            "versions": {} if missing else dict(_versions(self.python, tuple(self.packages))),
            "missing": missing,
        }


def headrace(
    name: str, arguments: Sequence[str], threads: int = 1, must_say: str = "", **more: Any
) -> Contestant:
    """Headrace, as its users run it: `headrace train`, with `--json`."""
    program = Path(sys.executable).with_name("headrace")
    command = [str(program), "train", *arguments, "--run-dir", f"{SCRATCH}/run", "--json"]
    packages = ("headrace", *COMMON_PACKAGES)
    return Contestant(name, command, threads, packages, must_say=must_say, **more)


def headrace_driver(
    name: str, module: str, arguments: Sequence[str], threads: int = 1, **more: Any
) -> Contestant:
    """A part of Headrace, by its driver: the module `benchmarks.drivers.MODULE`."""
    command = [sys.executable, "-m", f"benchmarks.drivers.{module}", *arguments]
    return Contestant(name, command, threads, ("headrace", *COMMON_PACKAGES), **more)


def driver(
    name: str, venv: str, module: str, arguments: Sequence[str], threads: int = 1, package: str = ""
) -> Contestant:
    """A peer, by its driver: the module `benchmarks.peers.MODULE` in its virtual environment."""
    command = [str(install.python_of(venv)), "-m", f"benchmarks.peers.{module}", *arguments]
    packages = (package, *COMMON_PACKAGES) if package else COMMON_PACKAGES
    return Contestant(name, command, threads, packages, venv, is_peer=True)


def _outside_of_root(word: str) -> str:
    """A path without what is particular to this checkout."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


_ASK_VERSIONS = """
import importlib.metadata as metadata, json, platform, sys
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


@functools.cache  # several contestants use one environment
def _versions(python: str, packages: tuple[str, ...]) -> dict[str, str | None]:
    """What that Python has installed; None: not there."""
    asked = [python, "-c", _ASK_VERSIONS, *packages]
    versions: dict[str, str | None] = json.loads(subprocess.check_output(asked, text=True))
    return versions
