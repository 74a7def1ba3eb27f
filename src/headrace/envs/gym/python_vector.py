"""Gymnasium's Python environments as a vector, stepped one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.batch import each
from headrace.envs.api import Restored, VectorContext, check_fields, env_error
from headrace.envs.episode_replay import replay, unwrap
from headrace.envs.episodes import COUNTS, HostVector
from headrace.envs.single_envs import SingleEnvs
from headrace.errors import EnvError
from headrace.spec import PLAIN, Array


class GymVector(SingleEnvs, HostVector):
    """A `VectorEnv` over Gymnasium environments, which it closes; `remake` replaces one."""

    def __init__(
        self, envs: Sequence[Any], context: VectorContext, remake: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(envs, context, remake)
        self._steps: list[Callable[..., Any]] = [env.step for env in self._envs]
        self._limit = np.zeros(len(self._envs), np.int64)  # steps of an episode
        for i in range(len(self._envs)):
            self._replaced(i)

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
                    self._reader.put(
                        obs, i, next_obs, info, ended=bool(terminated[i] or truncated[i])
                    )
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
        return super().state() | self._env_states()

    def restore(self, state: dict[str, Array]) -> Restored:
        for name in COUNTS:
            getattr(self, f"_{name}")[:] = state[name]
        for key, array in self._leaves.items():
            array[:] = state[f"obs.{key}"]
        return self._restore_envs(state)

    def _begin_first(self) -> None:
        for i in range(len(self._envs)):
            self._next_episode(i, self._current)

    def _replay_actions(self, i: int, actions: Array, before_step: Callable[[int], None]) -> bool:
        given = self._codec.elements(actions)
        last = replay(self._envs[i], self._seed_of_episode(i), given, before_step)
        if last is None:
            return False
        again = each(lambda o: o[:1].copy(), self._current)
        self._reader.put(again, 0, *last, ended=False)
        return all(
            np.array_equal(part[0], self._leaves[key][i])
            for key, part in (again if isinstance(again, dict) else {PLAIN: again}).items()
        )

    def _reset_only(self, i: int) -> None:
        self._envs[i].reset(seed=self._seed_of_episode(i))

    def _replaced(self, i: int) -> None:
        env, self._limit[i] = unwrap(self._envs[i])
        self._steps[i] = env.step

    def _begin_anew(self, i: int) -> None:
        self._reset(i, self._current, always_seeded=True)
        self._begin_episode(i)

    def _next_episode(self, i: int, obs: Any) -> None:
        """Begin an episode; if the reset fails and restarts are allowed, in a new environment."""
        try:
            self._reset(i, obs)
        except EnvError as error:
            self._fail(i, error)
            self._replace(i, lambda: self._reset(i, obs, always_seeded=True))

    def _drop(self, t: int, failed: list[int], obs: Any) -> None:
        """Drop the episodes in which step t failed, or gave NaN or infinity (added to `failed`)."""
        for i in self._nonfinite_rows(t):
            if i not in failed:
                self._fail(i, self._bad_value(i, obs, self._rows.reward[t, i]))
                failed.append(i)
        self.lost_steps += len(failed)
        for i in failed:
            self._drop_step(t, i)
            self._replace(i, lambda i=i: self._reset(i, obs, always_seeded=True))  # type: ignore[misc]

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
            result = self._envs[i].reset(seed=self._seed_of_episode(i) if seeded else None)
            self._check_result("reset", i, result)
            first_obs, info = result
            self._reader.put(obs, i, first_obs, info, ended=False)
            if i in self._invalid_choices(obs):
                raise self._bad_value(i, obs, "none")
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._describe(i)}") from error
        self.context.meter.lap("env_reset")

    def _check_result(self, method: str, i: int, result: Any) -> None:
        check_fields(method, result, lambda: self._describe(i))
        if misfit := self._reader.misfit(result[0]):
            raise EnvError(f"{method} returned {misfit} ({self._describe(i)}).")

    def _describe_row(self, i: int, num_steps: int, before_reset: bool) -> str:
        return self._describe(i, at=self._position_after(i, num_steps, before_reset))

    def _describe(self, i: int, action: Any = None, at: tuple[int, int] | None = None) -> str:
        """Describe the current position, or the episode and steps so far that `at` has."""
        episode, steps = at or (int(self._episode[i]), int(self._episode_step[i]))
        seeded = self.context.reseed or episode == 0
        seed = self.context.episode_seed(i, episode) if seeded else None
        return self.context.describe(i, episode, steps, seed, action)
