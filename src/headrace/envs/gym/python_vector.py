"""Gymnasium's Python environments as a vector, stepped one after the other."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.batch import each, select
from headrace.envs.api import (
    Restored,
    VectorContext,
    check_fields,
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
from headrace.envs.episode_replay import get_state, replay, set_state, unwrap
from headrace.envs.episodes import COUNTS, HostVector
from headrace.errors import EnvChangeError, EnvError
from headrace.spec import PLAIN, Array
from headrace.timeouts import RestartRate


class GymVector(HostVector):
    """A `VectorEnv` over Gymnasium environments, which it closes; `remake` replaces one."""

    def __init__(
        self, envs: Sequence[Any], context: VectorContext, remake: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(context)
        self._envs = list(envs)
        unwrapped = [unwrap(env) for env in self._envs]
        self._steps: list[Callable[..., Any]] = [env.step for env, _ in unwrapped]
        self._limit = np.array([limit for _, limit in unwrapped])  # steps of an episode
        self._guards, self._remake = context.guards, remake
        self._restarts = [RestartRate(self._guards.max_restarts) for _ in self._envs]
        self._applied = [AppliedChanges() for _ in self._envs]

    def change(self, changes: Changes) -> None:
        for i, applied in enumerate(self._applied):
            for change in applied.missing(changes):
                self._carry_out(i, change)
                applied.add(change, self._step_of_change(i))

    def step(self, t: int) -> None:
        rows, is_plain = self._rows, self.spec.observation.kind != "dict"
        # A shape that numpy would broadcast into the row
        shape = self.spec.observation.shape if self._guards.enabled and is_plain else None
        actions = self._codec.elements(self._codec.to_env(rows.action[t]))
        obs, reward = self._obs_row(t + 1), rows.reward[t]
        terminated, truncated = rows.terminated[t], rows.truncated[t]
        result, failed = None, []
        for i, step in enumerate(self._steps):
            try:
                result = step(actions[i])
                if t == 0:  # once per fragment: often enough to notice, too seldom to cost
                    self._check_result("step", i, result)
                next_obs, given, terminated[i], truncated[i], info = result
                # Some environments give an array or list of one number
                reward[i] = np.asarray(given).item() if hasattr(given, "__len__") else given
                if is_plain:
                    if shape is not None and getattr(next_obs, "shape", None) != shape:
                        self._check_result("step", i, result)
                    obs[i] = next_obs
                else:
                    self._put(obs, i, next_obs, info, ended=bool(terminated[i] or truncated[i]))
            except (Exception, SystemExit) as error:
                action = self._codec.elements(self._codec.to_env(rows.action[t]))[i]
                self._fail(i, self._step_error(i, result, error, action))
                failed.append(i)
        self._episode_step += 1
        self._episode_reward += reward
        np.logical_or(truncated, self._episode_step >= self._limit, out=truncated)
        self.context.meter.lap("env_step")
        for i in self._invalid_choices(obs):
            if i not in failed:
                self._fail(i, self._bad_value(i, obs, reward[i]))
                failed.append(i)
        ended = terminated | truncated
        if self._guards.on_env_error == "restart":
            self._drop(t, failed, obs)
            ended[failed] = False
        if ended.any():
            for i in np.flatnonzero(ended).tolist():
                if truncated[i] and not terminated[i]:
                    self._keep_final(t, i, each(lambda o, i=i: o[i], obs))
                self._end_episode(t, i)
                self._next_episode(i, obs)

    def state(self) -> dict[str, Array]:
        state = super().state()
        for i, env in enumerate(self._envs):
            with explain_errors(f"in get_state (of {self.spec.id})"):
                arrays = get_state(env)
            if arrays is not None:
                state |= {f"env{i}.state.{name}": array for name, array in arrays.items()}
            if (changes := self._applied[i].to_array()) is not None:
                state[f"env{i}.changes"] = changes
        return state

    def restore(self, state: dict[str, Array]) -> Restored:
        for name in COUNTS:
            getattr(self, f"_{name}")[:] = state[name]
        for key, array in self._leaves.items():
            array[:] = state[f"obs.{key}"]
        restored = Restored()
        self._begun = True
        deadline = time.monotonic() + self.context.replay_limit_s
        for i in range(len(self._envs)):
            actions = state.get(f"env{i}.actions")
            self._applied[i] = AppliedChanges(state.get(f"env{i}.changes"))
            if env_state := select(state, f"env{i}.state."):
                self._change_again(i)
                with explain_errors(f"in set_state, {self._describe(i)}"):
                    self._envs[i].reset(seed=self._episode_seed(i))
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

    def close(self) -> None:
        close_all(self._envs, self._describe)

    def _begin_first(self) -> None:
        for i in range(len(self._envs)):
            self._next_episode(i, self._current)

    def _replay(self, i: int, actions: Array, deadline: float) -> bool:
        changes = self._applied[i].by_step()
        if time.monotonic() > deadline or UNKNOWN in changes:
            return False

        def change_before(step: int) -> None:
            for change in changes.get(step, ()):
                self._carry_out(i, change)

        change_before(BEFORE_RESET)
        with explain_errors(lambda: f"while replaying, {self._describe(i)}"):
            given = self._codec.elements(actions)
            last = replay(self._envs[i], self._episode_seed(i), given, change_before)
            if last is None:
                return False
            again = each(lambda o: o[:1].copy(), self._current)
            self._put(again, 0, *last, ended=False)
        return all(
            np.array_equal(part[0], self._leaves[key][i])
            for key, part in (again if isinstance(again, dict) else {PLAIN: again}).items()
        )

    def _carry_out(self, i: int, change: EnvChange) -> None:
        env = f"env {self.env_id[i]} of {self.spec.id}, {self.context.worker}"
        try:
            prepare(self._envs[i], change, env)()
        except EnvChangeError:
            raise
        except (Exception, SystemExit) as error:
            failure = env_error(error, f"in {change.describe()} (from on_update), {env}")
            raise EnvChangeError(str(failure)) from error
        _, self._limit[i] = unwrap(self._envs[i])

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

    def _begin_anew(self, i: int) -> None:
        self._reset(i, self._current, always_seeded=True)
        self._begin_episode(i)

    def _next_episode(self, i: int, obs: Any) -> None:
        """Begin an episode; if the reset fails and restarts are allowed, in a new environment."""
        try:
            self._reset(i, obs)
        except EnvError as error:
            self._fail(i, error)
            self._replace(i, obs)

    def _replace(self, i: int, obs: Any) -> None:
        assert self._remake is not None
        while True:
            with contextlib.suppress(Exception):  # it has failed already
                self._envs[i].close()
            try:
                self._envs[i] = self._remake()
                env, self._limit[i] = unwrap(self._envs[i])
                self._steps[i] = env.step
                self._change_again(i)
                self._reset(i, obs, always_seeded=True)
                return
            except EnvError as error:
                self._fail(i, error)

    def _drop(self, t: int, failed: list[int], obs: Any) -> None:
        """Drop the episodes in which step t failed, or gave NaN or infinity (added to `failed`)."""
        for i in self._nonfinite_rows(t):
            if i not in failed:
                self._fail(i, self._bad_value(i, obs, self._rows.reward[t, i]))
                failed.append(i)
        self.lost_steps += len(failed)
        for i in failed:
            self._drop_step(t, i)
            self._replace(i, obs)

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

    def _step_error(self, i: int, result: Any, error: BaseException, action: Any) -> EnvError:
        if isinstance(error, EnvError):
            return error
        try:
            if result is not None:  # this result, or the one before: neither may be ill-formed
                self._check_result("step", i, result)
        except EnvError as ill_formed:
            return ill_formed
        failure = env_error(error, f"in {self._describe(i, action)}")
        failure.__cause__ = error
        return failure

    def _bad_value(self, i: int, obs: Any, reward: Any) -> EnvError:
        return EnvError(
            f"The environment gave a value that is not finite or not in its space: observation "
            f"{each(lambda o: o[i], obs)}, reward {reward}; it declares "
            f"{self.spec.observation.describe()} ({self._describe(i)})."
        )

    def _reset(self, i: int, obs: Any, *, always_seeded: bool = False) -> None:
        """Begin the next episode of env i and write its first observation to row i of `obs`."""
        first = self._episode[i] < 0
        self._episode[i] += 1
        self._applied[i].begin_episode()
        seeded = self.context.reseed or first or always_seeded
        try:  # a context would take longer
            result = self._envs[i].reset(seed=self._episode_seed(i) if seeded else None)
            self._check_result("reset", i, result)
            first_obs, info = result
            self._put(obs, i, first_obs, info, ended=False)
            if i in self._invalid_choices(obs):
                raise self._bad_value(i, obs, "none")
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._describe(i)}") from error
        self.context.meter.lap("env_reset")

    def _check_result(self, method: str, i: int, result: Any) -> None:
        check_fields(method, result, self._describe(i))
        if misfit := self._misfit(result[0]):
            raise EnvError(f"{method} returned {misfit} ({self._describe(i)}).")

    def _episode_seed(self, i: int) -> int:
        return self.context.episode_seed(i, int(self._episode[i]))

    def _describe_row(self, i: int, num_steps: int, before_reset: bool) -> str:
        return self._describe(i, at=self._position_after(i, num_steps, before_reset))

    def _describe(self, i: int, action: Any = None, at: tuple[int, int] | None = None) -> str:
        """Describe the current position, or the episode and steps so far that `at` has."""
        episode, steps = at or (int(self._episode[i]), int(self._episode_step[i]))
        seeded = self.context.reseed or episode == 0
        seed = self.context.episode_seed(i, episode) if seeded else None
        return self.context.describe(i, episode, steps, seed, action)
