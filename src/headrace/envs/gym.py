"""Gymnasium's Python environments as a vector, stepped one after the other into given memory.

No copy is made between an environment's observation and the fragment, and nothing is done per env
but its own step and the end of its episode. Left out: making them (`make.py`), processes
(`collect/`).
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.batch import Fragment, each
from headrace.envs.api import Episode, Restored, check_fields, env_error
from headrace.envs.replay import ActionLog, get_state, replay, set_state
from headrace.envs.rows import Intake, Rows
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import PLAIN, ActionCodec, Array, EnvSpec


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
    ) -> None:
        self.spec, self.env_id = spec, env_id
        self._envs = list(envs)
        self._seed, self._role, self._reseed = seed, role, reseed
        self._meter, self._sampler = meter, sampler
        self._codec, self._intake = ActionCodec(spec.action), Intake(spec)
        self._rows = Rows(spec, env_id, sampler)
        self._replay_limit_s = replay_limit_s
        self._log = ActionLog()
        self._committed: dict[str, Array] = {}
        self._own_states: list[dict[str, Array] | None] = []

    def bind(self, fragment: Fragment) -> None:
        """Write into `fragment`; the very first time this resets all envs."""
        self._actions = np.zeros(
            (fragment.num_steps, len(self._envs), *self.spec.action.shape), self.spec.action.dtype
        )
        if not self._committed:
            for i in range(len(self._envs)):
                self._reset(i, self._rows.current)
            self._meter.lap("env_reset")
            self._snapshot()
        self._rows.bind(fragment)
        self._rows.valid[:] = True

    def step(self, t: int, action: Array) -> None:
        """Step every env, and begin the next episode of those that ended."""
        rows, put, is_plain = self._rows, self._intake.put, self._intake.is_plain
        # Recorded apart: an environment may change the action that it is given.
        self._actions[t] = actions = self._codec.to_env(action)
        obs, reward = rows.at(t + 1), rows.reward[t]
        terminated, truncated = rows.terminated[t], rows.truncated[t]
        i, result = 0, None
        try:
            for i, env in enumerate(self._envs):
                result = env.step(actions[i])
                if t == 0:  # once per fragment: often enough to notice, too seldom to cost
                    self._check_result("step", i, result)
                next_obs, reward[i], terminated[i], truncated[i], info = result
                if is_plain:
                    obs[i] = next_obs
                else:
                    put(obs, i, next_obs, info, ended=bool(terminated[i] or truncated[i]))
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            if result is not None:  # what it is, or the one before: neither may be ill-formed
                self._check_result("step", i, result)
            where = self._where(i, self._actions[t][i])
            raise env_error(error, f"in {where}") from error
        rows.episode_step += 1
        rows.episode_reward += reward
        self._meter.lap("env_step")
        ended = terminated | truncated
        if ended.any():
            for i in np.flatnonzero(ended).tolist():
                if truncated[i] and not terminated[i]:
                    rows.keep_final(t, i, each(lambda o, i=i: o[i], obs))
                rows.end_episode(t, i)
                self._reset(i, obs)
            self._meter.lap("env_reset")

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        return self._rows.finish()

    def commit(self) -> None:
        """Make the bound fragment count."""
        # No more is kept than could be replayed in time: an episode may be endless.
        longest = int(self._rows.episode_step.max())
        if longest * self._rows.step_s > self._replay_limit_s:
            longest = int(self._replay_limit_s / self._rows.step_s)
        self._log.commit(self._actions, longest)
        self._rows.commit()
        self._snapshot()

    def state(self) -> dict[str, Array]:
        """The last commit: counts, observations, and env states or the actions to replay."""
        state = dict(self._committed)
        for i, own in enumerate(self._own_states):
            if own is not None:
                state |= {f"env{i}.state.{name}": array for name, array in own.items()}
            elif self._reseed or self._committed["episode"][i] == 0:
                actions = self._log.last(i, int(self._committed["episode_step"][i]))
                if actions is not None:
                    state[f"env{i}.actions"] = actions
        return state

    def restore(self, state: dict[str, Array]) -> Restored:
        """Bring back each env in the best way that `state` allows."""
        self._rows.restore(state)
        restored = Restored()
        deadline = time.monotonic() + self._replay_limit_s
        recorded = [np.zeros(0)] * len(self._envs)
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
                recorded[i] = actions
                restored.replayed += 1
            else:
                self._begin(i)
                restored.new_episode += 1
        longest = max(map(len, recorded))
        log = np.zeros((longest, len(recorded), *self.spec.action.shape), self.spec.action.dtype)
        for i, actions in enumerate(recorded):
            log[longest - len(actions) :, i] = actions.reshape(-1, *self.spec.action.shape)
        self._log.commit(log, longest)
        self._snapshot()
        return restored

    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that earlier ones, of one step at least, cannot have had."""
        self._rows.episode[:] = num_steps
        for i in range(len(self._envs)):
            self._begin(i)
        self._snapshot()
        return Restored(new_episode=len(self._envs))

    def close(self) -> None:
        """Close all envs, whatever one of them does; then raise EnvError if one failed."""
        failed = None
        for i, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:
                failed = failed or env_error(error, f"while closing, {self._where(i)}")
        if failed is not None:
            raise failed

    def _episode_seed(self, i: int) -> int:
        return derive(self._seed, self._role, int(self.env_id[i]), int(self._rows.episode[i]))

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
        self._rows.episode_step[i], self._rows.episode_reward[i] = 0, 0.0

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
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._where(i)}") from error

    def _check_result(self, method: str, i: int, result: Any) -> None:
        check_fields(method, result, self._where(i))
        if wrong := self._intake.misfit(result[0]):
            raise EnvError(f"{method} returned {wrong} ({self._where(i)}).")

    def _where(self, i: int, action: Array | None = None) -> str:
        """Which env, which sampler, and where in its life: for messages."""
        episode, step = int(self._rows.episode[i]), int(self._rows.episode_step[i])
        seed = self._episode_seed(i) if self._reseed or episode == 0 else "none"
        return (
            ("" if action is None else f"step {step + 1} with action {action}, ")
            + f"env {self.env_id[i]} of {self.spec.id}, sampler {self._sampler}, "
            f"episode {episode} (reset seed {seed}, {step} steps so far)"
        )

    def _snapshot(self) -> None:
        try:
            self._own_states = [get_state(env) for env in self._envs]
        except Exception as error:
            raise env_error(error, f"in get_state (of {self.spec.id})") from error
        self._committed = self._rows.state()
