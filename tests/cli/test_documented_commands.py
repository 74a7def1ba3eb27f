"""Each command that the documentation shows is one that `headrace` takes, word by word."""

import importlib
import re
import shlex

import pytest

from headrace.cli.argv import is_on
from headrace.cli.flags import explicit, parse
from headrace.cli.list_command import _List
from headrace.cli.main import TOOL_VERBS, VERBS
from headrace.cli.track_command import _Track
from headrace.config.resolve import resolve
from tests.project.test_project import ROOT, markdown

COMMAND = re.compile(rf"(?:^|-m |-- )headrace ((?:{'|'.join(VERBS)})\b.*)")


def shown(text):
    """The command lines in a page: of its blocks, and those between backticks with arguments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    between = [each.replace("\n", " ") for each in re.findall(r"`([^`]+)`", rest)]
    return [line.strip() for line in lines] + [each for each in between if each.count(" ") > 1]


def commands():
    """Each command of the documentation, with the first page that has it."""
    found = {}
    for page in markdown():
        for line in shown(page.read_text()):
            if match := COMMAND.search(line):
                found.setdefault(match[1], page.relative_to(ROOT))
    return found


def words_of(command):
    """The words that the shell passes on, with a number where the page has a letter for it."""
    command = re.sub(r"<\(.*?\)", "/dev/fd/63", command)
    words = shlex.split(command.translate(str.maketrans("[]", "  ")), comments=True)
    words = words[: words.index(">")] if ">" in words else words
    return [{"W": "2", "N": "2"}.get(word, word) for word in words if word != "..."]


def flags_of(verb):
    if verb in ("list", "track"):
        return {"list": _List, "track": _Track}
    home = "tool_commands" if verb in TOOL_VERBS else "commands"
    return importlib.import_module(f"headrace.cli.{home}").FLAGS


COMMANDS = commands()


def test_pages_have_commands_of_every_verb():
    assert {command.split()[0] for command in COMMANDS} | {"doctor"} == set(VERBS)
    pages = {str(page) for page in COMMANDS.values()}
    assert {"README.md", "docs/using.md", "docs/cluster.md", "deploy/README.md"} <= pages


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()))
def test_a_documented_command_is_taken(command):
    verb, *argv = words_of(command)
    if is_on(argv, "help"):
        with pytest.raises(SystemExit, match="0"):
            parse(verb, "", flags_of(verb)[verb], argv)
        return
    parsed = parse(verb, "", flags_of(verb)[verb], argv)
    if verb == "train":
        resolve(explicit(argv, parsed), cores=2)
