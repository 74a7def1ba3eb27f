"""MuJoCo says what it has to say once. Left out: what it says.

MuJoCo 4 warns of each model that it compiles; a run compiles the same one for every environment.
"""

import contextlib
import sys
from collections.abc import Iterator

_said: set[str] = set()
_muted = False


def listen() -> None:
    """Print each warning of this process once, to standard error."""
    import mujoco

    if hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_hear)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """While environments are made that are like one made before: its warnings were heard then."""
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


def _hear(text: str) -> None:
    if text not in _said and not _muted:
        print(f"headrace: warning of MuJoCo: {text}", file=sys.stderr)
    _said.add(text)
