"""The errors. Their messages say what was given, what was expected and what to do."""

import ast
import difflib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class HeadraceError(Exception):
    """The base of all errors that Headrace raises on purpose."""

    def of_rank(self, rank: int, size: int) -> "HeadraceError":
        """Return the same error with the rank in its message."""
        return type(self)(f"{self}\n(rank {rank} of {size})")


class UsageError(HeadraceError, ValueError):
    """An impossible request: nothing was started, and the exit code is 2."""


class ConfigError(UsageError):
    """An unknown, ill-typed or contradictory setting."""


class EnvNotFoundError(UsageError):
    """An environment that does not exist or cannot be imported."""


class MissingExtraError(UsageError):
    """A missing package of an optional feature; the message names its extra."""


class UnsupportedSpaceError(UsageError):
    """An observation or action space that no policy here can handle."""


class RunDirError(HeadraceError):
    """A run directory that is in use, holds nothing to resume, or is another run's."""


class CheckpointError(RunDirError):
    """A checkpoint that is damaged or does not fit."""


class EnvError(HeadraceError):
    """An environment's exception, or a value outside its spaces.

    The message begins with the environment's own traceback and ends with the position: env index,
    worker, seed, episode, step and last action.
    """


class EnvChangeError(EnvError):
    """A change that `on_update` returned, which an environment cannot have or which raised."""


class PlayerError(HeadraceError):
    """A scripted player that failed, or chose what is no action; the message has its traceback."""


class WorkerError(HeadraceError):
    """A worker process that died or failed, not by an environment's error."""


class RankError(HeadraceError):
    """Another rank of the job that died, failed, or does not answer."""


class RanksChangedError(RankError):
    """The ranks of the job change: those that are left go on, and another process joins them."""


class RankLostError(RanksChangedError):
    """Another rank of the job that has died: others may go on without it."""


class NonFiniteError(HeadraceError):
    """NaN or infinity in the loss, a gradient or a parameter; training stopped."""


class ExportError(HeadraceError):
    """A policy that cannot be exported, or an exported file that does not do what it does."""


class TrackerError(HeadraceError):
    """A tracker that cannot be reached, or refuses what it is given."""


class HubError(HeadraceError):
    """A hub of models that cannot be reached, or refuses what it is given."""


_MOST_QUOTED = 200  # characters


def quoted(error: Exception) -> str:
    """Return what an error of Python says, for a message; the end of a long text is left out."""
    said = repr(error)
    return said if len(said) <= _MOST_QUOTED else f"{said[:_MOST_QUOTED]}..."


def install_command(extra: str) -> str:
    """Return the command that installs an extra. From a clone, it keeps the constraints."""
    clone = Path(__file__).parents[2]
    if (clone / "constraints.txt").is_file():
        return f"pip install -c {clone}/constraints.txt -e '{clone}[{extra}]'"
    return f"pip install 'headrace[{extra}]'"


def flag(name: str) -> str:
    """Return the flag of a setting, as it is typed."""
    return f"--{name.replace('_', '-')}"


def flags_of(settings: Mapping[str, Any]) -> str:
    """Return settings as flags with their values, as they are typed."""
    return " ".join(_typed(name, value) for name, value in settings.items())


def _typed(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    if isinstance(value, list | tuple):
        points = [each for each in value if isinstance(each, list | tuple)]
        words = [str(each) for each in value]
        value = ",".join(f"{steps:g}:{y:.4g}" for steps, y in points) or " ".join(words)
    if isinstance(value, Mapping):
        value = shlex.join(f"{key}={_literal(of)}" for key, of in value.items())
    return f"{flag(name)} {value}"


def _literal(value: Any) -> str:
    """Return a value as `key=value` is read: as text if that is read as text, else in Python."""
    if isinstance(value, str):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return repr(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: similar known names, if any."""
    lowered = {each.lower(): each for each in known}
    near = [lowered[each] for each in difflib.get_close_matches(name.lower(), lowered, n=2)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
