"""What can go wrong, as a tree; the messages say what was given, what was expected and what to do.

HeadraceError
├── UsageError (also a ValueError)   the caller asked for something that cannot be: exit code 2
│   ├── ConfigError                  an unknown, ill-typed or contradictory setting
│   ├── EnvNotFoundError             no such environment (with the near misses)
│   ├── MissingExtraError            a package that an optional feature needs is not installed
│   └── UnsupportedSpaceError        a space, named with its key, that no policy here can handle
├── RunDirError                      a run directory in use, incomplete, or of something else
│   └── CheckpointError              a checkpoint that is damaged or does not fit
├── EnvError                         the user's environment raised or broke its own declaration
├── WorkerError                      a worker process died or failed
├── RankError                        another learner of the job died, failed or does not answer
└── NonFiniteError                   NaN or infinity in the loss, a gradient or a parameter

Left out: how they are printed and which exit code follows (`main.py`).
"""

import difflib
from collections.abc import Iterable


class HeadraceError(Exception):
    """The root: everything that Headrace raises on purpose."""

    def of_rank(self, rank: int, size: int) -> "HeadraceError":
        """The same, saying on which rank of a job."""
        return type(self)(f"{self}\n(rank {rank} of {size})")


class UsageError(HeadraceError, ValueError):
    """The caller asked for something that cannot be; nothing was started."""


class ConfigError(UsageError):
    """An unknown, ill-typed or contradictory setting."""


class EnvNotFoundError(UsageError):
    """The environment that was named does not exist or cannot be imported."""


class MissingExtraError(UsageError):
    """A package is missing; the message names the extra that brings it."""


class UnsupportedSpaceError(UsageError):
    """An observation or action space that no policy here can handle."""


class RunDirError(HeadraceError):
    """A run directory is in use, holds nothing to resume, or belongs to something else."""


class CheckpointError(RunDirError):
    """A checkpoint is damaged or does not fit what it is loaded into."""


class EnvError(HeadraceError):
    """An environment raised, or returned what its spaces rule out.

    The message begins with the environment's own traceback and ends with where it happened:
    env index, worker, seed, episode, step and last action.
    """


class WorkerError(HeadraceError):
    """A worker process died, or failed in a way that is no environment's."""


class RankError(HeadraceError):
    """Another rank (learner) of the job died, failed, or does not answer."""


class NonFiniteError(HeadraceError):
    """NaN or infinity reached the loss, a gradient or a parameter; training stopped."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known ones that are like it, if any are."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(near)}?" if near else ""
