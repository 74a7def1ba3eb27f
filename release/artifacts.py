"""The wheel and the sdist: built from the files of HEAD alone, and what must be in them.

Left out: installing them (`environments.py`).
"""

import email.message
import email.parser
import io
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_SOURCE = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
"""What the sdist has besides `src`. Hatchling adds two files of its own (`ADDED`)."""
ADDED = {".gitignore", "PKG-INFO"}
IN_DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def export(folder: Path) -> Path:
    """Write the files of HEAD, and nothing that only lies beside them, to a new folder."""
    tar = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(tar.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def version_of(source: Path) -> str:
    """Return the version that the source says it has."""
    text = (source / "src/headrace/__init__.py").read_text()
    return str(re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0])


def build(source: Path, out: Path, *flags: str) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel. `flags` are further ones of `python -m build`.

    Raises:
        RuntimeError: The build failed, or a wheel of the source itself is another one.
    """
    _build(source, out, *flags)
    build_wheel(source, out / "direct", *flags)
    (wheel,), (direct,) = out.glob("*.whl"), (out / "direct").glob("*.whl")
    if wheel.read_bytes() != direct.read_bytes():
        raise RuntimeError(f"{wheel.name}: built from the sdist, it differs from the source's")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def build_wheel(source: Path, out: Path, *flags: str) -> None:
    """Build the wheel of the source itself."""
    _build(source, out, "--wheel", *flags)


def _build(source: Path, out: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "build", "--outdir", str(out), *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(done.stdout + done.stderr).strip()[-2000:]}")


def problems(source: Path, wheel: Path, sdist: Path) -> list[str]:
    """Return what is wrong with the contents and the metadata, a sentence each."""
    package = {str(path.relative_to(source)) for path in package_files(source)}
    name, version, *_ = wheel.name.split("-")
    with zipfile.ZipFile(wheel) as archive:
        info = f"{name}-{version}.dist-info"
        expected = {path.removeprefix("src/") for path in package}
        expected |= {f"{info}/{each}" for each in IN_DIST_INFO}
        found = _differences(wheel.name, set(archive.namelist()), expected)
        metadata = archive.read(f"{info}/METADATA")
    with tarfile.open(sdist) as tar:
        names = {each.name.partition("/")[2] for each in tar if each.isfile()}
        found += _differences(sdist.name, names, package | BESIDE_THE_SOURCE | ADDED)
    return found + _metadata_problems(source, metadata)


def package_files(source: Path) -> list[Path]:
    """Return the files of the package, code and data."""
    found = (source / "src").rglob("*")
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _differences(of: str, names: set[str], expected: set[str]) -> list[str]:
    return [
        *(f"{of} lacks {name}" for name in sorted(expected - names)),
        *(f"{of} has {name}, which is not part of it" for name in sorted(names - expected)),
    ]


def _metadata_problems(source: Path, text: bytes) -> list[str]:
    """Return where an index, or a reader of its page, would be told something else."""
    read = Metadata.from_email(text)  # raises where an index would refuse it
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    message: email.message.Message = email.parser.BytesParser().parsebytes(text)
    said = {
        "version": (str(read.version), version_of(source)),
        "description": (read.description, (source / "README.md").read_text()),
        "form of the description": (message["Description-Content-Type"], "text/markdown"),
        "licence": (read.license_expression, project["license"]),
        "licence files": (read.license_files, project["license-files"]),
        "Python versions": (str(read.requires_python), project["requires-python"]),
        "classifiers": (read.classifiers, project["classifiers"]),
        "URLs": (dict(read.project_urls or {}), project.get("urls", {})),
        "extras": (sorted(read.provides_extra or []), sorted(project["optional-dependencies"])),
    }
    return [
        f"The metadata's {name}: {str(there)[:80]!r}, expected {str(expected)[:80]!r}"
        for name, (there, expected) in said.items()
        if there != expected
    ]
