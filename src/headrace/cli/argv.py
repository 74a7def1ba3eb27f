"""Finds flags in a command line before tyro reads it. No other file looks for them there.

As with tyro, a value follows its flag as the next word or after `=`, and a flag's name may have
underscores for dashes. Imports nothing heavy: `main.py` asks before anything is loaded.
"""

import itertools
import re
from collections.abc import Mapping

from headrace.config.old_names import NAMES, VALUES
from headrace.errors import flag


def _split(word: str) -> tuple[str, str | None]:
    """Return the name of a flag, with underscores, and its value after `=`; "" for other words."""
    first, equals, value = word.partition("=")
    if not first.startswith("--"):
        return "", None
    return first[2:].replace("-", "_"), value if equals else None


def flag_names(argv: list[str]) -> list[str]:
    """Return the names of the flags in a command line, with underscores."""
    return [name for name, _ in map(_split, argv) if name]


def value_of(argv: list[str], name: str) -> str | None:
    """Return the value of a flag: the last, as with tyro. None without the flag or a value."""
    value = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        found, joined = _split(word)
        if found == name:
            value = following if joined is None else joined
    return value


def is_on(argv: list[str], name: str) -> bool:
    """Return whether a flag without a value is there, and not its `--no-` after it."""
    return [each for each in flag_names(argv) if each in (name, f"no_{name}")][-1:] == [name]


def as_typed(text: str, argv: list[str]) -> str:
    """Return a message with the flags of a command line in place of the names of its settings."""
    for name in flag_names(argv):
        text = re.sub(rf"(?<!\S){re.escape(name)}=(?=\S)", f"{flag(name)} ", text)
    return text


def without_flags(argv: list[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Return the words of a command line without some flags and their values.

    Args:
        takes_value: whether a flag has one value, or none and a `--no-`; by names.
    """
    kept, words = [], iter(argv)
    for word in words:
        name, joined = _split(word)
        if takes_value.get(name, False):
            if joined is None:
                next(words, None)
        elif name.removeprefix("no_") not in takes_value:
            kept.append(word)
    return kept


def rename_flags(argv: list[str]) -> list[str]:
    """Return the words of a command line with today's flags and values for former ones."""
    words: list[str] = []
    before = ""  # the flag whose value comes next
    for word in argv:
        name, joined = _split(word)
        first = flag(NAMES[name]) if name in NAMES else word.partition("=")[0]
        if not name:
            words.append(VALUES.get((before, word), word))
        else:
            words.append(
                first if joined is None else f"{first}={VALUES.get((name, joined), joined)}"
            )
        before = name if joined is None else ""
    return words
