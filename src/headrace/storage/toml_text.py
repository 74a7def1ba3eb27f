"""Settings as the text of a TOML file, which `--config` reads."""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def toml_text(comments: Iterable[str], settings: Mapping[str, Any]) -> str:
    """Return the text of a file with comments and settings, which have no None."""
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    lines += [f"{name} = {_value(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Format plain data; TOML has lists, text and numbers as JSON has them."""
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(key))} = {_value(each)}" for key, each in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)
