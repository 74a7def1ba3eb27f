"""Base classes of vectors: they write fragments and account for the episodes that end in them.

`HostVector` and `DeviceVector` are the base classes of all vectors. The subclasses do the stepping.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, each
from headrace.envs.api import Episode, VectorContext, VectorEnv
from headrace.envs.spaces import MASK, flat_mask
from headrace.errors import EnvError
from headrace.spec import PLAIN, ActionCodec, Agents, Array, EnvSpec, Space

DescribeRow = Callable[[int, int, bool], str]
"""(row, steps of the fragment, whether before a reset) -> the env's position then, in words."""

_COUNTS = "episode", "episode_step", "episode_reward"


class ObsWriter:
    """Writes what an environment, or a whole batch of them, returns into rows of a fragment."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self.is_plain = spec.observation.kind != "dict"
        self._obs_parts = [
            (key, space)
            for key, space in spec.observation.parts
            if not (spec.mask_in_info and key == spec.mask_key)
        ]

    def put(self, rows: Any, i: int, obs: Any, info: Any, *, ended: bool) -> None:
        """Write one environment's observation (and mask) to row i; KeyError if one is missing."""
        if self.is_plain:
            rows[i] = obs
            return
        for key, _ in self._obs_parts:
            rows[key][i] = obs if key == PLAIN else obs[key]
        if self._spec.mask_in_info:
            # There may be no mask at the end of an episode.
            mask = info.get(MASK) if ended else info[MASK]
            rows[MASK][i] = True if mask is None else flat_mask(mask)

    def put_all(self, rows: Any, obs: Any, info: Any) -> None:
        """Write a batch of observations (and masks) as Gymnasium's vectors return them."""
        if self.is_plain:
            rows[:] = obs
            return
        for key, _ in self._obs_parts:
            rows[key][:] = obs if key == PLAIN else obs[key]
        if self._spec.mask_in_info:
            masks = info[MASK]
            if isinstance(masks, tuple | list):
                masks = np.concatenate([np.asarray(m).reshape(len(m), -1) for m in masks], -1)
            rows[MASK][:] = np.stack(list(masks)).reshape(rows[MASK].shape) != 0

    def misfit(self, obs: Any) -> str:
        """Describe a wrong shape or dtype of an observation; "" if it is as declared.

        Storing it would broadcast a wrong shape and round a wrong dtype silently.
        """
        if self.is_plain:
            return _misfit("an observation", self._spec.observation, obs)
        for key, space in self._obs_parts:
            if key != PLAIN and (not hasattr(obs, "keys") or key not in obs):
                keys = list(obs) if hasattr(obs, "keys") else type(obs).__name__
                return f"an observation without the key {key!r} (it has {keys})"
            name = "an observation" if key == PLAIN else f"an observation {key!r}"
            if misfit := _misfit(name, space, obs if key == PLAIN else obs[key]):
                return misfit
        return ""


def _misfit(name: str, space: Space, obs: Any) -> str:
    array = np.asarray(obs)
    fits = array.shape == space.shape and (
        np.can_cast(array.dtype, space.dtype, "same_kind")
        # A list of small integers, where the space has smaller ones
        or (array.dtype.kind in "iu" and np.array_equal(array.astype(space.dtype), array))
    )
    if fits:
        return ""
    return (
        f"{name} of shape {array.shape} and dtype {array.dtype}, but the environment declares "
        f"{space.describe()}"
    )


