"""The rows of a fragment as a vector of environments writes them, and the accounts of its episodes.

Left out: stepping (`python_vector.py`, `native_vector.py`).
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headrace.batch import Fragment, each
from headrace.envs.api import Episode
from headrace.envs.spaces import MASK, flat_mask
from headrace.errors import EnvError
from headrace.spec import PLAIN, Agents, Array, EnvSpec, Space


class Where(Protocol):
    """Where env i is after so many steps of the fragment, in words."""

    def __call__(self, i: int, num_steps: int, *, before_reset: bool = True) -> str:
        """See `FragmentWriter.moment`."""


class FragmentWriter:
    """What every vector keeps, however it steps.

    Attributes:
        obs: the bound fragment's observations, `[T+1, n, ...]` (a dict of arrays for a Dict).
        action: `[T, n, ...]`, the bound fragment's.
        reward, terminated, truncated, valid: `[T, n]`, likewise.
        current: observations, `[n, ...]`: row 0 of the next fragment.
        episode: `[n]`, index of each env's episode (-1: not begun).
        episode_step, episode_reward: `[n]`, of the episode under way.
        step_s: mean seconds per env step in the last fragment.
    """

    def __init__(self, spec: EnvSpec, env_id: Array, *, checks: bool) -> None:
        self._spec, self._env_id, self._checks = spec, env_id, checks
        n = len(env_id)
        self.episode = np.full(n, -1)
        self.episode_step = np.zeros(n, np.int64)
        self.episode_reward = np.zeros(n)
        self.current: Any = (
            {key: np.zeros((n, *part.shape), part.dtype) for key, part in spec.observation.parts}
            if spec.observation.kind == "dict"
            else np.zeros((n, *spec.observation.shape), spec.observation.dtype)
        )
        self.step_s = 0.0
        self._choices = [
            (key, np.array(part.start), np.array(part.start) + np.array(part.nvec))
            for key, part in spec.observation.leaves
            if part.nvec and checks
        ]
        self._finished: list[Episode] = []
        self._bound_at = 0.0

    def bind(self, fragment: Fragment) -> None:
        """Write into `fragment` from now on; its observation row 0 is filled."""
        self.obs = each(lambda o: o.numpy(), fragment.obs)
        self.action = fragment.action.numpy()
        self.reward, self.valid = fragment.reward.numpy(), fragment.valid.numpy()
        self.terminated, self.truncated = fragment.terminated.numpy(), fragment.truncated.numpy()
        self._final_obs = each(lambda o: o.numpy(), fragment.final_obs)
        self._final_step, self._final_row = fragment.final_step.numpy(), fragment.final_row.numpy()
        self._num_final = fragment.num_final.numpy()
        self._num_final[0] = 0
        fragment.env_id.numpy()[:] = self._env_id
        each(_copy, self.at(0), self.current)
        self._bound_at = time.monotonic()

    def at(self, t: int) -> Any:
        """Row t of the bound fragment's observations."""
        return each(lambda o: o[t], self.obs)

    def keep_final(self, t: int, i: int, obs: Any) -> None:
        """Keep the true next observation of step t of env i, which was truncated."""
        k = int(self._num_final[0])
        each(lambda final, o: _put(final, k, o), self._final_obs, obs)
        self._final_step[k], self._final_row[k] = t, i
        self._num_final[0] = k + 1

    def end_episode(self, t: int, i: int) -> None:
        """Count env i's episode, which ended with step t."""
        total, length = float(self.episode_reward[i]), int(self.episode_step[i])
        self._finished.append(Episode(t, int(self._env_id[i]), total, length))
        self.begin_episode(i)

    def begin_episode(self, i: int) -> None:
        """Of env i nothing is counted yet."""
        self.episode_step[i], self.episode_reward[i] = 0, 0.0

    def drop(self, t: int, i: int) -> None:
        """Step t of env i was none: its row is not valid, and the episode is cut before it."""
        self.valid[t, i], self.reward[t, i] = False, 0.0
        self.terminated[t, i], self.truncated[t, i] = False, True
        if t and self.valid[t - 1, i] and not (self.terminated | self.truncated)[t - 1, i]:
            self.truncated[t - 1, i] = True
            self.keep_final(t - 1, i, each(lambda o: o[i], self.at(t)))
        self.begin_episode(i)

    def not_finite(self, t: int) -> list[int]:
        """The envs whose step t gave NaN or infinity."""
        bad = ~np.isfinite(self.reward[t])
        for key, space in self._spec.observation.leaves:
            if space.dtype.startswith("float"):
                rows = self.obs[key] if isinstance(self.obs, dict) else self.obs
                bad |= ~np.isfinite(rows[t + 1]).reshape(len(bad), -1).all(1)
        return [int(i) for i in np.flatnonzero(bad)]

    def no_choices(self, obs: Any) -> list[int]:
        """The envs whose observation, in `[n, ...]`, is no choice of its space.

        It would be an index out of bounds, or of something else, to the network that sees it next.
        """
        if not self._choices:
            return []
        bad = np.zeros(len(self.episode), bool)
        for key, least, end in self._choices:
            part = obs[key] if isinstance(obs, dict) else obs
            bad |= ((part < least) | (part >= end)).reshape(len(bad), -1).any(1)
        return [int(i) for i in np.flatnonzero(bad)]

    def finish(self, where: Where) -> list[Episode]:
        """The fragment is full: check it, and give the episodes that ended in it.

        Raises:
            EnvError: NaN, infinity, or a mask that allows nothing; `where`, in words.
        """
        self.step_s = (time.monotonic() - self._bound_at) / self.reward.size
        if self._checks:
            self._check_finite(where)
            if self._spec.mask_key:
                self._check_masks(where)
        each(_copy, self.current, self.at(len(self.reward)))
        finished, self._finished = self._finished, []
        return finished

    def state(self) -> dict[str, Array]:
        """Counts, as named arrays (copies)."""
        return {
            "episode": self.episode.copy(),
            "episode_step": self.episode_step.copy(),
            "episode_reward": self.episode_reward.copy(),
        }

    def current_obs(self) -> dict[str, Array]:
        """The current observations, as `obs.KEY` (copies)."""
        return {f"obs.{key}": self.part(key).copy() for key, _ in self._spec.observation.leaves}

    def restore(self, state: dict[str, Array]) -> None:
        """Undo `state` and `current_obs`."""
        self.episode[:] = state["episode"]
        self.episode_step[:] = state["episode_step"]
        self.episode_reward[:] = state["episode_reward"]
        for key, _ in self._spec.observation.leaves:
            self.part(key)[:] = state[f"obs.{key}"]

    def part(self, key: str) -> Array:
        """One of the arrays of `current`, by the key of `Space.leaves`."""
        array: Array = self.current[key] if isinstance(self.current, dict) else self.current
        return array

    def moment(self, i: int, num_steps: int, *, before_reset: bool) -> tuple[int, int]:
        """In which episode env i was after so many steps of a full fragment, and how far in it.

        Args:
            i: row of the env.
            num_steps: of the fragment.
            before_reset: where the last of these steps ended an episode, that one is meant.
        """
        ends = [
            e for e in self._finished
            if e.env_id == self._env_id[i] and e.ended_at >= num_steps - before_reset
        ]  # fmt: skip
        taken = ends[0].num_steps if ends else int(self.episode_step[i])
        rest = (ends[0].ended_at + 1 if ends else len(self.reward)) - num_steps
        return int(self.episode[i]) - len(ends), taken - rest

    def _check_finite(self, where: Where) -> None:
        """NaN or infinity is found here, before anything is learned from it."""
        k = int(self._num_final[0])
        T, n = self.reward.shape  # noqa: N806
        step, row = np.indices((T + 1, n))
        final_step, final_row = self._final_step[:k] + 1, self._final_row[:k]
        then = partial(where, before_reset=False)
        for key, space in self._spec.observation.leaves:
            name = f"observation {key!r}" if key else "observation"
            rows, finals = (
                (o[key] if isinstance(o, dict) else o) for o in (self.obs, self._final_obs)
            )
            if space.dtype.startswith("float"):
                _refuse_nonfinite(f"an {name}", rows, step, row, then)
                _refuse_nonfinite(f"a final {name}", finals[:k], final_step, final_row, where)
        _refuse_nonfinite("a reward", self.reward, step[1:], row[1:], where)

    def _check_masks(self, where: Where) -> None:
        """Where nothing is allowed there is no policy."""
        mask = self.obs[self._spec.mask_key][: len(self.reward)]
        first = 0
        for count in self._spec.action.nvec:
            bits = mask.reshape(*self.reward.shape, -1)[..., first : first + count]
            none = ~bits.any(-1) & self.valid
            if none.any():
                t, i = np.argwhere(none)[0]
                raise EnvError(
                    f"The environment's action mask allows no action at all (choices {first} to "
                    f"{first + count - 1})\n({where(i, t, before_reset=False)})."
                )
            first += count


