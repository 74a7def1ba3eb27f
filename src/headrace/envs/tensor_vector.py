"""Environments that step tensors: any `gymnasium.vector.VectorEnv` whose arrays are torch's.

`reset(seed=...)` gives `(obs, info)`, and `step(actions)` gives `(obs, reward, terminated,
truncated, info)`, tensors `[n, ...]` on one device. Where an episode ended, the next one has begun
(Gymnasium's autoreset mode SAME_STEP), and `info["final_obs"]` has the true next observations,
`[n, ...]`, of which those rows are looked at. No step makes the host wait for the device. After a
resume every environment begins a new episode.
"""

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import Episode, Restored, VectorContext, close_all, env_error, explain_errors
from headrace.envs.episodes import DeviceVector
from headrace.errors import EnvError, UsageError
from headrace.spec import ActionCodec, Array


class TensorVector(DeviceVector):
    """A `VectorEnv` over an environment that steps tensors on `device`, and which it closes.

    Raises:
        UsageError: its autoreset mode is not SAME_STEP.
    """

    def __init__(self, env: Any, context: VectorContext, device: torch.device) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            raise UsageError(
                f"{context.spec.id} steps tensors, with autoreset_mode {mode} in its metadata: "
                f"expected {AutoresetMode.SAME_STEP}: an episode that ends makes room for the next "
                'one in the same step, and info["final_obs"] has its last observation.'
            )
        self._return = torch.zeros(len(context.env_id), dtype=torch.float64, device=device)
        self._length = torch.zeros_like(self._return, dtype=torch.int32)
        super().__init__(context, self._return.device)  # with its index
        self._env, codec = env, ActionCodec(context.spec.action)
        self._scale, self._shift, self._low, self._high = (
            torch.as_tensor(array, device=device)
            for array in (codec.scale, codec.shift, codec.low, codec.high)
        )
        space = context.spec.observation
        self._checks_choices = bool(space.nvec) and context.guards.enabled
        if self._checks_choices:
            self._first = torch.tensor(space.start, device=device).view(space.shape)
            self._end = self._first + torch.tensor(space.nvec, device=device).view(space.shape)
        self._episode = 0
        self._current: Tensor | None = None
        self._fragment: Fragment | None = None
        self._without_final: list[int] = []

    def bind(self, *fragments: Fragment) -> None:
        (fragment,) = fragments
        if fragment is not self._fragment:
            self._write_env_id(fragment, 0)
            self._allocate_ended(fragment.num_steps)
            self._no_choice = torch.zeros_like(fragment.terminated)  # [T, n]
            self._fragment = fragment
        if self._current is None:
            self._current = self._reset()
        fragment.obs[0].copy_(self._current)  # type: ignore[index]
        fragment.valid.fill_(True)
        shape = fragment.reward.shape
        fragment.final_row.view(shape).copy_(torch.arange(shape[1], device=self.device))
        self._without_final = []
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        fragment, (num_steps, n) = self._fragment, self.ended_length.shape
        assert fragment is not None
        try:
            result = self._env.step(self._to_env(fragment.action[t]))
            obs, reward, terminated, truncated, info = result
            final = info.get("final_obs")
        except (Exception, SystemExit) as error:
            raise env_error(error, self._describe(t)) from error
        self._take(t, "an observation", fragment.obs[t + 1], obs)  # type: ignore[index]
        if self._checks_choices:
            self._no_choice[t] = self._replace_no_choices(fragment.obs[t + 1])  # type: ignore[index]
        self._take(t, "a reward", fragment.reward[t], reward)
        self._take(t, "terminated", fragment.terminated[t], terminated)
        self._take(t, "truncated", fragment.truncated[t], truncated)
        place = slice(t * n, (t + 1) * n)
        if final is None:
            self._without_final.append(t)
        else:
            self._take(t, "a final observation", fragment.final_obs[place], final)  # type: ignore[index]
        cut = fragment.truncated[t] & ~fragment.terminated[t]
        fragment.final_step[place] = torch.where(cut, t, num_steps)
        ended = fragment.truncated[t] | fragment.terminated[t]
        self._return += fragment.reward[t]
        self._length += 1
        self.ended_return[t, :, 0].copy_(self._return)
        self.ended_length[t].copy_(self._length * ended)
        self._return.masked_fill_(ended, 0.0)
        self._length.masked_fill_(ended, 0)
        self.context.meter.lap("env_step")

    def finish(self) -> list[Episode]:
        fragment = self._fragment
        assert fragment is not None
        self._pack_finals(fragment)
        if self._checks_choices:
            self._check_choices(fragment)
        if self.context.guards.enabled:
            self._check_finite(fragment, self.parts[0])
        self._current = fragment.obs[-1].clone()  # type: ignore[index]
        return self._ended_episodes()

    def tensors(self) -> list[Tensor]:
        return [self._return, self._length]

    def state(self) -> dict[str, Array]:
        return {"episode": np.full(len(self.env_id), self._episode)}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Begin new episodes: the unfinished ones cannot be brought back."""
        return self.start_after(state["episode"] + 1)

    def start_after(self, episode: int | Array) -> Restored:
        self._episode = int(np.max(episode))
        return Restored(new_episode=len(self.env_id))

    def close(self) -> None:
        close_all([self._env], lambda _: self.context.describe_all())

    def _reset(self) -> Tensor:
        seed = self.context.episode_seed(0, self._episode)
        with explain_errors(lambda: self._describe(-1)):
            obs, _ = self._env.reset(seed=seed)
        space = self.spec.observation
        shape, dtype = (len(self.env_id), *space.shape), getattr(torch, space.dtype)
        current = torch.empty(shape, dtype=dtype, device=self.device)
        self._take(-1, "an observation", current, obs)
        if self._checks_choices and bool(self._replace_no_choices(current).any()):
            raise self._no_choice_error("an observation", -1)
        self.context.meter.lap("env_reset")
        return current

    def _pack_finals(self, fragment: Fragment) -> None:
        # Here the host waits for the device
        step = fragment.final_step.view(fragment.reward.shape)
        for t in self._without_final:
            if bool((step[t] == t).any()):
                raise EnvError(
                    f'The environment truncated an episode without an info["final_obs"], its true '
                    f"last observation ({self._describe(t)})."
                )
        needed = (fragment.final_step < fragment.num_steps).nonzero().squeeze(-1)
        for column in (fragment.final_obs, fragment.final_row, fragment.final_step):
            column[: len(needed)] = column[needed]  # type: ignore[index]
        fragment.num_final.fill_(len(needed))

    def _replace_no_choices(self, obs: Tensor) -> Tensor:
        """Replace what is no choice of the space, on which no policy can act; return where, `[n]`.

        The host does not wait for the device.
        """
        bad = (obs < self._first) | (obs >= self._end)
        obs.copy_(torch.where(bad, self._first.to(obs.dtype), obs))
        return bad.flatten(1).any(-1) if bad.dim() > 1 else bad

    def _check_choices(self, fragment: Fragment) -> None:
        """Raise EnvError if an observation of a full fragment was no choice of the space."""
        if bool(self._no_choice.any()):
            raise self._no_choice_error("an observation", int(self._no_choice.nonzero()[0, 0]))
        count = int(fragment.num_final)
        bad = self._replace_no_choices(fragment.final_obs[:count])  # type: ignore[index]
        if bool(bad.any()):
            step = int(fragment.final_step[:count][bad].min())
            raise self._no_choice_error("a final observation", step)

    def _no_choice_error(self, what: str, t: int) -> EnvError:
        return EnvError(
            f"The environment gave {what} that is not in its space, "
            f"{self.spec.observation.describe()} ({self._describe(t)})."
        )

    def _take(self, t: int, what: str, to: Tensor, value: Any) -> None:
        """Copy a value; EnvError if that would broadcast, round, or change the device."""
        if (
            not isinstance(value, Tensor)
            or value.shape != to.shape
            or value.device != self.device
            or not torch.can_cast(value.dtype, to.dtype)
        ):
            kind = (
                f"a tensor of {tuple(value.shape)} {value.dtype} on {value.device}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise EnvError(
                f"The environment gave {what} as {kind}; expected a tensor of {tuple(to.shape)} "
                f"{to.dtype} on {self.device} ({self._describe(t)})."
            )
        to.copy_(value)

    def _describe(self, t: int) -> str:
        when = "in reset" if t < 0 else f"in step {t + 1} of the fragment"
        return f"{when}, {self.context.describe_all()}"

    def _to_env(self, action: Tensor) -> Tensor:
        """Do as `ActionCodec.to_env`, on the device."""
        space = self.spec.action
        if space.kind == "box":
            scaled = action.to(self._scale.dtype) * self._scale + self._shift
            return scaled.clamp(self._low, self._high).reshape(-1, *space.shape)
        choices = action.reshape(-1, *space.shape) + self._shift.reshape(space.shape)
        return choices.to(getattr(torch, space.dtype))
