"""Base classes of vectors: they write fragments and count episodes; subclasses do the stepping."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment, each, plain
from headrace.envs.api import Episode, VectorContext, VectorEnv
from headrace.envs.games.seats import LATEST, score
from headrace.envs.spaces.obs_reader import ObsReader, leaf
from headrace.errors import EnvError
from headrace.spec import ActionCodec, Agents, Array

COUNTS = "episode", "episode_step", "episode_reward"
"""What a `HostVector` counts, as its checkpoints name it."""


class HostVector(VectorEnv):
    """Base class of vectors whose environments return NumPy arrays, all into one fragment.

    `_rows` has the bound fragment's columns as arrays, and `_current` the observations of row 0 of
    the next one, `[n, ...]`; `_leaves` has its arrays by the keys of `Space.leaves`. `_episode`,
    `[n]`, is the index of each env's episode (-1: not begun).
    """

    def __init__(self, context: VectorContext) -> None:
        super().__init__(context)
        n, space = len(self.env_id), self.spec.observation
        self._codec = ActionCodec(self.spec.action)
        self._reader = ObsReader(self.spec)
        self._episode = np.full(n, -1)
        self._episode_step, self._episode_reward = np.zeros(n, np.int64), np.zeros(n)
        self._leaves = {key: np.zeros((n, *part.shape), part.dtype) for key, part in space.leaves}
        self._current: Any = self._leaves if space.kind == "dict" else self._leaves[""]
        self._finished: list[Episode] = []
        self._rows: Any = None
        self._begun = False
        self._bound_at = 0.0

    def bind(self, *fragments: Fragment) -> None:
        self.dropped, self.lost_steps = [], 0
        if not self._begun:
            self._begin_first()
            self._begun = True
        (fragment,) = fragments
        columns = vars(fragment).items()
        rows = self._rows = SimpleNamespace(**{k: each(lambda o: o.numpy(), v) for k, v in columns})
        rows.num_final[0], rows.valid[:], rows.env_id[:] = 0, True, self.env_id
        each(np.copyto, self._obs_row(0), self._current)
        self._bound_at = time.monotonic()

    def finish(self) -> list[Episode]:
        self.step_s = (time.monotonic() - self._bound_at) / self._rows.reward.size
        if self.context.guards.enabled:
            self._check_finite()
            if self.spec.mask_key:
                self._check_masks()
        each(np.copyto, self._current, self._obs_row(-1))
        finished, self._finished = self._finished, []
        return finished

    def count_env_steps(self, num_steps: int) -> int:
        return int(self._rows.valid[:num_steps].sum())

    def state(self) -> dict[str, Array]:
        return {name: getattr(self, f"_{name}").copy() for name in COUNTS}

    def obs(self) -> dict[str, Array]:
        return {f"obs.{key}": array.copy() for key, array in self._leaves.items()}

    @abstractmethod
    def _begin_first(self) -> None:
        """Reset all envs."""

    @abstractmethod
    def _describe_row(self, i: int, num_steps: int, before_reset: bool) -> str:
        """Describe env i's position after `num_steps` of a full fragment; see `_position_after`."""

    def _obs_row(self, t: int) -> Any:
        return each(lambda o: o[t], self._rows.obs)

    def _keep_final(self, t: int, i: int, obs: Any) -> None:
        """Keep the true next observation of step t of env i, which was truncated."""
        rows, k = self._rows, int(self._rows.num_final[0])
        each(lambda final, o: np.copyto(final[k : k + 1], o), rows.final_obs, obs)
        rows.final_step[k], rows.final_row[k], rows.num_final[0] = t, i, k + 1

    def _end_episode(self, t: int, i: int) -> None:
        total, length = float(self._episode_reward[i]), int(self._episode_step[i])
        self._finished.append(Episode(t, int(self.env_id[i]), total, length))
        self._begin_episode(i)

    def _begin_episode(self, i: int) -> None:
        self._episode_step[i], self._episode_reward[i] = 0, 0.0

    def _drop_step(self, t: int, i: int) -> None:
        """Mark step t of env i as not valid, and truncate its episode before that step."""
        rows = self._rows
        rows.valid[t, i], rows.reward[t, i] = False, 0.0
        rows.terminated[t, i], rows.truncated[t, i] = False, True
        if t and rows.valid[t - 1, i] and not (rows.terminated | rows.truncated)[t - 1, i]:
            rows.truncated[t - 1, i] = True
            self._keep_final(t - 1, i, each(lambda o: o[i], self._obs_row(t)))
        self._begin_episode(i)

    def _nonfinite_rows(self, t: int) -> list[int]:
        """Return the envs whose step t gave NaN or infinity."""
        bad = ~np.isfinite(self._rows.reward[t])
        for key, space in self.spec.observation.leaves:
            if space.dtype.startswith("float"):
                bad |= ~np.isfinite(leaf(self._rows.obs, key)[t + 1]).reshape(len(bad), -1).all(1)
        return np.flatnonzero(bad).tolist()

    def _invalid_choices(self, obs: Any) -> list[int]:
        """Return the envs whose observation, in `[n, ...]`, is no choice of its space."""
        if not self.context.guards.enabled:
            return []
        bad = self._reader.no_choice(obs, (len(self.env_id),))
        return [] if bad is None else np.flatnonzero(bad).tolist()

    def _position_after(self, i: int, num_steps: int, before_reset: bool) -> tuple[int, int]:
        """Return env i's episode, and its steps so far, after `num_steps` of a full fragment.

        With `before_reset`, an episode that ended with the last of these steps is the one meant.
        """
        ends = [
            e for e in self._finished
            if e.env_id == self.env_id[i] and e.ended_at >= num_steps - before_reset
        ]  # fmt: skip
        taken = ends[0].num_steps if ends else int(self._episode_step[i])
        rest = (ends[0].ended_at + 1 if ends else len(self._rows.reward)) - num_steps
        return int(self._episode[i]) - len(ends), taken - rest

    def _check_finite(self) -> None:
        rows, k = self._rows, int(self._rows.num_final[0])
        T, n = rows.reward.shape  # noqa: N806
        step, env = np.indices((T + 1, n))
        final_step, final_env = rows.final_step[:k] + 1, rows.final_row[:k]
        for key, space in self.spec.observation.leaves:
            name = f"observation {key!r}" if key else "observation"
            if space.dtype.startswith("float"):
                obs, finals = leaf(rows.obs, key), leaf(rows.final_obs, key)[:k]
                self._refuse_nonfinite(f"an {name}", obs, step, env, False)
                self._refuse_nonfinite(f"a final {name}", finals, final_step, final_env, True)
        self._refuse_nonfinite("a reward", rows.reward, step[1:], env[1:], True)

    def _refuse_nonfinite(
        self, name: str, values: Array, step: Array, env: Array, before_reset: bool
    ) -> None:
        if not np.isfinite(values).all():
            bad = tuple(np.argwhere(~np.isfinite(values))[0][: step.ndim])
            raise EnvError(
                f"The environment gave {name} that is not finite: {values[bad]}\n"
                f"({self._describe_row(env[bad], step[bad], before_reset)})."
            )

    def _check_masks(self) -> None:
        rows = self._rows
        seen = each(lambda o: o[:-1], rows.obs)
        for choices, none in self._reader.without_action(seen, rows.reward.shape):
            if (none & rows.valid).any():
                t, i = np.argwhere(none & rows.valid)[0]
                raise EnvError(
                    f"The environment's action mask allows no action at all (choices "
                    f"{choices.start} to {choices.stop - 1})\n"
                    f"({self._describe_row(i, t, False)})."
                )