class FragmentWriter:
    """Writes the bound fragment of a `HostVector`, and counts its episodes.

    Attributes:
        obs: the bound fragment's observations, `[T+1, n, ...]` (a dict of arrays for a Dict).
        action: `[T, n, ...]`, the bound fragment's.
        reward, terminated, truncated, valid: `[T, n]`, likewise.
        current: observations, `[n, ...]`: row 0 of the next fragment.
        leaves: the arrays of `current`, by the keys of `Space.leaves`.
        episode: `[n]`, index of each env's episode (-1: not begun).
        episode_step, episode_reward: `[n]`, of the current episode.
    """

    def __init__(self, context: VectorContext) -> None:
        self._spec, self._env_id = context.spec, context.env_id
        self._checks = context.guards.enabled
        n, space = len(context.env_id), context.spec.observation
        self.episode = np.full(n, -1)
        self.episode_step = np.zeros(n, np.int64)
        self.episode_reward = np.zeros(n)
        self.leaves = {key: np.zeros((n, *part.shape), part.dtype) for key, part in space.leaves}
        self.current: Any = self.leaves if space.kind == "dict" else self.leaves[""]
        self._choices = [
            (key, np.array(part.start), np.array(part.start) + np.array(part.nvec))
            for key, part in space.leaves
            if part.nvec and self._checks
        ]
        self._finished: list[Episode] = []

    def bind(self, fragment: Fragment) -> None:
        """Write into `fragment` from now on, and fill its observation row 0."""
        self.obs = each(lambda o: o.numpy(), fragment.obs)
        self.action = fragment.action.numpy()
        self.reward, self.valid = fragment.reward.numpy(), fragment.valid.numpy()
        self.terminated, self.truncated = fragment.terminated.numpy(), fragment.truncated.numpy()
        self._final_obs = each(lambda o: o.numpy(), fragment.final_obs)
        self._final_step, self._final_row = fragment.final_step.numpy(), fragment.final_row.numpy()
        self._num_final = fragment.num_final.numpy()
        self._num_final[0] = 0
        self.valid[:] = True
        fragment.env_id.numpy()[:] = self._env_id
        each(np.copyto, self.row(0), self.current)

    def row(self, t: int) -> Any:
        """Return row t of the bound fragment's observations, `[n, ...]`."""
        return each(lambda o: o[t], self.obs)

    def keep_final(self, t: int, i: int, obs: Any) -> None:
        """Keep the true next observation of step t of env i, which was truncated."""
        k = int(self._num_final[0])
        each(lambda final, o: np.copyto(final[k : k + 1], o), self._final_obs, obs)
        self._final_step[k], self._final_row[k] = t, i
        self._num_final[0] = k + 1

    def end_episode(self, t: int, i: int) -> None:
        """Count env i's episode, which ended with step t."""
        total, length = float(self.episode_reward[i]), int(self.episode_step[i])
        self._finished.append(Episode(t, int(self._env_id[i]), total, length))
        self.begin_episode(i)

    def begin_episode(self, i: int) -> None:
        """Reset env i's counts."""
        self.episode_step[i], self.episode_reward[i] = 0, 0.0

    def drop(self, t: int, i: int) -> None:
        """Mark step t of env i as not valid, and truncate its episode before that step."""
        self.valid[t, i], self.reward[t, i] = False, 0.0
        self.terminated[t, i], self.truncated[t, i] = False, True
        if t and self.valid[t - 1, i] and not (self.terminated | self.truncated)[t - 1, i]:
            self.truncated[t - 1, i] = True
            self.keep_final(t - 1, i, each(lambda o: o[i], self.row(t)))
        self.begin_episode(i)

    def nonfinite_rows(self, t: int) -> list[int]:
        """Return the envs whose step t gave NaN or infinity."""
        bad = ~np.isfinite(self.reward[t])
        for key, space in self._spec.observation.leaves:
            if space.dtype.startswith("float"):
                rows = self.obs[key] if isinstance(self.obs, dict) else self.obs
                bad |= ~np.isfinite(rows[t + 1]).reshape(len(bad), -1).all(1)
        return [int(i) for i in np.flatnonzero(bad)]

    def invalid_choices(self, obs: Any) -> list[int]:
        """Return the envs whose observation, in `[n, ...]`, is no choice of its space.

        To a network it would be an index out of bounds, or of something else.
        """
        if not self._choices:
            return []
        bad = np.zeros(len(self.episode), bool)
        for key, first, end in self._choices:
            part = obs[key] if isinstance(obs, dict) else obs
            bad |= ((part < first) | (part >= end)).reshape(len(bad), -1).any(1)
        return [int(i) for i in np.flatnonzero(bad)]

    def finish(self, describe: DescribeRow) -> list[Episode]:
        """Return the episodes that ended; EnvError for NaN, infinity, masks that allow nothing."""
        if self._checks:
            self._check_finite(describe)
            if self._spec.mask_key:
                self._check_masks(describe)
        each(np.copyto, self.current, self.row(len(self.reward)))
        finished, self._finished = self._finished, []
        return finished

    def state(self) -> dict[str, Array]:
        """Return the counts, as named arrays (copies)."""
        return {name: getattr(self, name).copy() for name in _COUNTS}

    def restore(self, state: dict[str, Array]) -> None:
        """Undo `state`, and `obs` of the vector."""
        for name in _COUNTS:
            getattr(self, name)[:] = state[name]
        for key, leaf in self.leaves.items():
            leaf[:] = state[f"obs.{key}"]

    def position_after(self, i: int, num_steps: int, before_reset: bool) -> tuple[int, int]:
        """Return env i's episode, and its steps so far, after `num_steps` of a full fragment.

        With `before_reset`, an episode that ended with the last of these steps is the one meant.
        """
        ends = [
            e for e in self._finished
            if e.env_id == self._env_id[i] and e.ended_at >= num_steps - before_reset
        ]  # fmt: skip
        taken = ends[0].num_steps if ends else int(self.episode_step[i])
        rest = (ends[0].ended_at + 1 if ends else len(self.reward)) - num_steps
        return int(self.episode[i]) - len(ends), taken - rest

    def _check_finite(self, describe: DescribeRow) -> None:
        k = int(self._num_final[0])
        T, n = self.reward.shape  # noqa: N806
        step, row = np.indices((T + 1, n))
        final_step, final_row = self._final_step[:k] + 1, self._final_row[:k]
        refuse = partial(_refuse_nonfinite, describe)
        for key, space in self._spec.observation.leaves:
            name = f"observation {key!r}" if key else "observation"
            rows, finals = (
                (o[key] if isinstance(o, dict) else o) for o in (self.obs, self._final_obs)
            )
            if space.dtype.startswith("float"):
                refuse(f"an {name}", rows, step, row, before_reset=False)
                refuse(f"a final {name}", finals[:k], final_step, final_row)
        refuse("a reward", self.reward, step[1:], row[1:])

    def _check_masks(self, describe: DescribeRow) -> None:
        mask = self.obs[self._spec.mask_key][: len(self.reward)]
        first = 0
        for count in self._spec.action.nvec:
            bits = mask.reshape(*self.reward.shape, -1)[..., first : first + count]
            none = ~bits.any(-1) & self.valid
            if none.any():
                t, i = np.argwhere(none)[0]
                raise EnvError(
                    f"The environment's action mask allows no action at all (choices {first} to "
                    f"{first + count - 1})\n({describe(i, t, False)})."
                )
            first += count


