"""Gymnasium's Python environments as a vector, stepped one after the other into given memory.

No copy is made between an environment's observation and the fragment, and nothing is done per env
but its own step and the end of its episode. Left out: making them (`factory.py`), processes
(`collect/`).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.batch import Fragment, each
from headrace.envs.api import (
    GUARDS,
    Episode,
    Guards,
    Restored,
    check_fields,
    close_all,
    describe_position,
    env_error,
    in_a_line,
)
from headrace.envs.episode_replay import get_state, inside, replay, set_state
from headrace.envs.episodes import FragmentWriter, ObsWriter
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import PLAIN, ActionCodec, Array, EnvSpec
from headrace.timeouts import RestartRate


class GymVector:
    """A `VectorEnv` over Gymnasium environments; see there for the contract of each method.

    Args:
        envs: the environments, already made; they are closed with the vector.
        spec: what they all offer.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed; each reset gets its own from it, by env and episode.
        role: `env` for training, `eval` for evaluation: their seeds differ.
        reseed: seed every episode (so that it can be replayed) or, where a seeded reset is dear,
            each env's first one only.
        replay_limit_s: give an episode up that would take longer than this to replay.
        meter: told of step and reset times.
        sampler: named in errors.
        guards: what to check, and what to do when an environment fails.
        remake: makes one more environment, in place of one that failed.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        spec: EnvSpec,
        env_id: Array,
        seed: int,
        meter: Meter,
        *,
        role: str = "env",
        reseed: bool = True,
        replay_limit_s: float = 30.0,
        sampler: str = "inline",
        guards: Guards = GUARDS,
        remake: Callable[[], Any] | None = None,
    ) -> None:
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = 0
        self._envs = list(envs)
        looked = [inside(env) for env in self._envs]
        self._steps: list[Callable[..., Any]] = [env.step for env, _ in looked]
        self._limit = np.array([limit for _, limit in looked])  # steps of an episode
        self._seed, self._role, self._reseed = seed, role, reseed
        self._meter, self._sampler = meter, sampler
        self._codec, self._intake = ActionCodec(spec.action), ObsWriter(spec)
        self._rows = FragmentWriter(spec, env_id, checks=guards.enabled)
        self._replay_limit_s = replay_limit_s
        self._begun = False
        self._guards, self._remake = guards, remake
        self._restarts = [RestartRate(guards.max_restarts) for _ in self._envs]

    @property
    def step_s(self) -> float:
        """See `VectorEnv`."""
        return self._rows.step_s

    def bind(self, *fragments: Fragment) -> None:
        """Write into the only fragment; the very first time this resets all envs."""
        self.dropped, self.lost_steps = [], 0
        if not self._begun:
            for i in range(len(self._envs)):
                self._next_episode(i, self._rows.current)
            self._begun = True
        self._rows.bind(*fragments)
        self._rows.valid[:] = True

    def step(self, t: int) -> None:
        """Step every env, and begin the next episode of those that ended."""
        rows, put, is_plain = self._rows, self._intake.put, self._intake.is_plain
        # A shape that numpy would broadcast into the row
        shape = self.spec.observation.shape if self._guards.enabled and is_plain else None
        actions = self._codec.to_env(rows.action[t])
        obs, reward = rows.at(t + 1), rows.reward[t]
        terminated, truncated = rows.terminated[t], rows.truncated[t]
        result, failed = None, []
        for i, step in enumerate(self._steps):
            try:
                result = step(actions[i])
                if t == 0:  # once per fragment: often enough to notice, too seldom to cost
                    self._check_result("step", i, result)
                next_obs, reward[i], terminated[i], truncated[i], info = result
                if is_plain:
                    if shape is not None and getattr(next_obs, "shape", None) != shape:
                        self._check_result("step", i, result)
                    obs[i] = next_obs
                else:
                    put(obs, i, next_obs, info, ended=bool(terminated[i] or truncated[i]))
            except (Exception, SystemExit) as error:
                self._fail(i, self._named(i, result, error, self._codec.to_env(rows.action[t])[i]))
                failed.append(i)
        rows.episode_step += 1
        rows.episode_reward += reward
        np.logical_or(truncated, rows.episode_step >= self._limit, out=truncated)
        self._meter.lap("env_step")
        for i in rows.no_choices(obs):
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
                    rows.keep_final(t, i, each(lambda o, i=i: o[i], obs))
                rows.end_episode(t, i)
                self._next_episode(i, obs)

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        return self._rows.finish(self._where_then)

    def state(self) -> dict[str, Array]:
        """Counts, and the own states of envs that offer one."""
        state = self._rows.state()
        for i, env in enumerate(self._envs):
            try:
                own = get_state(env)
            except Exception as error:
                raise env_error(error, f"in get_state (of {self.spec.id})") from error
            if own is not None:
                state |= {f"env{i}.state.{name}": array for name, array in own.items()}
        return state

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`."""
        return self._rows.current_obs()

    def restore(self, state: dict[str, Array]) -> Restored:
        """Bring back each env in the best way that `state` allows."""
        self._rows.restore(state)
        restored = Restored()
        self._begun = True
        deadline = time.monotonic() + self._replay_limit_s
        for i in range(len(self._envs)):
            own = {
                name.removeprefix(f"env{i}.state."): array
                for name, array in state.items()
                if name.startswith(f"env{i}.state.")
            }
            actions = state.get(f"env{i}.actions")
            if own:
                self._set_state(i, own)
                restored.set_state += 1
            elif actions is not None and self._replay(i, actions, deadline):
                restored.replayed += 1
            else:
                self._begin(i)
                restored.new_episode += 1
        return restored

    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that earlier ones, of one step at least, cannot have had."""
        self._rows.episode[:] = num_steps
        self._begun = True
        for i in range(len(self._envs)):
            self._begin(i)
        return Restored(new_episode=len(self._envs))

    def close(self) -> None:
        """Close all envs, whatever one of them does; then raise EnvError if one failed."""
        close_all(self._envs, self._where)

    def _episode_seed(self, i: int) -> int:
        return self._seed_of(i, int(self._rows.episode[i]))

    def _seed_of(self, i: int, episode: int) -> int:
        return derive(self._seed, self._role, int(self.env_id[i]), episode)

    def _replay(self, i: int, actions: Array, deadline: float) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            last = replay(self._envs[i], self._episode_seed(i), actions)
            if last is None:
                return False
            again = each(lambda o: o[:1].copy(), self._rows.current)
            self._intake.put(again, 0, *last, ended=False)
        except Exception as error:
            raise env_error(error, f"while replaying, {self._where(i)}") from error
        return all(
            np.array_equal(part[0], self._rows.part(key)[i])
            for key, part in (again if isinstance(again, dict) else {PLAIN: again}).items()
        )

    def _set_state(self, i: int, own: dict[str, Array]) -> None:
        try:
            self._envs[i].reset(seed=self._episode_seed(i))
            set_state(self._envs[i], own)
        except Exception as error:
            raise env_error(error, f"in set_state, {self._where(i)}") from error

    def _begin(self, i: int) -> None:
        """A new episode where the old one could not be brought back."""
        self._reset(i, self._rows.current, always_seeded=True)
        self._rows.begin_episode(i)

    def _next_episode(self, i: int, obs: Any) -> None:
        """Begin an episode; in a new environment, if this one fails to and that is allowed."""
        try:
            self._reset(i, obs)
        except EnvError as error:
            self._fail(i, error)
            self._replace(i, obs)

    def _replace(self, i: int, obs: Any) -> None:
        """Put a new environment in place of one that failed, and begin an episode in it."""
        assert self._remake is not None
        while True:
            with contextlib.suppress(Exception):  # it has failed already
                self._envs[i].close()
            try:
                self._envs[i] = self._remake()
                env, self._limit[i] = inside(self._envs[i])
                self._steps[i] = env.step
                self._reset(i, obs, always_seeded=True)
                return
            except EnvError as error:
                self._fail(i, error)

    def _drop(self, t: int, failed: list[int], obs: Any) -> None:
        """Give the episodes up in which step t failed, or gave NaN or infinity (added to them)."""
        for i in self._rows.not_finite(t):
            if i not in failed:
                self._fail(i, self._bad_value(i, obs, self._rows.reward[t, i]))
                failed.append(i)
        self.lost_steps += len(failed)
        for i in failed:
            self._rows.drop(t, i)
            self._replace(i, obs)

    def _fail(self, i: int, error: EnvError) -> None:
        """Raise `error`, unless env i may be made again; then remember it, in a line."""
        if self._guards.on_env_error == "fail" or self._remake is None:
            raise error
        if not self._restarts[i].again(time.monotonic()):
            most = self._guards.max_restarts
            raise EnvError(
                f"{error}\nIt failed more than {most} times in 10 minutes (--max-worker-restarts)."
            ) from error
        self.dropped.append(in_a_line(error))

    def _named(self, i: int, result: Any, error: BaseException, action: Array) -> EnvError:
        """The error of a step, as it is shown."""
        if isinstance(error, EnvError):
            return error
        try:
            if result is not None:  # what it is, or the one before: neither may be ill-formed
                self._check_result("step", i, result)
        except EnvError as ill_formed:
            return ill_formed
        named = env_error(error, f"in {self._where(i, action)}")
        named.__cause__ = error
        return named

    def _bad_value(self, i: int, obs: Any, reward: Any) -> EnvError:
        given = each(lambda o: o[i], obs)
        return EnvError(
            f"The environment gave a value that is not finite or not in its space: observation "
            f"{given}, reward {reward}; it declares {self.spec.observation.describe()} "
            f"({self._where(i)})."
        )

    def _reset(self, i: int, obs: Any, *, always_seeded: bool = False) -> None:
        """Begin the next episode of env i and write its first observation to row i of `obs`."""
        first = self._rows.episode[i] < 0
        self._rows.episode[i] += 1
        seeded = self._reseed or first or always_seeded
        seed = self._episode_seed(i) if seeded else None
        try:
            result = self._envs[i].reset(seed=seed)
            if first:
                self._check_result("reset", i, result)
            first_obs, info = result
            self._intake.put(obs, i, first_obs, info, ended=False)
            if i in self._rows.no_choices(obs):
                raise self._bad_value(i, obs, "none")
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._where(i)}") from error
        self._meter.lap("env_reset")

    def _check_result(self, method: str, i: int, result: Any) -> None:
        check_fields(method, result, self._where(i))
        if wrong := self._intake.misfit(result[0]):
            raise EnvError(f"{method} returned {wrong} ({self._where(i)}).")

    def _where(self, i: int, action: Array | None = None) -> str:
        """Where env i is in its life: for messages."""
        rows = self._rows
        return self._in_life(i, int(rows.episode[i]), int(rows.episode_step[i]), action)

    def _where_then(self, i: int, num_steps: int, *, before_reset: bool = True) -> str:
        """Where it was, after so many steps of the fragment."""
        return self._in_life(i, *self._rows.moment(i, num_steps, before_reset=before_reset))

    def _in_life(self, i: int, episode: int, steps: int, action: Array | None = None) -> str:
        seeded = self._reseed or episode == 0
        seed = self._seed_of(i, episode) if seeded else None
        env = f"{self.env_id[i]} of {self.spec.id}"
        return describe_position(env, self._sampler, episode, seed, steps, action)