class DeviceVector(VectorEnv):
    """Base class of vectors whose fragments, one of each policy, are on the learner's device.

    Attributes:
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
        self.parts = context.all_parts()
        self.device, self.seats = device, context.seats(device)
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
        if self.seats is not None:
            self._ended_member = torch.full(shape, LATEST, dtype=torch.int64, device=self.device)
            self._ended_side = torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _write_env_id(self, fragment: Fragment, i: int) -> None:
        fragment.env_id.copy_(torch.from_numpy(self.context.row_ids(i)))

    def _seat(self, t: int, ended: Tensor, episode: Tensor, fragments: Sequence[Fragment]) -> None:
        """In a league: after step t, note who played it, and draw who plays new episodes."""
        if (seats := self.seats) is None:
            return
        self._ended_member[t].copy_(seats.member)
        self._ended_side[t].copy_(seats.side)
        for i, fragment in enumerate(fragments):
            valid = fragment.valid[t].view(len(self.env_id), -1)
            valid.logical_and_(seats.learns(i).unsqueeze(1))
        seats.draw_where(ended, episode)

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
        means = map(self.context.returns_of, returns)
        return [
            Episode(at, env, total, steps, by_policy, match)
            for at, env, steps, (total, by_policy), match in zip(
                (position // num_envs).tolist(),
                self.env_id[position % num_envs].tolist(),
                length[ended].tolist(),
                means,
                self._matches(ended, returns),
                strict=True,
            )
        ]

    def _matches(self, ended: Tensor, returns: Array) -> list[tuple[float, ...]]:
        """Return the `match` of each episode that ended."""
        if self.seats is None:
            return [()] * len(returns)
        member = self._ended_member.flatten()[ended].cpu().numpy()
        side = self._ended_side.flatten()[ended].cpu().numpy()
        scores = score(returns, np.array([part.size for part in self.parts]), side)
        rows = zip(member.tolist(), side.tolist(), scores.tolist(), strict=True)
        return [() if row[0] == LATEST else row for row in rows]

    def _check_finite(self, fragment: Fragment, part: Agents) -> None:
        """Raise EnvError for NaN or infinity in a full fragment of a part's rows."""
        final_obs, final_step, final_row = fragment.finals()
        obs, final_obs = plain(fragment.obs), plain(final_obs)
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
