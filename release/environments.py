"""Virtual environments: which Pythons there are, which versions fit, installing, and their size.

uv does it: it finds the oldest versions that fit together, and packages that several environments
have lie on the disk once. Its own settings (UV_INDEX and others) apply. Left out: which
combinations are tried (`__main__.py`), and what is done in one (`smoke.py`).
"""

import os
import re
import shutil
import subprocess
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from uv import find_uv_bin

PYTHONS = ("3.11", "3.12", "3.13")
"""The minor versions that are supported; the classifiers of pyproject.toml name the same."""
FORM = ("--no-build", "--no-header", "--no-annotate")
"""What `uv pip compile` may use, wheels alone, and prints: requirements alone."""


class NotHereError(Exception):
    """A combination that cannot be had on this machine."""


class InstallError(Exception):
    """What could be found here, and could not be installed."""


@dataclass(frozen=True)
class Installer:
    """uv with a cache of its own, for the project whose files are in `source`."""

    source: Path
    cache: Path
    allow_cuda: bool
    """Whether torch may be a CUDA build where there is no CPU build: several GB each."""

    def uv(self, *arguments: str, given: str | None = None) -> str:
        """Run uv; return what it printed. `given` is its standard input."""
        env = os.environ | {"UV_CACHE_DIR": str(self.cache)}
        if found := os.environ.get("PIP_FIND_LINKS"):
            env = {"UV_FIND_LINKS": found.replace(" ", ",")} | env
        command = [find_uv_bin(), *arguments, "--quiet"]
        done = subprocess.run(command, env=env, input=given, capture_output=True, text=True)
        if done.returncode:
            raise InstallError(done.stderr.strip()[-1500:])
        return done.stdout

    def torch(self, python: Path, versions: str) -> str:
        """Return the requirement of torch: its CPU build if there is one.

        Raises:
            NotHereError: There is no CPU build, and no other may be had.
            InstallError: Nobody could say whether there is one.
        """
        version = self._torch_version(python, versions)
        builds = [f"torch=={version}+cpu", *([f"torch=={version}"] if self.allow_cuda else [])]
        for requirement in builds:
            try:
                self._resolve(python, requirement)
                return requirement
            except InstallError as error:
                if "No solution found" not in str(error):  # the index did not answer, say
                    raise
        raise NotHereError(f"no CPU build of torch {version} for this Python can be had here")

    def _torch_version(self, python: Path, versions: str) -> str:
        if versions == "newest":
            (line,) = self._resolve(python, "torch").splitlines()
            return str(re.split(r"==|\+", line)[1])
        if versions == "pinned":
            pins = (self.source / "constraints.txt").read_text()
            return str(re.findall(r"^torch==(\S+)$", pins, re.MULTILINE)[0])
        project = tomllib.loads((self.source / "pyproject.toml").read_text())["project"]
        (torch,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
        (bound,) = [each.version for each in torch.specifier if each.operator == ">="]
        return bound

    def _resolve(self, python: Path, requirement: str) -> str:
        alone = ("--no-deps", "--python", str(python))
        return self.uv("pip", "compile", "-", *FORM, *alone, given=requirement)

    def constraints(self, python: Path, versions: str, extras: tuple[str, ...], torch: str) -> str:
        """Return the constraints under which `versions` are installed.

        "oldest" are the oldest versions of what pyproject.toml names that fit together and have
        wheels; of what these need in turn, the newest.
        """
        if versions == "newest":
            return torch
        if versions == "pinned":
            return f"{(self.source / 'constraints.txt').read_text()}\n{torch}\n"
        held = self.source / "torch.txt"
        held.write_text(torch)
        named = [word for extra in extras for word in ("--extra", extra)]
        project = str(self.source / "pyproject.toml")
        oldest = (*FORM, "--resolution", "lowest-direct", "--constraint", str(held))
        return self.uv("pip", "compile", project, *named, *oldest, "--python", str(python))

    def install(
        self, python: Path, requirement: str, constraints: str, folder: Path
    ) -> tuple[Path, float]:
        """Make an environment in `folder`; return its Python and the seconds that it took."""
        listed = folder.with_suffix(".txt")
        listed.write_text(constraints)
        began = time.perf_counter()
        self.uv("venv", str(folder), "--python", str(python))
        inside = folder / "bin" / "python"
        into = ("--python", str(inside), "--constraint", str(listed))
        # What is built here is ours alone, if it is the sdist: all else has wheels.
        ours = ("--no-binary", "headrace") if requirement.endswith(".tar.gz") else ()
        self.uv("pip", "install", *into, "--only-binary", ":all:", *ours, requirement)
        return inside, round(time.perf_counter() - began, 1)


def interpreter(minor: str) -> Path:
    """Return a Python of this minor version: on the path, or one of pyenv's.

    Raises:
        NotHereError: There is none.
    """
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{minor}")
    found = [Path(on_path)] if on_path else []
    found += sorted(root.glob(f"versions/{minor}.*/bin/python"), reverse=True)
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in found:
        # One of pyenv's may lie on the path, and yet say only that it is not the chosen one.
        said = subprocess.run([str(path), "-c", code], capture_output=True, text=True)
        if said.stdout.strip() == minor:
            return path
    raise NotHereError(f"no Python {minor} on this machine")


def versions_of(python: Path) -> dict[str, str]:
    """Return the versions of Python, torch, gymnasium and numpy in an environment."""
    code = (
        "import platform, gymnasium, numpy, torch; print(platform.python_version(), "
        "torch.__version__ + (' (CUDA)' if torch.version.cuda else ''), "
        "gymnasium.__version__, numpy.__version__, sep='|')"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    names = ("python", "torch", "gymnasium", "numpy")
    return dict(zip(names, done.stdout.strip().split("|"), strict=True))


def megabytes(folder: Path) -> int:
    """Return the size of the files of an environment; links and directories count nothing."""
    sizes = (path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    return round(sum(sizes) / 1e6)
