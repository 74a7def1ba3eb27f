"""An environment's own vector form (Gymnasium's `vector_entry_point`) as a vector.

All three of Gymnasium's autoreset modes give the same valid transitions: SAME_STEP as it is;
DISABLED by a reset of those that ended within the step; NEXT_STEP has a row that only resets, which
is marked as not valid. After a resume every environment begins a new episode.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from headrace.batch import Fragment, each
from headrace.envs.api import Episode, Restored, VectorContext, close_all, explain_errors
from headrace.envs.episodes import HostVector
from headrace.envs.spaces.masks import MASK, mask_array
from headrace.envs.spaces.obs_reader import leaf
from headrace.errors import EnvError
from headrace.spec import Array, element


class NativeVector(HostVector):
    """A `VectorEnv` over a `gymnasium.vector.VectorEnv`, which it closes.

    It is seeded at its first reset only: each env if the vector is Gymnasium's or ALE's, others as
    a whole. An error always ends the run.
    """

    def __init__(self, vector: Any, context: VectorContext) -> None:
        super().__init__(context)
        self._vector = vector
        mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._mode = mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
        # Whose next row is that of a reset (NEXT_STEP only)
        self._resetting = np.zeros(len(self.env_id), bool)
        self._num_counted = 0

    def bind(self, *fragments: Fragment) -> None:
        super().bind(*fragments)
        self._num_counted = 0

    def step(self, t: int) -> None:
        rows = self._rows
        actions = self._codec.batched(self._codec.to_env(rows.action[t]))
        with explain_errors(lambda: f"in {self._describe(t, actions)}"):
            obs, reward, terminated, truncated, info = self._vector.step(actions)
            if t == 0:
                self._check_declared("step", obs)
            rows.reward[t], rows.terminated[t], rows.truncated[t] = reward, terminated, truncated
            self._put_all(self._obs_row(t + 1), obs, info)
            ended = np.logical_or(terminated, truncated)
            if self._mode == AutoresetMode.NEXT_STEP:
                rows.valid[t], self._resetting = ~self._resetting, ended
            if ended.any():
                self._end(t, ended, obs, info)
        self.context.meter.lap("env_step")

    def finish(self) -> list[Episode]:
        self._count(len(self._rows.reward))
        return super().finish()

    def start_after(self, episode: int | Array) -> Restored:
        self._episode[:] = episode
        self._begin_first()
        self._begun = True
        return Restored(new_episode=len(self.env_id))

    def close(self) -> None:
        close_all([self._vector], lambda _: self.context.describe_all())

    def _end(self, t: int, ended: Array, obs: Any, info: Any) -> None:
        self._count(t + 1)
        final, final_info = obs, info
        if self._mode == AutoresetMode.SAME_STEP:
            final, final_info = info["final_obs"], info.get("final_info", {})
        for i in np.flatnonzero(ended).tolist():
            if self._rows.truncated[t, i] and not self._rows.terminated[t, i]:
                kept = each(lambda o, i=i: o[i : i + 1].copy(), self._obs_row(t + 1))
                self._reader.put(kept, 0, *_select(i, final, final_info), ended=True)
                self._keep_final(t, i, each(lambda o: o[0], kept))
            self._end_episode(t, i)
            self._episode[i] += 1
        if self._mode == AutoresetMode.DISABLED:
            with explain_errors(lambda: f"in reset, {self._describe(t)}"):
                obs, info = self._vector.reset(options={"reset_mask": ended})
                # Of the others it may give no mask
                for i in np.flatnonzero(ended).tolist():
                    self._reader.put(self._obs_row(t + 1), i, *_select(i, obs, info), ended=False)

    def _count(self, num_steps: int) -> None:
        new = slice(self._num_counted, num_steps)
        valid = self._rows.valid[new]
        self._episode_step += valid.sum(0)
        self._episode_reward += np.sum(self._rows.reward[new] * valid, 0, np.float64)
        self._num_counted = num_steps

    def _begin_first(self) -> None:
        self._episode += 1
        self._episode_step[:], self._episode_reward[:] = 0, 0.0
        self._resetting[:] = False
        seeds = [self.context.episode_seed(i, int(k)) for i, k in enumerate(self._episode)]
        with explain_errors(lambda: f"in reset, {self._describe(0)}"):
            obs, info = self._vector.reset(seed=_seed_for(self._vector, seeds))
            self._check_declared("reset", obs)
            self._put_all(self._current, obs, info)
        self.context.meter.lap("env_reset")

    def _put_all(self, rows: Any, obs: Any, info: Any) -> None:
        """Write a batch of observations (and masks) as Gymnasium's vectors return them."""
        for key, _, _, get in self._reader.parts:
            leaf(rows, key)[:] = self._reader.stored(key, get(obs))
        if self.spec.mask_in_info:
            masks = mask_array(info[MASK], self.spec.action)
            rows[MASK][:] = np.stack(list(masks)).reshape(rows[MASK].shape) != 0

    def _check_declared(self, method: str, obs: Any) -> None:
        if misfit := self._reader.misfit(_select(0, obs, {})[0]):
            raise EnvError(f"{method} returned {misfit} ({self.spec.id}, {self.context.worker}).")

    def _describe_row(self, i: int, num_steps: int, before_reset: bool) -> str:
        env = f"env {self.env_id[i]} of {self.spec.id} (its own vector form)"
        return f"after step {num_steps} of the fragment, {env}, {self.context.worker}"

    def _describe(self, t: int, actions: Any = None) -> str:
        acting = "" if actions is None else f"a step with the actions {_plain(actions)}, "
        envs = f"envs {self.env_id.tolist()} of {self.spec.id} (its own vector form)"
        episodes = f"{self.context.worker}, episodes {self._episode.tolist()}"
        return f"{acting}step {t + 1} of the fragment, {envs}, {episodes}"


def _select(i: int, obs: Any, info: Any) -> tuple[Any, Any]:
    return element(obs, i), {MASK: element(info[MASK], i)} if MASK in info else {}


def _plain(actions: Any) -> Any:
    """Return a batch of actions as lists, for messages."""
    return actions.tolist() if isinstance(actions, np.ndarray) else actions


def _seed_for(vector: Any, seeds: list[int]) -> Any:
    """Return the seeds in the form that this vector takes; there is no common form."""
    inner = vector.unwrapped
    if isinstance(inner, gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv):
        return seeds
    if type(inner).__module__.startswith("ale_py."):
        return np.array(seeds)
    return seeds[0]
