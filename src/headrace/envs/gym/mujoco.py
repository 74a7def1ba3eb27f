"""Prints each of MuJoCo's warnings once, although each environment compiles its model."""

import contextlib
import sys
from collections.abc import Iterator

_seen: set[str] = set()
_muted = False


def print_warnings_once() -> None:
    """Print each warning of this process once, to standard error."""
    import mujoco

    if hasattr(mujoco, "set_mju_user_warning"):
        mujoco.set_mju_user_warning(_on_warning)


@contextlib.contextmanager
def mute_warnings() -> Iterator[None]:
    """Mute warnings while environments are made that are like one made before."""
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


def _on_warning(text: str) -> None:
    if text not in _seen and not _muted:
        print(f"headrace: warning of MuJoCo: {text}", file=sys.stderr)
    _seen.add(text)
