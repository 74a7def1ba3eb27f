"""Finds out whether this commit is fit for release (`make release-check`).

Builds the wheel and the sdist of HEAD and checks what is in them. Then installs the wheel, and once
the sdist, into fresh environments, and uses each from a folder outside the repository as a newcomer
would. Ends with one table, and what is still to do before publishing. Left out: the tests
(`make test-all`), and publishing.

A row has `pinned` versions (constraints.txt), the `oldest` that pyproject.toml allows, or the
`newest`. A combination that cannot be had here is a row that says so. torch is its CPU build; with
--cuda-builds it may be a CUDA build where there is no other, which takes several GB.

Results: benchmarks/results/release.json. Exit code 1: a row or a check failed.
"""

import argparse
import itertools
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import RESULTS, machine
from release import artifacts, environments, smoke
from release.environments import PYTHONS, Installer

ALL = tuple(extra for extra in smoke.SMOKES if extra)
ALL_BUT_BOX2D = tuple(extra for extra in ALL if extra != "box2d")
"""Whose oldest Gymnasium is the oldest of all; Box2D has wheels with a later one alone."""
NAMES = {(): "none", ALL: "all of these", ALL_BUT_BOX2D: "all of these but box2d"}
COLUMNS = {
    "python": "Python",
    "versions": "versions",
    "torch": "torch",
    "gymnasium": "gymnasium",
    "numpy": "numpy",
    "extras": "extras",
    "installed_mb": "MB",
    "install_s": "s to install",
    "smoke_s": "s of use",
    "result": "result",
}


@dataclass(frozen=True)
class Combination:
    """What one row of the table tries."""

    python: str
    versions: str
    extras: tuple[str, ...] = ALL
    from_sdist: bool = False
    pinned_torch: bool = False

    def labels(self) -> dict[str, Any]:
        """Return the cells of the row that are known before anything is tried."""
        extras = NAMES.get(self.extras, ", ".join(self.extras))
        return dict.fromkeys(COLUMNS) | {
            "python": self.python,
            "versions": self.versions + ", pinned torch" * self.pinned_torch,
            "extras": extras + " (from the sdist)" * self.from_sdist,
        }


def combinations(only: list[str]) -> list[Combination]:
    """Return the rows in order: those of the same versions together."""
    first, *others = PYTHONS
    rows = [Combination(first, "pinned", ()), Combination(first, "pinned", (), from_sdist=True)]
    rows += [Combination(first, "pinned", (extra,)) for extra in ALL]
    rows += [Combination(python, "pinned") for python in others]
    # Their torch may have no CPU build here: the rest of those versions is tried all the same.
    rows.append(Combination(first, "oldest", ("box2d",), pinned_torch=True))
    for versions, extras in (("oldest", ALL_BUT_BOX2D), ("newest", ALL)):
        rows.append(Combination(first, versions, extras, pinned_torch=True))
        rows += [Combination(python, versions, extras) for python in PYTHONS]
    return [row for row in rows if not only or row.versions in only]


def try_out(
    installer: Installer, tried: Combination, package: Path, version: str
) -> dict[str, Any]:
    """Return the row of one combination, whose environment is gone again."""
    row = tried.labels()
    try:
        python = environments.interpreter(tried.python)
        torch = installer.torch(python, "pinned" if tried.pinned_torch else tried.versions)
    except environments.NotHereError as missing:
        return row | {"result": f"not here: {missing}"}
    except environments.InstallError as error:
        return row | {"result": f"FAILED: {error}"}
    wanted = f"headrace[{','.join(tried.extras)}] @ {package.as_uri()}"
    with tempfile.TemporaryDirectory(prefix="row-", dir=installer.cache.parent) as name:
        venv, home = Path(name, "venv"), Path(name, "home")
        home.mkdir()
        try:
            constraints = installer.constraints(python, tried.versions, tried.extras, torch)
            inside, row["install_s"] = installer.install(python, wanted, constraints, venv)
            row["installed_mb"] = environments.megabytes(venv)
            row |= environments.versions_of(inside)
            row["smoke_s"] = smoke.smoke(inside, tried.extras, version, home)
        except (environments.InstallError, smoke.SmokeError) as error:
            return row | {"result": f"FAILED: {error}"}
    return row | {"result": "passed"}


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table of Markdown; of a failure its first line."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [str(row[name] if row[name] is not None else "-") for name in COLUMNS]
        lines.append("| " + " | ".join(cell.split("\n")[0] for cell in cells) + " |")
    return "\n".join(lines)


def left_to_do(source: Path) -> list[str]:
    """Return what a check cannot decide, and a release must not forget."""
    (top, *_) = re.findall(r"^## (.+)$", (source / "CHANGELOG.md").read_text(), re.MULTILINE)
    todo = []
    if not top.startswith(artifacts.version_of(source)):
        todo.append(f"CHANGELOG.md begins with {top!r}: give the section its version and date.")
    if "[project.urls]" not in (source / "pyproject.toml").read_text():
        todo.append("pyproject.toml has no [project.urls], and README's links are relative.")
    return todo


def check(work: Path, only: list[str], allow_cuda: bool) -> dict[str, Any]:
    """Build in `work`, and try every combination; return what was found."""
    source = artifacts.export(work / "source")
    wheel, sdist = artifacts.build(source, work / "dist", "--installer", "uv")
    problems = artifacts.problems(source, wheel, sdist)
    print(f"Built {wheel.name} and {sdist.name}.", *problems, sep="\n", flush=True)
    rows = []
    for versions, group in itertools.groupby(combinations(only), lambda row: row.versions):
        # A cache for each: of several CUDA builds the disk holds one at a time.
        with tempfile.TemporaryDirectory(prefix=f"{versions}-", dir=work) as name:
            installer = Installer(source, Path(name, "cache"), allow_cuda)
            for tried in group:
                package = sdist if tried.from_sdist else wheel
                row = try_out(installer, tried, package, artifacts.version_of(source))
                rows.append(row)
                said = (row[name] for name in ("python", "versions", "extras", "result"))
                print(*said, sep="; ", flush=True)
    return {
        "bytes": {path.name: path.stat().st_size for path in (wheel, sdist)},
        "problems": problems,
        "rows": rows,
        "left_to_do": left_to_do(source),
    }


def main() -> int:
    """Check, print and write down."""
    parser = argparse.ArgumentParser(
        prog="python -m release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cuda-builds", action="store_true", help="allow CUDA builds of torch")
    only = "these rows alone, and no results file; may be repeated"
    kinds = ("pinned", "oldest", "newest")
    parser.add_argument("--only", action="append", default=[], choices=kinds, help=only)
    flags = parser.parse_args()
    began = machine()
    with tempfile.TemporaryDirectory(prefix="headrace-release-") as name:
        found = check(Path(name), flags.only, flags.cuda_builds)
    if not flags.only:
        (RESULTS / "release.json").write_text(
            json.dumps({"machine": began} | found, indent=1) + "\n"
        )
    print("", table(found["rows"]), "", *found["problems"], *found["left_to_do"], sep="\n")
    failed = [row for row in found["rows"] if row["result"].startswith("FAILED")]
    return 1 if found["problems"] or failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted: no results, and nothing is left behind.")
