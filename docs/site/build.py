"""Builds the documentation site: `make docs`.

The pages are laid out in a temporary folder as they are in the repository, so that links between
them are the same on the site as on GitHub. Three kinds are added: the start page with the
navigation (`index.md`), the reference, which `reference.py` makes from the code, and the files
that pages show or offer. Left out: how Sphinx makes pages of them (`conf.py`), and publishing.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import reference
from sphinx.cmd.build import main as sphinx_build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md", "benchmarks/README.md",
    "docs/*.md", "docs/migrate/*.md",
)  # fmt: skip
SHOWN = (
    "benchmarks/results/**/*.png", "benchmarks/results/*.mp4", "docs/*.png", "docs/migrate/*.png",
    "examples/*.py",
)  # fmt: skip


def lay_out(source: Path) -> None:
    """Write all that Sphinx reads below `source`, a new folder."""
    for pattern in (*PAGES, *SHOWN):
        for path in ROOT.glob(pattern):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    shutil.copy2(HERE / "index.md", source)
    reference.write(source / "reference")


def build(to: Path, builder: str = "html") -> int:
    """Build the site below a folder; return Sphinx's exit code. A warning is an error."""
    strict = ["--fail-on-warning", "--keep-going", "--fresh-env", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="headrace-site-") as name:
        source, doctrees = Path(name, "source"), Path(name, "doctrees")
        lay_out(source)
        places = [source, to / builder, "-c", HERE, "-d", doctrees]
        return sphinx_build([*strict, "--builder", builder, *map(str, places)])


def main() -> int:
    """Read the command line, and build."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--to", type=Path, default=HERE.parent / "_build", help="a folder")
    parser.add_argument("--builder", default="html", help="html, or linkcheck")
    flags = parser.parse_args()
    code = build(flags.to, flags.builder)
    if code == 0 and flags.builder == "html":
        print(f"The site: {flags.to / 'html/index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
