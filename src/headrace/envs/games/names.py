"""PettingZoo's games by name: `classic/rps-v2` is the module `pettingzoo.classic.rps_v2`.

PettingZoo is imported where a game of that form of name is made or looked for, and by name: it need
not be installed.
"""

import importlib
import pkgutil
import re
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium

FAMILIES = {
    "atari": "pettingzoo.atari",
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "mpe2": "mpe2",
    "sisl": "pettingzoo.sisl",
}
"""What an id begins with -> the package of its modules."""
_MODULE = re.compile(r"([A-Za-z0-9_]+)_v(\d+)")
_ID = re.compile(r"([a-z0-9]+)/([A-Za-z0-9_]+)(?:-v(\d+))?")


def is_game(env_id: str) -> bool:
    """Return whether an id is one of PettingZoo's by its form, and none that is registered."""
    match = _ID.fullmatch(env_id)
    return match is not None and match[1] in FAMILIES and env_id not in gymnasium.registry


def make(env_id: str, **kwargs: Any) -> Any:
    """Make a game: in the parallel form if it has one, else in the AEC form.

    Raises:
        UnregisteredEnv: there is no such game.
        ModuleNotFoundError: a package that it needs is not installed.
    """
    match = _ID.fullmatch(env_id)
    assert match is not None, env_id
    module = f"{FAMILIES[match[1]]}.{match[2]}_v{match[3]}"
    try:
        with warnings.catch_warnings():
            # Of its own, newer way of making games, which PettingZoo below 1.27 does not have
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module(FAMILIES[match[1]])
            found: Any = importlib.import_module(module)
        # Games that are played in turns have no parallel form.
        return getattr(found, "parallel_env", found.env)(**kwargs)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise gymnasium.error.UnregisteredEnv(env_id) from None
        raise
    except ImportError as error:  # some say in words of their own which package is missing
        raise ModuleNotFoundError(str(error)) from error


def missing_extra(env_id: str, error: Exception) -> str:
    """Return PettingZoo's own extra that brings a missing package; "": PettingZoo is missing."""
    is_itself = getattr(error, "name", None) in {each.split(".")[0] for each in FAMILIES.values()}
    return "" if is_itself or env_id.startswith("mpe2/") else env_id.partition("/")[0]


def installed(family: str) -> Iterator[str]:
    """Yield the ids of a family's games, if its package is installed."""
    try:
        package = importlib.import_module(FAMILIES[family])
    except ModuleNotFoundError:
        return
    for module in pkgutil.iter_modules(package.__path__):
        if (match := _MODULE.fullmatch(module.name)) is not None:
            yield f"{family}/{match[1]}-v{match[2]}"


def newest_version(env_id: str) -> str:
    """Return a game's id with the largest version that is installed, if it has none."""
    if (match := _ID.fullmatch(env_id)) is None or match[3] is not None:
        return env_id
    versions = [
        int(found.rpartition("-v")[2])
        for found in installed(match[1])
        if found.rpartition("-v")[0] == env_id
    ]
    return f"{env_id}-v{max(versions)}" if versions else env_id
