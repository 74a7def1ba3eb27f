"""Environments that a vector steps one by one: changed, replaced when they fail, and restored.

Left out: how they are stepped (`gym/python_vector.py`, `games/vector.py`).
"""

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headrace.batch import select
from headrace.envs.api import (
    Restored,
    VectorContext,
    VectorEnv,
    close_all,
    env_error,
    explain_errors,
    summarize_error,
)
from headrace.envs.changes import (
    BEFORE_RESET,
    UNKNOWN,
    AppliedChanges,
    Changes,
    EnvChange,
    prepare,
)
from headrace.envs.episode_replay import get_state, set_state
from headrace.errors import EnvChangeError, EnvError
from headrace.spec import Array
from headrace.timeouts import RestartRate


class SingleEnvs(VectorEnv):
    """Base class of vectors over Python environments, which they close; `remake` replaces one.

    `_episode` and `_episode_step`, `[n]`, are the index of each env's episode (-1: not begun) and
    its steps so far.
    """

    _episode: Array
    _episode_step: Array
    _begun: bool

    def __init__(
        self, envs: Sequence[Any], context: VectorContext, remake: Callable[[], Any] | None
    ) -> None:
        super().__init__(context)
        self._envs = list(envs)
        self._guards, self._remake = context.guards, remake
        self._restarts = [RestartRate(self._guards.max_restarts) for _ in self._envs]
        self._applied = [AppliedChanges() for _ in self._envs]

    def change(self, changes: Changes) -> None:
        for i, applied in enumerate(self._applied):
            for change in applied.missing(changes):
                self._carry_out(i, change)
                applied.add(change, self._step_of_change(i))

    def close(self) -> None:
        close_all(self._envs, self._describe)

    @abstractmethod
    def _describe(self, i: int) -> str:
        """Describe env i and its position in its episode, for messages."""

    @abstractmethod
    def _reset_only(self, i: int) -> None:
        """Reset env i with the seed of its episode, before its state is set."""

    @abstractmethod
    def _begin_anew(self, i: int) -> None:
        """Begin the next episode of env i, which is seeded."""

    @abstractmethod
    def _replay_actions(self, i: int, actions: Array, before_step: Callable[[int], None]) -> bool:
        """Repeat an episode. Return whether env i is again where it was when it was saved."""

    def _replaced(self, i: int) -> None:
        """Take note that `_envs[i]` is another one, or was changed."""
        return

    def _env_states(self) -> dict[str, Array]:
        """Return the envs' own states, if they have any, and their changes."""
        state: dict[str, Array] = {}
        for i, env in enumerate(self._envs):
            with explain_errors(f"in get_state (of {self.spec.id})"):
                arrays = get_state(env)
            if arrays is not None:
                state |= {f"env{i}.state.{name}": array for name, array in arrays.items()}
            if (changes := self._applied[i].to_array()) is not None:
                state[f"env{i}.changes"] = changes
        return state

    def _restore_envs(self, state: dict[str, Array]) -> Restored:
        """Bring each env's episode back: by its own state, by its actions, or begin another."""
        restored = Restored()
        self._begun = True
        deadline = time.monotonic() + self.context.replay_limit_s
        for i in range(len(self._envs)):
            actions = state.get(f"env{i}.actions")
            self._applied[i] = AppliedChanges(state.get(f"env{i}.changes"))
            if env_state := select(state, f"env{i}.state."):
                self._change_again(i)
                with explain_errors(f"in set_state, {self._describe(i)}"):
                    self._reset_only(i)
                    set_state(self._envs[i], env_state)
                restored.set_state += 1
            elif actions is not None and self._replay(i, actions, deadline):
                restored.replayed += 1
            else:
                self._change_again(i)
                self._begin_anew(i)
                restored.new_episode += 1
        return restored

    def start_after(self, episode: int | Array) -> Restored:
        self._episode[:] = episode
        self._begun = True
        for i in range(len(self._envs)):
            self._begin_anew(i)
        return Restored(new_episode=len(self._envs))

    def _replay(self, i: int, actions: Array, deadline: float) -> bool:
        changes = self._applied[i].by_step()
        if time.monotonic() > deadline or UNKNOWN in changes:
            return False

        def change_before(step: int) -> None:
            for change in changes.get(step, ()):
                self._carry_out(i, change)

        change_before(BEFORE_RESET)
        try:
            return self._replay_actions(i, actions, change_before)
        except EnvChangeError:
            raise
        except (Exception, SystemExit):  # it did not fail then: a move is illegal in another game
            return False

    def _carry_out(self, i: int, change: EnvChange) -> None:
        env = f"env {self.env_id[i]} of {self.spec.id}, {self.context.worker}"
        try:
            prepare(self._envs[i], change, env)()
        except EnvChangeError:
            raise
        except (Exception, SystemExit) as error:
            failure = env_error(error, f"in {change.describe()} (from on_update), {env}")
            raise EnvChangeError(str(failure)) from error
        self._replaced(i)

    def _change_again(self, i: int) -> None:
        """Change an environment that was made anew as the one before."""
        for change in self._applied[i].all():
            self._carry_out(i, change)

    def _step_of_change(self, i: int) -> int:
        """Return the step of env i's episode that a change comes before; see `AppliedChanges`."""
        if not self._begun:
            return BEFORE_RESET
        step = int(self._episode_step[i])
        # The actions of such an episode are not kept, and its changes would be ever more.
        return UNKNOWN if step * self.step_s > self.context.replay_limit_s else step

    def _replace(self, i: int, begin: Callable[[], None]) -> None:
        """Make env i anew until `begin` begins an episode in it."""
        assert self._remake is not None
        while True:
            with contextlib.suppress(Exception):  # it has failed already
                self._envs[i].close()
            try:
                self._envs[i] = self._remake()
                self._replaced(i)
                self._change_again(i)
                begin()
                return
            except EnvError as error:
                self._fail(i, error)

    def _fail(self, i: int, error: EnvError) -> None:
        """Raise `error`, unless env i may be made again; then add a line to `dropped`."""
        if self._guards.on_env_error == "fail" or self._remake is None:
            raise error
        if not self._restarts[i].again(time.monotonic()):
            most = self._guards.max_restarts
            raise EnvError(
                f"{error}\nIt failed more than {most} times in 10 minutes (--max-worker-restarts)."
            ) from error
        self.dropped.append(summarize_error(error))

    def _seed_of_episode(self, i: int) -> int:
        return self.context.episode_seed(i, int(self._episode[i]))