def _refuse_nonfinite(
    describe: DescribeRow,
    name: str,
    rows: Array,
    step: Array,
    row: Array,
    *,
    before_reset: bool = True,
) -> None:
    if not np.isfinite(rows).all():
        bad = tuple(np.argwhere(~np.isfinite(rows))[0][: step.ndim])
        raise EnvError(
            f"The environment gave {name} that is not finite: {rows[bad]}\n"
            f"({describe(row[bad], step[bad], before_reset)})."
        )


class HostVector(VectorEnv):
    """Base class of vectors whose environments return NumPy arrays, all into one fragment."""

    def __init__(self, context: VectorContext) -> None:
        super().__init__(context)
        self._codec, self._obs_writer = ActionCodec(context.spec.action), ObsWriter(context.spec)
        self._writer = FragmentWriter(context)
        self._begun = False
        self._bound_at = 0.0

    def bind(self, *fragments: Fragment) -> None:
        self.dropped, self.lost_steps = [], 0
        if not self._begun:
            self._begin_first()
            self._begun = True
        self._writer.bind(*fragments)
        self._bound_at = time.monotonic()

    def finish(self) -> list[Episode]:
        self.step_s = (time.monotonic() - self._bound_at) / self._writer.reward.size
        return self._writer.finish(self._describe_row)

    def state(self) -> dict[str, Array]:
        return self._writer.state()

    def obs(self) -> dict[str, Array]:
        return {f"obs.{key}": leaf.copy() for key, leaf in self._writer.leaves.items()}

    @abstractmethod
    def _begin_first(self) -> None:
        """Reset all envs."""

    @abstractmethod
    def _describe_row(self, i: int, num_steps: int, before_reset: bool) -> str:
        """Describe a row of a full fragment; see `DescribeRow`."""


