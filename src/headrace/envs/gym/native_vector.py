"""An environment's own vector form (Gymnasium's `vector_entry_point`), stepped as it is.

All three of Gymnasium's autoreset modes give the same valid transitions: SAME_STEP as it is;
DISABLED by a reset of those that ended within the step; NEXT_STEP has a row that only resets, which
is marked as not valid.

Left out: the state of an episode under way, which such a form does not give: after a resume every
environment begins a new one.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from headrace.batch import Fragment, each
from headrace.envs.api import GUARDS, Episode, Guards, Restored, env_error
from headrace.envs.episodes import FragmentWriter, ObsWriter
from headrace.envs.spaces import MASK
from headrace.errors import EnvError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Array, EnvSpec


class NativeVector:
    """A `VectorEnv` over a `gymnasium.vector.VectorEnv`; see there for the contract.

    Args:
        vector: already made; it is closed with this.
        spec: what each of its environments offers.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed; each env gets its own from it at its first reset, and goes on with
            its own random numbers. A vector that takes one seed only gets one.
        meter: told of step times (a reset within a step is part of it).
        role: `env` for training, `eval` for evaluation.
        sampler: named in errors.
        guards: what to check. An error always ends the run: one env of it cannot be made anew.
    """

    def __init__(
        self,
        vector: Any,
        spec: EnvSpec,
        env_id: Array,
        seed: int,
        meter: Meter,
        *,
        role: str = "env",
        sampler: str = "inline",
        guards: Guards = GUARDS,
    ) -> None:
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = 0
        self._vector = vector
        self._seed, self._role, self._sampler = seed, role, sampler
        self._meter = meter
        self._codec, self._intake = ActionCodec(spec.action), ObsWriter(spec)
        self._rows = FragmentWriter(spec, env_id, checks=guards.enabled)
        mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._mode = mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
        # Whose next row is that of a reset (NEXT_STEP only)
        self._resetting = np.zeros(len(env_id), bool)
        self._num_counted = 0
        self._begun = False

    @property
    def step_s(self) -> float:
        """See `VectorEnv`."""
        return self._rows.step_s

    def bind(self, *fragments: Fragment) -> None:
        """Write into the only fragment; the very first time this resets all envs."""
        if not self._begun:
            self._begin()
        self._rows.bind(*fragments)
        self._rows.valid[:] = True
        self._num_counted = 0

    def step(self, t: int) -> None:
        """Step all envs, and begin the next episode of those that ended."""
        rows = self._rows
        actions = self._codec.to_env(rows.action[t])
        try:
            obs, reward, terminated, truncated, info = self._vector.step(actions)
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in {self._where(t, actions)}") from error
        if t == 0:
            self._check_declared("step", obs)
        rows.reward[t], rows.terminated[t], rows.truncated[t] = reward, terminated, truncated
        self._intake.put_all(rows.at(t + 1), obs, info)
        ended = np.logical_or(terminated, truncated)
        if self._mode == AutoresetMode.NEXT_STEP:
            rows.valid[t], self._resetting = ~self._resetting, ended
        if ended.any():
            self._end(t, ended, obs, info)
        self._meter.lap("env_step")

    def _end(self, t: int, ended: Array, obs: Any, info: Any) -> None:
        """Keep final observations, count episodes, and reset where the vector does not."""
        rows = self._rows
        self._count(t + 1)
        final, final_info = obs, info
        if self._mode == AutoresetMode.SAME_STEP:
            final, final_info = info["final_obs"], info.get("final_info", {})
        for i in np.flatnonzero(ended).tolist():
            if rows.truncated[t, i] and not rows.terminated[t, i]:
                kept = each(lambda o, i=i: o[i : i + 1].copy(), rows.at(t + 1))
                self._intake.put(kept, 0, *_one(i, final, final_info), ended=True)
                rows.keep_final(t, i, each(lambda o: o[0], kept))
            rows.end_episode(t, i)
            rows.episode[i] += 1
        if self._mode == AutoresetMode.DISABLED:
            try:
                obs, info = self._vector.reset(options={"reset_mask": ended})
            except (Exception, SystemExit) as error:
                raise env_error(error, f"in reset, {self._where(t)}") from error
            # Of the others it may give no mask
            for i in np.flatnonzero(ended).tolist():
                self._intake.put(rows.at(t + 1), i, *_one(i, obs, info), ended=False)

    def _count(self, num_steps: int) -> None:
        """Bring the accounts of the episodes to where they are after so many steps."""
        rows, new = self._rows, slice(self._num_counted, num_steps)
        valid = rows.valid[new]
        rows.episode_step += valid.sum(0)
        rows.episode_reward += np.sum(rows.reward[new] * valid, 0, np.float64)
        self._num_counted = num_steps

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        self._count(len(self._rows.reward))
        return self._rows.finish(self._where_then)

    def state(self) -> dict[str, Array]:
        """Counts only, of which `restore` uses the number of the episode."""
        return self._rows.state()

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`."""
        return self._rows.current_obs()

    def restore(self, state: dict[str, Array]) -> Restored:
        """Begin an episode after the one that was under way, in every env."""
        self._rows.restore(state)
        return self._begin()

    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that earlier ones, of one step at least, cannot have had."""
        self._rows.episode[:] = num_steps
        return self._begin()

    def close(self) -> None:
        """Close the vector; EnvError if it fails."""
        try:
            self._vector.close()
        except Exception as error:
            raise env_error(error, f"while closing {self.spec.id}") from error

    def _begin(self) -> Restored:
        """Seed and reset all envs."""
        rows = self._rows
        rows.episode += 1
        rows.episode_step[:], rows.episode_reward[:] = 0, 0.0
        self._resetting = np.zeros(len(self.env_id), bool)
        seeds = [
            derive(self._seed, self._role, int(env), int(episode))
            for env, episode in zip(self.env_id, rows.episode, strict=True)
        ]
        try:
            obs, info = self._vector.reset(seed=_seed_for(self._vector, seeds))
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._where(0)}") from error
        self._check_declared("reset", obs)
        self._intake.put_all(rows.current, obs, info)
        self._meter.lap("env_reset")
        self._begun = True
        return Restored(new_episode=len(self.env_id))

    def _check_declared(self, method: str, obs: Any) -> None:
        if wrong := self._intake.misfit(_one(0, obs, {})[0]):
            raise EnvError(f"{method} returned {wrong} ({self.spec.id}, {self._sampler}).")

    def _where_then(self, i: int, num_steps: int, *, before_reset: bool = True) -> str:
        return (
            f"after step {num_steps} of the fragment, env {self.env_id[i]} of {self.spec.id} (its "
            f"own vector form), sampler {self._sampler}"
        )

    def _where(self, t: int, actions: Array | None = None) -> str:
        return (
            ("" if actions is None else f"a step with the actions {actions.tolist()}, ")
            + f"step {t + 1} of the fragment, envs {self.env_id.tolist()} of {self.spec.id} (its "
            f"own vector form), sampler {self._sampler}, episodes {self._rows.episode.tolist()}"
        )


def _one(i: int, obs: Any, info: Any) -> tuple[Any, Any]:
    """Observation and mask of env i, out of a batch of them."""
    one = {key: part[i] for key, part in obs.items()} if hasattr(obs, "items") else obs[i]
    return one, {MASK: info[MASK][i]} if MASK in info else {}


def _seed_for(vector: Any, seeds: list[int]) -> Any:
    """The seeds in the form that this vector takes: there is no one form that all do."""
    own = vector.unwrapped
    if isinstance(own, gymnasium.vector.SyncVectorEnv | gymnasium.vector.AsyncVectorEnv):
        return seeds
    if type(own).__module__.startswith("ale_py."):
        return np.array(seeds)
    return seeds[0]
