"""A replay buffer of sequences, for policies with a recurrent core.

Left out: what is learned from a sequence (`algos/action_values/recurrent_dqn.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.errors import ConfigError
from headrace.replay.buffer import ReplayBuffer, Rows
from headrace.spec import EnvSpec


class SequenceBuffer(ReplayBuffer):
    """A replay buffer whose draws are first rows of sequences.

    A sequence begins where a batch began, since the state before that row is known: it is stored,
    as in R2D2 (Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX). It goes on
    over ends of episodes, where the state is zeroed. The next one begins at least half a `length`
    later.

    Args:
        state_size: S, numbers of the recurrent state of an environment.
        burn_in: rows that only make the state.
        length: rows after these, which are learned from.
        n_step: env steps whose rewards a target sums.
        options: of the buffer.

    Raises:
        ConfigError: it is too small for sequences.
    """

    is_step: Tensor
    place: Tensor
    state: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        size: int,
        num_envs: int,
        ranks: Ranks = SINGLE_RANK,
        *,
        state_size: int,
        burn_in: int,
        length: int,
        n_step: int,
        **options: Any,
    ) -> None:
        super().__init__(spec, size, num_envs, ranks, **options)
        self._burn_in, self._length, self._n_step = burn_in, length, n_step
        self._num_rows = burn_in + length + n_step + self.older
        self._apart = max(1, length // 2)
        if self.capacity < 2 * self._num_rows:  # else none may be whole before it is overwritten
            least = 2 * self._num_rows * num_envs * ranks.size
            raise ConfigError(
                f"replay_size={size}: {self.capacity} rows of each of {num_envs * ranks.size} "
                f"environments; expected twice those of a sequence, 2 * {self._num_rows} (burn_in="
                f"{burn_in}, sequence_length={length}, n_step={n_step}).\n"
                f"Use --replay-size {least} or more, or shorter sequences."
            )
        rows = (self.capacity, num_envs)
        self.register_buffer("is_step", torch.zeros(rows, dtype=torch.bool))
        self.register_buffer("place", torch.zeros(rows, dtype=torch.int32))
        num_states = self.capacity // self._apart + 2
        self.register_buffer("state", torch.zeros((num_states, num_envs, state_size)))
        self.columns |= {"is_step", "place"}
        if self.unsaved:
            self.unsaved |= {"is_step", "place", "state"}

    def left(self) -> Tensor:
        """Return the number of sequences of each environment of all ranks that are complete."""
        latest = self.num_starts - 1 - torch.arange(self._num_rows, device=self.end.device)[:, None]
        env = torch.arange(self.num_envs, device=self.end.device)
        first = self.starts[latest % self.capacity, env]
        too_new = (first + self._num_rows > self.end + 1) & (latest >= self.num_gone)
        left = self.num_starts - self.num_gone - too_new.sum(0)
        return self._ranks.gather(left).flatten()

    def _insert(self, batch: Fragment, env: Tensor) -> None:
        place = self.num_starts[env]
        super()._insert(batch, env)
        is_new = self.num_starts[env] > place
        at = (place % len(self.state))[is_new], env[is_new]
        self.state[at] = batch.recurrent_state[0][is_new]

    def _list(
        self, env: Tensor, number: Tensor, valid: Tensor, before: Tensor, end: Tensor
    ) -> None:
        written = before + torch.arange(int((end - before).max()) + 1, device=env.device)[:, None]
        at = torch.minimum(written, end) % self.capacity, env.expand_as(written)
        self.is_step[at] = False
        self.is_step[number % self.capacity, env.expand_as(number)] = valid
        count, first = self.num_starts[env], number[0]
        last = self.starts[(count - 1) % self.capacity, env]
        begins = torch.zeros_like(valid)
        begins[0] = (count == self.num_gone[env]) | (first - last >= self._apart)
        self.place[first % self.capacity, env] = count.int()
        super()._list(env, number, begins, before, end)

    @torch.no_grad()
    def sequences(self, first: Rows, gamma: float, scaled: Callable[[Tensor], Tensor]) -> Minibatch:
        """Return sequences, time-major.

        Args:
            first: rows `[B]` that were drawn.
            scaled: clips and normalizes rewards.

        Returns:
            `obs` `[burn_in + length + more, B, ...]`, with `reset`, and `state` `[B, S]` before the
            first row (see `Policy.forward`). Of the `length` rows after the burn-in, `[length, B]`:
            `action`, `reward` and `discount` (see `ReplayBuffer.returns`), `next_row`, the row of
            `obs`, without the burn-in, that they lead to, and `is_step`: rows that are no steps do
            not count.
        """
        step = torch.arange(self._num_rows, device=first.env.device).unsqueeze(1)
        number, env = first.number + step, first.env.expand(self._num_rows, -1)
        at = number % self.capacity, env
        # The state goes on over a truncated step to its last observation, which is no step.
        ends = self.terminated[at] | ~self.is_step[at]
        learned = slice(self._burn_in, self._burn_in + self._length)
        slot = first.slot.expand_as(env)
        rows = Rows(number[learned], env[learned], slot[learned])
        reward, discount, following = self.returns(rows, self._n_step, gamma, scaled)
        place = self.place[at[0][0], first.env].long()
        return {
            "obs": self.observations(number, env),
            "reset": torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]),
            "state": self.state[place % len(self.state), first.env],
            "action": self.action[at[0][learned], env[learned]],
            "reward": reward,
            "discount": discount,
            "next_row": following - number[self._burn_in],
            "is_step": self.is_step[at[0][learned], env[learned]],
        }
