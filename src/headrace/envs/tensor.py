"""Environments that step tensors: any `gymnasium.vector.VectorEnv` whose arrays are torch's.

`reset(seed=...)` gives `(obs, info)`, and `step(actions)` gives `(obs, reward, terminated,
truncated, info)`, tensors `[n, ...]` on one device. Where an episode ended, the next one has begun
(Gymnasium's autoreset mode SAME_STEP), and `info["final_obs"]` has the true next observations,
`[n, ...]`, of which those rows are looked at. Nothing here makes the host wait for the device.

Left out: the state of an episode under way, which such an environment does not give: after a resume
every environment begins a new one.
"""

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import GUARDS, Episode, Guards, Restored, env_error
from headrace.envs.ended import check_finite, ended_episodes
from headrace.errors import EnvError, UsageError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Array, EnvSpec


class TensorVector:
    """A `VectorEnv` over an environment that steps tensors; see there for the contract.

    Args:
        env: already made, for `n` environments; it is closed with this.
        spec: what each of them offers.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed, from which it gets one.
        meter: told of step times.
        device: where its tensors are.
        role: `env` for training, `eval` for evaluation.
        sampler: named in errors.
        guards: whether to check for NaN and infinity.
        last_episodes: `finish` gives so many of those that ended, the last ones; 0: all.

    Attributes:
        num_ended: how many episodes ended in the last fragment.
    """

    def __init__(
        self,
        env: Any,
        spec: EnvSpec,
        env_id: Array,
        seed: int,
        meter: Meter,
        device: torch.device,
        *,
        role: str = "env",
        sampler: str = "inline",
        guards: Guards = GUARDS,
        last_episodes: int = 0,
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP and mode != AutoresetMode.SAME_STEP.value:
            raise UsageError(
                f"{spec.id} steps tensors, with autoreset_mode {mode} in its metadata: expected "
                f"{AutoresetMode.SAME_STEP}: an episode that ends makes room for the next one in "
                'the same step, and info["final_obs"] has its last observation.'
            )
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = self.num_ended = 0
        self.step_s = 0.0
        self._env, self._device, self._meter = env, device, meter
        self._seed, self._sampler, self._guards = derive(seed, role), sampler, guards
        self._last_episodes = last_episodes
        self._codec = _Codec(spec, device)
        self._current: Tensor | None = None
        n = len(env_id)
        self._so_far = torch.zeros(n, dtype=torch.float64, device=device)
        self._length = torch.zeros(n, dtype=torch.int32, device=device)
        self._fragment: Fragment | None = None
        self._bound_at = 0.0

    def bind(self, *fragments: Fragment) -> None:
        """Write into the only fragment; the very first time this resets all envs."""
        (fragment,) = fragments
        if fragment is not self._fragment:
            self._make_room(fragment)
        if self._current is None:
            self._current = self._reset()
        fragment.obs[0].copy_(self._current)  # type: ignore[index]
        fragment.valid.fill_(True)
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        """Step all envs."""
        fragment, (num_steps, n) = self._fragment, self._ended.shape
        assert fragment is not None
        try:
            result = self._env.step(self._codec.to_env(fragment.action[t]))
            obs, reward, terminated, truncated, info = result
            final = info.get("final_obs", obs)
        except (Exception, SystemExit) as error:
            raise env_error(error, self._where(t)) from error
        self._check_shape(t, obs)
        fragment.obs[t + 1].copy_(obs)  # type: ignore[index]
        for column, of in (
            (fragment.reward, reward),
            (fragment.terminated, terminated),
            (fragment.truncated, truncated),
        ):
            column[t].copy_(of)
        cut = fragment.truncated[t] & ~fragment.terminated[t]
        place = slice(t * n, (t + 1) * n)
        fragment.final_obs[place].copy_(final)  # type: ignore[index]
        fragment.final_step[place] = torch.where(cut, t, num_steps)
        ended = fragment.truncated[t] | fragment.terminated[t]
        self._so_far += fragment.reward[t]
        self._length += 1
        self._total[t].copy_(self._so_far)
        self._ended[t].copy_(self._length * ended)
        self._so_far.masked_fill_(ended, 0.0)
        self._length.masked_fill_(ended, 0)
        self._meter.lap("env_step")

    def finish(self) -> list[Episode]:
        """The episodes that ended; raises EnvError if an env gave NaN or infinity."""
        fragment = self._fragment
        assert fragment is not None
        self.step_s = (time.monotonic() - self._bound_at) / self._ended.numel()
        if self._guards.enabled:
            check_finite(fragment, self.env_id, self.spec, self._sampler)
        self._current = fragment.obs[-1].clone()  # type: ignore[index]
        episodes, self.num_ended = ended_episodes(
            self._ended, self._total.unsqueeze(-1), self.env_id, [1], self._last_episodes
        )
        return episodes

    def finals_per_row(self, num_steps: int) -> int:
        """How many final observations of each row there is a place for."""
        return num_steps

    def tensors(self) -> list[Tensor]:
        """All that is known to change from one fragment to the next."""
        return [self._so_far, self._length]

    def state(self) -> dict[str, Array]:
        """Counts only: see the file's first lines."""
        return {"episode": np.zeros(len(self.env_id), np.int64)}

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`."""
        assert self._current is not None
        return {"obs.": self._current.cpu().numpy()}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Nothing can be brought back: new episodes."""
        return self.start_after(1)

    def start_after(self, num_steps: int) -> Restored:
        """Begin other episodes than those that began the run."""
        self._seed = derive(self._seed, "env", num_steps)
        return Restored(new_episode=len(self.env_id))

    def close(self) -> None:
        """Close the environment."""
        try:
            self._env.close()
        except Exception as error:
            raise env_error(error, f"while closing {self.spec.id}") from error

    def _reset(self) -> Tensor:
        try:
            obs, _ = self._env.reset(seed=self._seed)
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset of {self.spec.id}") from error
        self._check_shape(-1, obs)
        self._meter.lap("env_reset")
        return obs  # type: ignore[no-any-return]

    def _make_room(self, fragment: Fragment) -> None:
        """What stays as it is as long as this fragment is bound."""
        shape = fragment.reward.shape
        fragment.env_id.copy_(torch.from_numpy(self.env_id))
        fragment.final_row.view(shape).copy_(torch.arange(shape[1], device=self._device))
        fragment.num_final.fill_(len(fragment.final_row))
        self._total = torch.zeros(shape, dtype=torch.float64, device=self._device)
        self._ended = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._fragment = fragment

    def _check_shape(self, t: int, obs: Any) -> None:
        """What would be broadcast, or come from another device."""
        expected = (len(self.env_id), *self.spec.observation.shape)
        if not isinstance(obs, Tensor) or obs.shape != expected or obs.device != self._device:
            given = (
                f"{tuple(obs.shape)} on {obs.device}"
                if isinstance(obs, Tensor)
                else type(obs).__name__
            )
            raise EnvError(
                f"The environment gave an observation of {given}; expected a tensor of {expected} "
                f"on {self._device} ({self._where(t)})."
            )

    def _where(self, t: int) -> str:
        when = "in reset" if t < 0 else f"in step {t + 1} of the fragment"
        return f"{when} of {self.spec.id}, sampler {self._sampler}"


class _Codec:
    """`spec.ActionCodec`, of tensors."""

    def __init__(self, spec: EnvSpec, device: torch.device) -> None:
        codec = ActionCodec(spec.action)
        self._space = spec.action
        self._scale, self._shift, self._low, self._high = (
            torch.as_tensor(of, device=device)
            for of in (codec.scale, codec.shift, codec.low, codec.high)
        )

    def to_env(self, action: Tensor) -> Tensor:
        """Map `[n, ...]` policy actions to environment actions."""
        if self._space.kind == "box":
            scaled = action.to(self._scale.dtype) * self._scale + self._shift
            clipped = torch.clamp(scaled, self._low, self._high)
            return clipped.reshape(-1, *self._space.shape)
        return action + (self._shift[0] if self._space.kind == "discrete" else self._shift)
