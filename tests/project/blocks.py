"""Blocks of code in Markdown pages, and how those that are marked are run.

A mark is an HTML comment in the line before a block. Neither GitHub nor the site shows it:

    <!-- run -->                           the block is run as it is
    <!-- run: ENV -> CartPole-v1; A -> B -->    the same, with other words in these places
    <!-- run
    headrace train ... --run-dir runs/NAME     these lines come first, in the block's language
    -->
    <!-- save as room.py -->               the block is a file that later blocks use

The blocks of a page are run in their order, in one folder, each in a process of its own. In shell
blocks `$REPOSITORY` is the folder of the source.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ("bash", "")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:run|save as)\b.*?)-->\n)?"
    r"^(?P<indent> *)```(?P<language>[\w{}-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
MARK = re.compile(r"<!-- (?:run|save as)\b")


@dataclass
class Block:
    """A block of a page.

    Attributes:
        mark: `run`, `save`, or empty.
        code: as the page shows it.
        first: code that is run before it, which the page does not show.
        changes: what stands in the page -> what is run in its place.
        name: of the file that it is saved as.
    """

    path: Path
    line: int
    language: str
    code: str
    mark: str = ""
    first: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    name: str = ""

    def __str__(self):
        return f"{os.path.relpath(self.path, ROOT)}:{self.line}"

    def to_run(self):
        """The code with its changes; ValueError for one that the page has not."""
        code = self.code
        for old, new in self.changes.items():
            if old not in code:
                raise ValueError(f"{self}: the block has no {old!r}, which its mark replaces")
            code = code.replace(old, new)
        return self.first + code


def pages():
    """The pages whose blocks are looked at."""
    folders = (ROOT / "docs", ROOT / "docs/migrate")
    return [ROOT / "README.md", *(page for of in folders for page in sorted(of.glob("*.md")))]


def blocks(path):
    """The blocks of a page, in order; ValueError for a mark that is before no block."""
    text, found = path.read_text(), []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("indent")) + 1
        block = Block(path, line, match["language"], match["code"])
        if match["mark"]:
            head, _, block.first = match["mark"].strip().partition("\n")
            block.first += "\n" if block.first else ""
            block.mark, _, more = head.partition(" " if head.startswith("save") else ":")
            if block.mark == "save":
                block.name = more.removeprefix("as ").strip()
            elif more:
                pairs = (change.split(" -> ") for change in more.split("; "))
                block.changes = {old.strip(): new.strip() for old, new in pairs}
        found.append(block)
    if len(MARK.findall(text)) != sum(bool(block.mark) for block in found):
        raise ValueError(f"{path}: a mark that is not in the line before a block")
    return found


def run(path, folder):
    """Run the marked blocks of a page in a folder; AssertionError with what a block printed."""
    here = Path(sys.executable).parent
    env = os.environ | {"PATH": f"{here}:{os.environ['PATH']}", "REPOSITORY": str(ROOT)}
    for block in blocks(path):
        if block.mark == "save":
            (folder / block.name).write_text(block.code)
        elif block.mark:
            shell = block.language in SHELL
            start = ["bash", "-eo", "pipefail", "-c"] if shell else [sys.executable, "-c"]
            done = subprocess.run(
                [*start, block.to_run()], cwd=folder, env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            said = f"{block}: exit code {done.returncode}\n{block.to_run()}\n{done.stdout}"
            assert done.returncode == 0, said
