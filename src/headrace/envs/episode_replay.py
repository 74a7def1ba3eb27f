"""Restores an unfinished episode after a resume, by its state or its actions, without pickle."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from headrace.spec import Array

_TRANSPARENT = (OrderEnforcing, PassiveEnvChecker, TimeLimit)
NO_LIMIT = 1 << 62


def unwrap(env: Any) -> tuple[Any, int]:
    """Return the environment inside of Gymnasium's transparent wrappers, and its time limit."""
    limit = NO_LIMIT
    while type(env) in _TRANSPARENT:  # not a subclass, which may do more
        if type(env) is TimeLimit:
            limit = min(limit, int(env._max_episode_steps))
        env = env.env
    return env, limit


class ActionLog:
    """The environment actions of unfinished episodes, in pieces of a fragment each."""

    def __init__(self) -> None:
        self._pieces: deque[Array] = deque()
        self._length = 0

    def commit(self, actions: Array, needed: int) -> None:
        """Append `[T, n, ...]` actions, and drop pieces older than the last `needed` steps."""
        self._pieces.append(actions)
        self._length += len(actions)
        while self._pieces and self._length - len(self._pieces[0]) >= needed:
            self._length -= len(self._pieces.popleft())

    def last(self, column: int, count: int) -> Array | None:
        """Return the last `count` actions of one env, `[count, ...]`; None if some are missing."""
        if count > self._length:
            return None
        if count == 0:
            return np.zeros(0)
        return np.concatenate([piece[:, column] for piece in self._pieces])[-count:]


def get_state(env: Any) -> dict[str, Array] | None:
    """Return an environment's state (an array, bytes, or a dict of those); None if it has none."""
    env, _ = unwrap(env)
    if not _has_state(env):
        return None
    state = env.get_state()
    arrays = {}
    for key, value in (state if isinstance(state, dict) else {"": state}).items():
        if isinstance(value, bytes):
            arrays[f"bytes:{key}"] = np.frombuffer(value, np.uint8).copy()
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            arrays[f"array:{key}"] = value.copy()
        else:
            return None
    return arrays


def set_state(env: Any, arrays: dict[str, Array]) -> None:
    """Undo `get_state`; the environment has been reset before."""
    env, _ = unwrap(env)
    if not _has_state(env):
        raise ValueError("the environment has no set_state any more")
    state: dict[str, Any] = {}
    for name, array in arrays.items():
        kind, _, key = name.partition(":")
        state[key] = array.tobytes() if kind == "bytes" else array
    env.set_state(state[""] if set(state) == {""} else state)


def _has_state(env: Any) -> bool:
    # Asked of the class: some wrappers forward attributes that are not their own.
    return all(hasattr(type(env), name) for name in ("get_state", "set_state"))


def replay(
    env: Any, seed: int, actions: Sequence[Any], before_step: Callable[[int], None]
) -> tuple[Any, Any] | None:
    """Reset and repeat `actions`; return the last (obs, info), None if the episode ended.

    `before_step` is called with the number of steps so far.
    """
    obs, info = env.reset(seed=seed)
    for step, action in enumerate(actions):
        before_step(step)
        obs, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return None
    return obs, info