class ObsWriter:
    """What an environment returns, written where it belongs.

    One environment at a time (`put`), or a whole batch of them (`put_all`).
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self.is_plain = spec.observation.kind != "dict"
        self._keys = [key for key, _ in spec.observation.parts]
        self._own = [k for k in self._keys if not (spec.mask_in_info and k == spec.mask_key)]

    def put(self, rows: Any, i: int, obs: Any, info: Any, *, ended: bool) -> None:
        """Write one environment's observation (and mask) to row i.

        Raises:
            KeyError: a key, or the mask that `info` had before, is missing.
        """
        if self.is_plain:
            rows[i] = obs
            return
        for key in self._own:
            rows[key][i] = obs if key == PLAIN else obs[key]
        if self._spec.mask_in_info:
            # The end of an episode may well offer nothing
            mask = info.get(MASK) if ended else info[MASK]
            rows[MASK][i] = True if mask is None else flat_mask(mask)

    def put_all(self, rows: Any, obs: Any, info: Any) -> None:
        """Write a batch of observations (and masks) as Gymnasium's vectors return them."""
        if self.is_plain:
            rows[:] = obs
            return
        for key in self._own:
            rows[key][:] = obs if key == PLAIN else obs[key]
        if self._spec.mask_in_info:
            masks = info[MASK]
            if isinstance(masks, tuple | list):
                masks = np.concatenate([np.asarray(m).reshape(len(m), -1) for m in masks], -1)
            rows[MASK][:] = np.stack(list(masks)).reshape(rows[MASK].shape) != 0

    def misfit(self, obs: Any) -> str:
        """What is wrong with an observation's shape or dtype; "" if it is as declared.

        Storing would broadcast a wrong shape and round a wrong dtype without a word.
        """
        if self.is_plain:
            return _misfit("an observation", self._spec.observation, obs)
        for key, space in self._spec.observation.parts:
            if key not in self._own:
                continue
            if key != PLAIN and (not hasattr(obs, "keys") or key not in obs):
                keys = list(obs) if hasattr(obs, "keys") else type(obs).__name__
                return f"an observation without the key {key!r} (it has {keys})"
            part = obs if key == PLAIN else obs[key]
            if wrong := _misfit(
                f"an observation {key!r}" if key else "an observation", space, part
            ):
                return wrong
        return ""


