"""Gymnasium's Python environments as a vector, stepped one after the other into given memory.

No copy is made between an environment's observation and the fragment, and nothing is done per env
but its own step and the end of its episode. Left out: making them (`make.py`), processes
(`collect/`).
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.batch import Fragment
from headrace.envs.api import Episode, Restored, env_error
from headrace.envs.replay import ActionLog, get_state, replay, set_state
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Array, EnvSpec


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
        self._codec = ActionCodec(spec.action)
        self._replay_limit_s = replay_limit_s
        n = len(self._envs)
        self._episode = np.full(n, -1)
        self._episode_step = np.zeros(n, np.int64)
        self._episode_reward = np.zeros(n)
        self._obs = np.zeros((n, *spec.observation.shape), spec.observation.dtype)
        self._log = ActionLog()
        self._finished: list[Episode] = []
        self._committed: dict[str, Array] = {}
        self._own_states: list[dict[str, Array] | None] = []
        self._bound_at = self._env_step_s = 0.0

    def bind(self, fragment: Fragment) -> None:
        """Write into `fragment`; the very first time this resets all envs."""
        self._next_obs = fragment.obs.numpy()
        self._reward = fragment.reward.numpy()
        self._terminated, self._truncated = fragment.terminated.numpy(), fragment.truncated.numpy()
        self._final_obs, self._num_final = fragment.final_obs.numpy(), fragment.num_final.numpy()
        self._final_step, self._final_row = fragment.final_step.numpy(), fragment.final_row.numpy()
        self._actions = np.zeros(
            (fragment.num_steps, len(self._envs), *self.spec.action.shape), self.spec.action.dtype
        )
        if not self._committed:
            for i in range(len(self._envs)):
                self._reset(i, self._obs)
            self._meter.lap("env_reset")
            self._snapshot()
        self._next_obs[0] = self._obs
        fragment.env_id.numpy()[:] = self.env_id
        fragment.valid.numpy()[:] = True
        self._num_final[0] = 0
        self._bound_at = time.monotonic()

    def step(self, t: int, action: Array) -> None:
        """Step every env, and begin the next episode of those that ended."""
        # Recorded apart: an environment may change the action that it is given.
        self._actions[t] = actions = self._codec.to_env(action)
        obs, reward = self._next_obs[t + 1], self._reward[t]
        terminated, truncated = self._terminated[t], self._truncated[t]
        i = 0
        try:
            for i, env in enumerate(self._envs):
                next_obs, reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
                if t == 0:  # once per fragment: often enough to notice, too seldom to cost
                    self._check_declared("step", i, next_obs)
                obs[i] = next_obs
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            where = self._where(i, self._actions[t][i])
            raise env_error(error, f"in {where}") from error
        self._episode_step += 1
        self._episode_reward += reward
        self._meter.lap("env_step")
        ended = terminated | truncated
        if ended.any():
            for i in np.flatnonzero(ended).tolist():
                if truncated[i] and not terminated[i]:
                    self._keep_final(t, i, obs[i])
                self._end_episode(t, i)
                self._reset(i, obs)
            self._meter.lap("env_reset")

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        self._env_step_s = (time.monotonic() - self._bound_at) / self._reward.size
        self._check_finite()
        finished, self._finished = self._finished, []
        return finished

    def commit(self) -> None:
        """Make the bound fragment count."""
        # No more is kept than could be replayed in time: an episode may be endless.
        longest = int(self._episode_step.max())
        if longest * self._env_step_s > self._replay_limit_s:
            longest = int(self._replay_limit_s / self._env_step_s)
        self._log.commit(self._actions, longest)
        self._obs[:] = self._next_obs[len(self._reward)]
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
        self._episode[:] = state["episode"]
        self._episode_step[:] = state["episode_step"]
        self._episode_reward[:] = state["episode_reward"]
        self._obs[:] = state["obs"]
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
        self._episode[:] = num_steps
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
        return derive(self._seed, self._role, int(self.env_id[i]), int(self._episode[i]))

    def _replay(self, i: int, actions: Array, deadline: float) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            return replay(self._envs[i], self._episode_seed(i), actions, self._obs[i])
        except Exception as error:
            raise env_error(error, f"while replaying, {self._where(i)}") from error

    def _set_state(self, i: int, own: dict[str, Array]) -> None:
        try:
            self._envs[i].reset(seed=self._episode_seed(i))
            set_state(self._envs[i], own)
        except Exception as error:
            raise env_error(error, f"in set_state, {self._where(i)}") from error

    def _begin(self, i: int) -> None:
        """A new episode where the old one could not be brought back."""
        self._reset(i, self._obs, always_seeded=True)
        self._episode_step[i], self._episode_reward[i] = 0, 0.0

    def _reset(self, i: int, obs: Array, *, always_seeded: bool = False) -> None:
        """Begin the next episode of env i and write its first observation to `obs[i]`."""
        first = self._episode[i] < 0
        self._episode[i] += 1
        seeded = self._reseed or first or always_seeded
        seed = self._episode_seed(i) if seeded else None
        try:
            first_obs, _ = self._envs[i].reset(seed=seed)
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._where(i)}") from error
        if first:
            self._check_declared("reset", i, first_obs)
        obs[i] = first_obs

    def _check_declared(self, method: str, i: int, obs: Any) -> None:
        """Storing would broadcast a wrong shape and round a wrong dtype without a word."""
        space, given = self.spec.observation, np.asarray(obs)
        fits = given.shape == space.shape and (
            np.can_cast(given.dtype, space.dtype, "same_kind")
            # A list of small integers, where the space has smaller ones
            or (given.dtype.kind in "iu" and np.array_equal(given.astype(space.dtype), given))
        )
        if not fits:
            raise EnvError(
                f"{method} returned an observation of shape {given.shape} and dtype {given.dtype}, "
                f"but the environment declares {space.describe()} ({self._where(i)})."
            )

    def _check_finite(self) -> None:
        """NaN or infinity is found here, before anything is learned from it."""
        k = int(self._num_final[0])
        T, n = self._reward.shape  # noqa: N806
        for name, rows, step, row in (
            ("an observation", self._next_obs, *np.indices((T + 1, n))),
            ("a reward", self._reward, *np.indices((T, n)) + np.array([1, 0])[:, None, None]),
            (
                "a final observation",
                self._final_obs[:k],
                self._final_step[:k] + 1,
                self._final_row[:k],
            ),
        ):
            if np.issubdtype(rows.dtype, np.floating) and not np.isfinite(rows).all():
                bad = tuple(np.argwhere(~np.isfinite(rows))[0][: step.ndim])
                raise EnvError(
                    f"The environment gave {name} that is not finite: {rows[bad]}\n"
                    f"after step {step[bad]} of the {T} of this fragment, env "
                    f"{self.env_id[row[bad]]} of {self.spec.id}, sampler {self._sampler}."
                )

    def _where(self, i: int, action: Array | None = None) -> str:
        """Which env, which sampler, and where in its life: for messages."""
        episode, step = int(self._episode[i]), int(self._episode_step[i])
        seed = self._episode_seed(i) if self._reseed or episode == 0 else "none"
        return (
            ("" if action is None else f"step {step + 1} with action {action}, ")
            + f"env {self.env_id[i]} of {self.spec.id}, sampler {self._sampler}, "
            f"episode {episode} (reset seed {seed}, {step} steps so far)"
        )

    def _end_episode(self, t: int, i: int) -> None:
        total, length = float(self._episode_reward[i]), int(self._episode_step[i])
        self._finished.append(Episode(t, int(self.env_id[i]), total, length))
        self._episode_step[i], self._episode_reward[i] = 0, 0.0

    def _keep_final(self, t: int, i: int, obs: Array) -> None:
        """Keep the true next observation of a truncated step."""
        k = int(self._num_final[0])
        self._final_obs[k], self._final_step[k], self._final_row[k] = obs, t, i
        self._num_final[0] = k + 1

    def _snapshot(self) -> None:
        try:
            self._own_states = [get_state(env) for env in self._envs]
        except Exception as error:
            raise env_error(error, f"in get_state (of {self.spec.id})") from error
        self._committed = {
            "episode": self._episode.copy(),
            "episode_step": self._episode_step.copy(),
            "episode_reward": self._episode_reward.copy(),
            "obs": self._obs.copy(),
        }
