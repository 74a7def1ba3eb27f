"""What the pages show to be typed: marked blocks are run, and every command line is read."""

import re
import shlex

import pytest

from headrace.cli import flags as cli_flags
from headrace.cli.argv import rename_flags
from headrace.cli.main import VERBS, flags_of
from headrace.errors import HeadraceError
from tests.project.blocks import ROOT, SHELL, Block, blocks, pages, run

FIRST = ("README.md",)
"""What `make test` runs; the others are run by `make test-more`, or, of these, `make test-all`."""
SLOW = ("leagues", "offline", "profile", "scaling", "tag")


def marked():
    found = []
    for path in pages():
        name, marks = str(path.relative_to(ROOT)), []
        if name not in FIRST:
            marks = [pytest.mark.more, *([pytest.mark.slow] if path.stem in SLOW else [])]
        if any(block.mark == "run" for block in blocks(path)):
            found.append(pytest.param(path, id=name, marks=marks))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", marked())
def test_the_marked_blocks_of_a_page_run(path, tmp_path):
    run(path, tmp_path)


def commands(block):
    """The `headrace` commands of a shell block, without what the shell does with them."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if found := re.match(r"(?:.* -m )?headrace (?!VERB)(.*)", line):
            words = shlex.split(re.sub(r"<\(.*?\)", "PIPE", found[1]), comments=True)
            yield words[: words.index(">") if ">" in words else None]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_line_of_a_page_has_flags_and_values_that_exist(path):
    for block in blocks(path):
        for verb, *argv in commands(block) if block.language in SHELL else ():
            assert verb in VERBS, f"{block}: {verb}"
            try:
                cli_flags.parse(verb, "", flags_of(verb), rename_flags(argv))
            except (HeadraceError, SystemExit) as error:
                pytest.fail(f"{block}: headrace {verb} {shlex.join(argv)}\n{error}")


def test_a_mark_is_read_with_its_changes_and_the_lines_that_come_first(tmp_path):
    page = ROOT / "docs/start.md"
    block = Block(page, 1, "bash", "echo A B\n", "run", "true\n", {"A": "1"})
    assert block.to_run() == "true\necho 1 B\n"
    block.changes = {"C": "1"}
    with pytest.raises(ValueError, match=r"docs/start\.md:1: the block has no 'C'"):
        block.to_run()
    path = tmp_path / "page.md"
    path.write_text(
        "<!-- run: A -> 1; B -> 2\ntrue\n-->\n```bash\necho A B\n```\n"
        "<!-- save as a.py -->\n```python\nx = 1\n```\n\n```\nno mark\n```\n"
    )
    shell, saved, plain = blocks(path)
    assert (shell.line, shell.first, shell.changes) == (4, "true\n", {"A": "1", "B": "2"})
    assert (saved.mark, saved.name, saved.code) == ("save", "a.py", "x = 1\n")
    assert (plain.mark, plain.line) == ("", 12)
    path.write_text("<!-- run -->\n\n```bash\ntrue\n```\n")
    with pytest.raises(ValueError, match="a mark that is not in the line before a block"):
        blocks(path)


def test_a_block_that_fails_is_named_with_its_line_and_what_it_printed(tmp_path):
    path = tmp_path / "failing.md"
    path.write_text("<!-- run -->\n```bash\necho so far; false; echo never\n```\n")
    with pytest.raises(AssertionError) as failed:
        run(path, tmp_path)
    assert "failing.md:2: exit code 1" in str(failed.value)
    assert "so far\n" in str(failed.value) and "\nnever" not in str(failed.value)