def _misfit(name: str, space: Space, obs: Any) -> str:
    given = np.asarray(obs)
    fits = given.shape == space.shape and (
        np.can_cast(given.dtype, space.dtype, "same_kind")
        # A list of small integers, where the space has smaller ones
        or (given.dtype.kind in "iu" and np.array_equal(given.astype(space.dtype), given))
    )
    if fits:
        return ""
    return (
        f"{name} of shape {given.shape} and dtype {given.dtype}, but the environment declares "
        f"{space.describe()}"
    )


def _refuse_nonfinite(name: str, rows: Array, step: Array, row: Array, where: Where) -> None:
    if not np.isfinite(rows).all():
        bad = tuple(np.argwhere(~np.isfinite(rows))[0][: step.ndim])
        raise EnvError(
            f"The environment gave {name} that is not finite: {rows[bad]}\n"
            f"({where(row[bad], step[bad])})."
        )


def _copy(to: Array, array: Array) -> None:
    to[:] = array


def _put(to: Array, index: int, array: Array) -> None:
    to[index] = array


# What is told of a full fragment where the environments are on a device: episodes, and bad values.
#
# Here the host waits for the device, once.


def ended_episodes(
    length: Tensor, total: Tensor, env_id: Array, sizes: Sequence[int], last: int
) -> tuple[list[Episode], int]:
    """The episodes that ended in a fragment, and how many there were.

    Args:
        length: `[T, n]`: steps of the episode that ended there; 0: none did.
        total: `[T, n, policies]`: its return, the mean over the agents of each policy.
        env_id: `[n]`.
        sizes: agents of each policy.
        last: give so many of them, the last ones; 0: all.
    """
    num_envs = length.shape[1]
    flat = length.flatten()
    ended = flat.nonzero().squeeze(-1)
    count = len(ended)
    ended = ended[-last:] if last else ended
    where, returns = ended.cpu().numpy(), total.flatten(0, 1)[ended].cpu().numpy()
    columns = [
        (where // num_envs).tolist(),
        env_id[where % num_envs].tolist(),
        np.average(returns, axis=-1, weights=sizes).tolist(),
        flat[ended].tolist(),
    ]
    if len(sizes) > 1:
        columns.append([tuple(of) for of in returns.tolist()])
    return [Episode(*each) for each in zip(*columns, strict=True)], count


def check_finite(
    fragment: Fragment, env_id: Array, agents: Agents, spec: EnvSpec, sampler: str
) -> None:
    """EnvError for NaN and infinity, before anything is learned from it.

    Args:
        fragment: full.
        env_id: `[n]`.
        agents: of each env, whose rows are columns of it.
        spec: named in the error, and
        sampler: likewise.
    """
    obs, (final_obs, final_step, final_row) = fragment.obs, fragment.finals()
    assert isinstance(obs, Tensor)
    assert isinstance(final_obs, Tensor)
    bad_final = ~_finite(final_obs, 1) & (final_step < fragment.num_steps)
    # A sum has no room for NaN and infinity, and takes a tenth of the time of looking for them.
    if bool((obs[1:].sum() + fragment.reward.sum()).isfinite() & ~bad_final.any()):
        return
    bad = ~fragment.reward.isfinite() | ~_finite(obs[1:], 2)
    if not bool(bad.any() | bad_final.any()):  # no more than too large for a sum
        return
    if bad.any():
        t, row = bad.nonzero()[0].tolist()
        seen = obs[t + 1, row]
    else:
        place = int(bad_final.nonzero()[0])
        t, row, seen = int(final_step[place]), int(final_row[place]), final_obs[place]
    agent = f", agent {agents.first + row % agents.size}" if spec.num_agents > 1 else ""
    raise EnvError(
        f"The environment gave a reward ({fragment.reward[t, row].item()}) or observation "
        f"({seen.tolist()}) that is not finite\n"
        f"(step {t + 1} of the fragment, env {env_id[row // agents.size]} of {spec.id}{agent}, "
        f"sampler {sampler})."
    )


def _finite(tensor: Tensor, num_dims: int) -> Tensor:
    """Which of its rows are finite throughout: those of its first `num_dims` dimensions."""
    found = tensor.isfinite()
    return found.flatten(num_dims).all(-1) if found.dim() > num_dims else found
