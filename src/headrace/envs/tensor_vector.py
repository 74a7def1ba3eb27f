"""Environments that step tensors: any `gymnasium.vector.VectorEnv` whose arrays are torch's.

`reset(seed=...)` gives `(obs, info)`, and `step(actions)` gives `(obs, reward, terminated,
truncated, info)`, tensors `[n, ...]` on one device. Where an episode ended, the next one has begun
(Gymnasium's autoreset mode SAME_STEP), and `info["final_obs"]` has the true next observations,
`[n, ...]`, of which those rows are looked at. No step makes the host wait for the device.

Left out: the state of an episode under way, which such an environment does not give: after a resume
every environment begins a new one. And CUDA graphs: what a step leaves in Python's hands, a graph
does not do again.
"""

import time
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import GUARDS, Episode, Guards, Restored, env_error
from headrace.envs.episodes import check_finite, ended_episodes
from headrace.errors import EnvError, UsageError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Agents, Array, EnvSpec


class TensorVector:
    """A `VectorEnv` over an environment that steps tensors; see there for the contract.

    Args:
        env: already made, for `n` environments; it is closed with this.
        spec: what each of them offers.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed, from which it gets one, by the first env's index.
        meter: told of step times.
        device: where its tensors are.
        role: `env` for training, `eval` for evaluation.
        sampler: named in errors.
        guards: whether to check what it gives.
        last_episodes: `finish` gives so many of those that ended, the last ones; 0: all.

    Attributes:
        num_ended: how many episodes ended in the last fragment.
    """

    can_be_recorded = False

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
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            raise UsageError(
                f"{spec.id} steps tensors, with autoreset_mode {mode} in its metadata: expected "
                f"{AutoresetMode.SAME_STEP}: an episode that ends makes room for the next one in "
                'the same step, and info["final_obs"] has its last observation.'
            )
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = self.num_ended = 0
        self.step_s = 0.0
        self._env, self._meter = env, meter
        self._seed, self._role, self._sampler, self._guards = seed, role, sampler, guards
        self._last_episodes = last_episodes
        self._codec = _Codec(spec, device)
        # How often all episodes were begun anew
        self._begun = 0
        self._current: Tensor | None = None
        n = len(env_id)
        self._so_far = torch.zeros(n, dtype=torch.float64, device=device)
        self._length = torch.zeros(n, dtype=torch.int32, device=device)
        self._device = self._so_far.device  # by its index, too
        self._fragment: Fragment | None = None
        self._without_final: list[int] = []
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
        shape = fragment.reward.shape
        fragment.final_row.view(shape).copy_(torch.arange(shape[1], device=self._device))
        self._without_final = []
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        """Step all envs; raises EnvError."""
        fragment, (num_steps, n) = self._fragment, self._ended.shape
        assert fragment is not None
        try:
            result = self._env.step(self._codec.to_env(fragment.action[t]))
            obs, reward, terminated, truncated, info = result
            final = info.get("final_obs")
        except (Exception, SystemExit) as error:
            raise env_error(error, self._where(t)) from error
        self._take_obs(t, "an observation", fragment.obs[t + 1], obs)  # type: ignore[index]
        self._take(t, "a reward", fragment.reward[t], reward)
        self._take(t, "terminated", fragment.terminated[t], terminated)
        self._take(t, "truncated", fragment.truncated[t], truncated)
        place = slice(t * n, (t + 1) * n)
        if final is None:
            self._without_final.append(t)
        else:
            self._take_obs(t, "a final observation", fragment.final_obs[place], final)  # type: ignore[index]
        cut = fragment.truncated[t] & ~fragment.terminated[t]
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
        self._pack_finals(fragment)
        if self._guards.enabled:
            check_finite(fragment, self.env_id, Agents(0, 1), self.spec, self._sampler)
        self._current = fragment.obs[-1].clone()  # type: ignore[index]
        episodes, self.num_ended = ended_episodes(
            self._ended, self._total.unsqueeze(-1), self.env_id, [1], self._last_episodes
        )
        return episodes

    def finals_per_row(self, num_steps: int) -> int:
        """How many final observations of each row there is a place for."""
        return num_steps

    def tensors(self) -> list[Tensor]:
        """Of what changes, that which can be changed back: not the environment."""
        return [self._so_far, self._length]

    def state(self) -> dict[str, Array]:
        """Counts only: see the file's first lines."""
        return {"episode": np.full(len(self.env_id), self._begun)}

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`: nothing goes on from there."""
        return {}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Nothing can be brought back: new episodes."""
        return self.start_after(int(state["episode"][0]) + 1)

    def start_after(self, num_steps: int) -> Restored:
        """Begin other episodes than any run of so many steps did."""
        self._begun = num_steps
        return Restored(new_episode=len(self.env_id))

    def close(self) -> None:
        """Close the environment."""
        try:
            self._env.close()
        except Exception as error:
            raise env_error(error, f"while closing {self.spec.id}") from error

    def _reset(self) -> Tensor:
        seed = derive(self._seed, self._role, int(self.env_id[0]), self._begun)
        try:
            obs, _ = self._env.reset(seed=seed)
        except (Exception, SystemExit) as error:
            raise env_error(error, self._where(-1)) from error
        space = self.spec.observation
        shape, dtype = (len(self.env_id), *space.shape), getattr(torch, space.dtype)
        current = torch.empty(shape, dtype=dtype, device=self._device)
        self._take_obs(-1, "an observation", current, obs)
        self._meter.lap("env_reset")
        return current

    def _make_room(self, fragment: Fragment) -> None:
        """For the accounts of a fragment of this shape."""
        fragment.env_id.copy_(torch.from_numpy(self.env_id))
        shape = fragment.reward.shape
        self._total = torch.zeros(shape, dtype=torch.float64, device=self._device)
        self._ended = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._fragment = fragment

    def _pack_finals(self, fragment: Fragment) -> None:
        """Leave the final observations that are needed: from here on the host knows how many."""
        step = fragment.final_step.view(fragment.reward.shape)
        for t in self._without_final:
            if bool((step[t] == t).any()):
                raise EnvError(
                    f'The environment truncated an episode without an info["final_obs"], its true '
                    f"last observation ({self._where(t)})."
                )
        needed = (fragment.final_step < fragment.num_steps).nonzero().squeeze(-1)
        for column in (fragment.final_obs, fragment.final_row, fragment.final_step):
            column[: len(needed)] = column[needed]  # type: ignore[index]
        fragment.num_final.fill_(len(needed))

    def _take_obs(self, t: int, what: str, to: Tensor, given: Any) -> None:
        """Copy observations, where the space has them."""
        self._take(t, what, to, given)
        space = self.spec.observation
        if space.nvec and self._guards.enabled and not to.is_cuda:  # there it would wait for it
            least = torch.tensor(space.start).view(space.shape)
            end = least + torch.tensor(space.nvec).view(space.shape)
            if bool(((to < least) | (to >= end)).any()):
                raise EnvError(
                    f"The environment gave {what} that is not in its space, {space.describe()} "
                    f"({self._where(t)})."
                )

    def _take(self, t: int, what: str, to: Tensor, given: Any) -> None:
        """Copy what was given, unless it would be broadcast, rounded, or come from elsewhere."""
        if (
            not isinstance(given, Tensor)
            or given.shape != to.shape
            or given.device != self._device
            or not torch.can_cast(given.dtype, to.dtype)
        ):
            told = (
                f"a tensor of {tuple(given.shape)} {given.dtype} on {given.device}"
                if isinstance(given, Tensor)
                else f"a {type(given).__name__}"
            )
            raise EnvError(
                f"The environment gave {what} as {told}; expected a tensor of {tuple(to.shape)} "
                f"{to.dtype} on {self._device} ({self._where(t)})."
            )
        to.copy_(given)

    def _where(self, t: int) -> str:
        when = "in reset" if t < 0 else f"in step {t + 1} of the fragment"
        first, last = self.env_id[[0, -1]]
        return f"{when}, envs {first} to {last} of {self.spec.id}, sampler {self._sampler}"


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