class DeviceVector(VectorEnv):
    """Base class of vectors whose fragments, one of each policy, are on the learner's device.

    Attributes:
        parts: the agents whose rows each fragment holds.
        ended_length: `[T, n]` int32: steps of the episode that ended there; 0: none did.
        ended_return: `[T, n, parts]` float64: its return, the mean over a part's agents.
        num_ended: how many episodes ended in the last fragment.
        can_be_recorded: whether a step is work for the device only, always in the same memory: a
            CUDA graph of it does the same.
    """

    num_ended = 0
    can_be_recorded = False

    def __init__(self, context: VectorContext, device: torch.device) -> None:
        super().__init__(context)
        self.parts = context.parts or (Agents(0, context.spec.num_agents),)
        self.device = device
        self._bound_at = 0.0

    def finals_per_row(self, num_steps: int) -> int:
        """Return how many final observations of each row a fragment must have room for."""
        return num_steps

    def tensors(self) -> list[Tensor]:
        """Return what a fragment changes and the caller may change back."""
        return []

    def _allocate_ended(self, num_steps: int) -> None:
        shape = num_steps, len(self.env_id)
        self.ended_length = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.ended_return = torch.zeros(
            *shape, len(self.parts), dtype=torch.float64, device=self.device
        )

    def _write_env_id(self, fragment: Fragment, part: Agents) -> None:
        ids = Agents(0, part.size).ids(self.env_id, part.size)
        fragment.env_id.copy_(torch.from_numpy(ids))

    def _ended_episodes(self) -> list[Episode]:
        """Return the episodes that ended, the last ones; here the host waits for the device."""
        length, num_envs = self.ended_length.flatten(), len(self.env_id)
        self.step_s = (time.monotonic() - self._bound_at) / len(length)
        ended = length.nonzero().squeeze(-1)
        self.num_ended = len(ended)
        if self.context.last_episodes:
            ended = ended[-self.context.last_episodes :]
        position = ended.cpu().numpy()
        returns = self.ended_return.flatten(0, 1)[ended].cpu().numpy()
        columns = [
            (position // num_envs).tolist(),
            self.env_id[position % num_envs].tolist(),
            np.average(returns, axis=-1, weights=[part.size for part in self.parts]).tolist(),
            length[ended].tolist(),
        ]
        if len(self.parts) > 1:
            columns.append([tuple(by_policy) for by_policy in returns.tolist()])
        return [Episode(*fields) for fields in zip(*columns, strict=True)]

    def _check_finite(self, fragment: Fragment, part: Agents) -> None:
        """Raise EnvError for NaN or infinity in a full fragment of a part's rows."""
        obs, (final_obs, final_step, final_row) = fragment.obs, fragment.finals()
        assert isinstance(obs, Tensor)
        assert isinstance(final_obs, Tensor)
        bad_final = ~_finite_rows(final_obs, 1) & (final_step < fragment.num_steps)
        # NaN and infinity carry over to the sum, which takes a tenth of the time of a search.
        if bool((obs[1:].sum() + fragment.reward.sum()).isfinite() & ~bad_final.any()):
            return
        bad = ~fragment.reward.isfinite() | ~_finite_rows(obs[1:], 2)
        if not bool(bad.any() | bad_final.any()):  # finite values with an infinite sum
            return
        if bad.any():
            t, row = bad.nonzero()[0].tolist()
            bad_obs = obs[t + 1, row]
        else:
            k = int(bad_final.nonzero()[0])
            t, row, bad_obs = int(final_step[k]), int(final_row[k]), final_obs[k]
        spec = self.spec
        agent = f", agent {part.first + row % part.size}" if spec.num_agents > 1 else ""
        raise EnvError(
            f"The environment gave a reward ({fragment.reward[t, row].item()}) or observation "
            f"({bad_obs.tolist()}) that is not finite\n"
            f"(step {t + 1} of the fragment, env {self.env_id[row // part.size]} of {spec.id}"
            f"{agent}, {self.context.worker})."
        )


def _finite_rows(tensor: Tensor, num_dims: int) -> Tensor:
    """Return whether all is finite at each index of the first `num_dims` dimensions."""
    finite = tensor.isfinite()
    return finite.flatten(num_dims).all(-1) if finite.dim() > num_dims else finite
