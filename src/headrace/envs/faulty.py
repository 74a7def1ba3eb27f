"""An environment that fails on command, to try what a run does then (docs/faults.md).

headrace train headrace.envs.faulty:Faulty --env-kwargs faults="segv@500 nan@900"
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from headrace.errors import UsageError


class FaultyError(RuntimeError):
    """Error of `crash`. It cannot be pickled, like many exceptions of environments."""

    def __init__(self, when: str, number: int) -> None:
        super().__init__(f"told to crash at {when} ({number} steps so far)")


def _spin() -> None:
    while True:
        pass


_PLACES = ("init", "reset", "close")
_ACTIONS: dict[str, Callable[[], Any]] = {
    "exit": lambda: os._exit(3),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": threading.Event().wait,
    "spin": _spin,
    "hold": lambda: ctypes.PyDLL(None).sleep(1_000_000),  # s, with Python's lock held
}
_BAD_VALUES: dict[str, Callable[[Any, float], tuple[Any, Any]]] = {
    "nan": lambda obs, reward: (np.full_like(obs, np.nan), reward),
    "inf": lambda obs, reward: (obs, np.inf),
    "wrong_shape": lambda obs, reward: (obs[:1], reward),
    "wrong_dtype": lambda obs, reward: (obs.astype(complex), reward),
}


class Faulty(gymnasium.Env[Any, Any]):
    """A random walk to ±10 within 100 steps, reward 1 for each step, with failures.

    Args:
        faults: words `KIND@WHEN`. WHEN is a number (the n-th step of this object, over all its
            episodes), `init`, `reset` or `close`. KIND is `crash` (raise); `exit`, `segv`, `abort`,
            `kill` (the process ends); `hang`, `spin`, `hold` (it never returns: it sleeps,
            computes, or sleeps with Python's lock held); or a bad value of a step: `nan`,
            `inf` (the reward), `wrong_shape`, `wrong_dtype`.
        once: a folder that remembers faults, so that each happens once over all environments and
            processes.
        slow_step, slow_reset: seconds that each takes.
    """

    def __init__(
        self, faults: str = "", once: str = "", slow_step: float = 0.0, slow_reset: float = 0.0
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._faults = {when: kind for kind, when in map(_parse, faults.split())}
        self._once, self._slow_step, self._slow_reset = once, slow_step, slow_reset
        self._total_steps = self._t = self._position = 0
        self._fail("init")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin in the middle of the walk."""
        super().reset(seed=seed)
        time.sleep(self._slow_reset)
        self._t = self._position = 0
        self._fail("reset")
        return self._obs(0), {}

    def step(self, action: Any) -> Any:
        """Go one to the left (0) or right (1), or the other way in one of ten steps."""
        time.sleep(self._slow_step)
        self._total_steps += 1
        self._t += 1
        slip = self.np_random.random() < 0.1
        self._position += 1 if bool(action) != slip else -1
        make_bad = self._fail(str(self._total_steps))
        obs, reward = self._obs(action), 1.0
        if make_bad is not None:
            obs, reward = make_bad(obs, reward)
        return obs, reward, abs(self._position) >= 10, self._t >= 100, {}

    def close(self) -> None:
        """Close nothing, or fail."""
        self._fail("close")

    def _obs(self, action: Any) -> Any:
        noise = self.np_random.random()
        return np.array([self._position / 10, self._t / 100, action, noise], np.float32)

    def _fail(self, when: str) -> Callable[[Any, float], tuple[Any, Any]] | None:
        kind = self._faults.get(when)
        if kind is None or not self._first_time(f"{kind}@{when}"):
            return None
        if kind == "crash":
            raise FaultyError(when, self._total_steps)
        if kind in _ACTIONS:
            _ACTIONS[kind]()
        return _BAD_VALUES.get(kind)

    def _first_time(self, fault: str) -> bool:
        if not self._once:
            return True
        try:
            Path(self._once, fault).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _parse(word: str) -> tuple[str, str]:
    kind, _, when = word.partition("@")
    known = ("crash", *_ACTIONS, *_BAD_VALUES)
    if kind not in known or not (when.isdigit() or when in _PLACES):
        raise UsageError(
            f"faults: {word!r}: expected KIND@WHEN, as in segv@500, with a KIND of "
            f"{', '.join(known)}, and the number of a step, or {', '.join(_PLACES)}."
        )
    if kind in _BAD_VALUES and not when.isdigit():
        raise UsageError(f"faults: {word!r}: {kind} is of steps: give the number of one.")
    return kind, when
