"""Imports what a user names as `module:callable`: an environment, a wrapper, a network.

Names come from the command line, a `--config` file or Python, never from a file of a run.
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError, UsageError

_importing: list[str] = []
"""What is imported at this moment, innermost last: `module:name`, as the user gave it."""


def load(text: str, error: type[UsageError]) -> tuple[ModuleType, str, Callable[..., Any] | None]:
    """Import the module of `module:name`.

    Returns:
        The module, the name, and the callable of that name (None if there is none).

    Raises:
        UsageError: of the type `error`: it is not `module:name`, or there is no such module.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise error(f"{text!r}: expected module:callable, as in my_package.my_module:my_function.")
    _look_in_current_folder()
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_of(module_name)
        raise error(f"{text!r}: expected a module, not a file.\nDid you mean {dotted}:{name}?")
    _importing.append(text)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name != module_name.partition(".")[0] and missing.name != module_name:
            raise
        raise error(
            f"There is no module {module_name!r} (from {text!r}), looked for in {os.getcwd()} and "
            "on the Python path.\nExpected module:callable, as you would import it."
        ) from None
    finally:
        _importing.pop()
    target = getattr(module, name, None)
    return module, name, target if callable(target) else None


def refuse_while_importing(what: str) -> None:
    """Refuse a call that stands at the top of a module which is imported for something else.

    Raises:
        ConfigError: such an import is under way.
    """
    if _importing:
        module = _importing[-1].partition(":")[0]
        raise ConfigError(
            f"{what} was called by the import of the module {module!r}, which was imported to find "
            f'{_importing[-1]}.\nIn that file, put the call below `if __name__ == "__main__":`, so '
            "that an import does not make it."
        )


def is_module(name: str) -> bool:
    """Return whether `load` would find a module of this name."""
    _look_in_current_folder()
    return name.isidentifier() and importlib.util.find_spec(name) is not None


def _look_in_current_folder() -> None:
    if os.getcwd() not in sys.path:  # the console script does not put the user's folder there
        sys.path.insert(0, os.getcwd())


def module_of(file: str) -> str:
    """Return the name of the module that a file holds, by its path from the current folder."""
    return file.removesuffix(".py").strip("./").replace("/", ".")


def offered(file: str, base: str) -> list[str]:
    """Return `module:Class` for the classes of a file whose base class is named so.

    The file is read, not run. Without such a class, or such a file: [`module:NAME`].
    """
    module, names = module_of(file), list[str]()
    # What cannot be read offers nothing; running it will say why.
    with contextlib.suppress(OSError, SyntaxError, ValueError), open(file, "rb") as source:
        names = [
            node.name
            for node in ast.parse(source.read()).body
            if isinstance(node, ast.ClassDef)
            and any(ast.unparse(each).endswith(base) for each in node.bases)
        ]
    return [f"{module}:{name}" for name in names or ["NAME"]]


def load_callable(text: str, error: type[UsageError]) -> Callable[..., Any]:
    """Return the callable that `module:callable` names.

    Raises:
        UsageError: of the type `error`, with near misses.
    """
    module, name, target = load(text, error)
    if target is None:
        raise error(f"The module {module.__name__!r} has no callable {name!r}.{near(module, name)}")
    return target


def near(module: ModuleType, name: str) -> str:
    """Return a question with the callables of the module whose names are like `name`, or ""."""
    offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    matches = difflib.get_close_matches(name, offered, n=3, cutoff=0.4)
    names = " or ".join(f"{module.__name__}:{match}" for match in matches)
    return f"\nDid you mean {names}?" if names else ""
