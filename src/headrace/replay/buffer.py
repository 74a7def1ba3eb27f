"""The replay buffer: the newest transitions of each environment, and which of them are drawn.

Left out: how many gradient steps follow, and what is learned (`algos/`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from headrace.batch import Fragment, Minibatch, Obs, columns, each, one_of_each
from headrace.device_seeding import replay_draws
from headrace.distributed.of_envs import OfEnvs
from headrace.distributed.ranks import SINGLE_RANK, Ranks
from headrace.replay import hindsight
from headrace.replay.frames import continues, side_by_side
from headrace.replay.hindsight import Episodes, GoalReward
from headrace.replay.memory import check_room, frames_in, obs_bytes, zeros_in_file
from headrace.replay.priorities import Priorities, own_rows
from headrace.spec import EnvSpec

_LEAST_PRIORITY = 1e-9  # of a row whose error is not finite


@dataclass(frozen=True)
class Rows:
    """Rows of the buffer, `[B]`.

    Attributes:
        number: since the start of the run.
        env: among those of this rank.
        slot: place in the batch of all ranks that the row was drawn for.
    """

    number: Tensor
    env: Tensor
    slot: Tensor

    def split(self, sizes: list[int]) -> Iterator["Rows"]:
        """Cut the rows into pieces of these sizes."""
        pieces = (torch.split_with_sizes(column, sizes) for column in vars(self).values())
        return map(Rows, *pieces)


class ReplayBuffer(OfEnvs):
    """A ring of rows for each environment of a rank.

    A row is an observation, the action that it led to, the reward, and whether the episode ended.
    The next observation is that of the next row, so that each is stored once. Where an episode was
    cut off, its true last observation has a row of its own, which is no transition. Of stacked
    frames a row has the newest one, and the rows before it have the others. Where an episode
    begins, the older frames have rows of their own as well. If a stack does not continue the one
    before, the episode ends there. All is in buffers of the module, so that a checkpoint has it.

    Args:
        spec: of the environments.
        size: rows to keep, of all environments of all ranks together.
        num_envs: of this rank.
        ranks: each has the rows of its own environments, and learns from those of its own that a
            draw among all rows gives. So N ranks learn what one does.
        prioritized: keep priorities, by which rows can be drawn.
        hindsight: share of drawn transitions whose goal is replaced.
        directory: of the file that holds the observations; "": memory holds them.
        is_saved: whether checkpoints have the rows.
        refill: env steps that a run which is resumed without its rows collects before it learns.

    Attributes:
        obs_bytes: bytes of an observation, with all its frames.
        goal_reward: of the environment; needed with `hindsight`.
        newest_version: of the weights, when the newest batch was stored; -1: none was.
        env_steps_of_refills: env steps of the run that were only stored.

    Raises:
        ConfigError: the directory cannot be written, or its disk has not enough room; or, while
            rows are inserted, a batch has more than the buffer keeps.
    """

    reward: Tensor
    action: Tensor
    terminated: Tensor
    truncated: Tensor
    end: Tensor
    starts: Tensor
    num_starts: Tensor
    num_gone: Tensor
    only_frame: Tensor
    refilled: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        size: int,
        num_envs: int,
        ranks: Ranks = SINGLE_RANK,
        *,
        prioritized: bool = False,
        hindsight: float = 0.0,
        directory: str = "",
        is_saved: bool = True,
        refill: int = 0,
    ) -> None:
        super().__init__()
        self.num_envs, self._ranks = num_envs, ranks
        # More than the transitions: the row where the next one begins, and its older frames
        self.older = frames_in(spec) - 1
        self.capacity = -(-size // (num_envs * ranks.size)) + 1 + self.older
        self.obs_bytes = obs_bytes(spec)
        layout = columns(spec, {}, self.capacity, num_envs)
        self._obs_names = dict[str, str]()
        for column in (name for name in layout if name.startswith("obs")):
            name = f"obs{len(self._obs_names)}"
            self._obs_names[column.removeprefix("obs").removeprefix(".")] = name
            shape, dtype = layout[column]
            of_row = shape[3:] if self.older else shape[2:]
            zeros = partial(zeros_in_file, directory) if directory else torch.zeros
            self.register_buffer(name, zeros((self.capacity, num_envs, *of_row), dtype=dtype))
        for name in ("action", "reward", "terminated", "truncated"):
            shape, dtype = layout[name]
            self.register_buffer(name, torch.zeros(shape, dtype=dtype))
        if self.older:  # the rows with an older frame alone
            self.register_buffer("only_frame", torch.zeros_like(self.truncated))
        # The number of each environment's next row, at which its observation is already stored.
        self.register_buffer("end", torch.zeros(num_envs, dtype=torch.int64))
        # The numbers of the rows that are transitions, in order, and how many there were, and how
        # many of those are overwritten. One place more, for what is not kept.
        starts = torch.zeros((self.capacity + 1, num_envs), dtype=torch.int64)
        self.register_buffer("starts", starts)
        self.register_buffer("num_starts", torch.zeros(num_envs, dtype=torch.int64))
        self.register_buffer("num_gone", torch.zeros(num_envs, dtype=torch.int64))
        self.priorities = Priorities(num_envs, self.capacity, ranks) if prioritized else None
        self.episodes = Episodes(num_envs, self.capacity) if hindsight else None
        self._hindsight = hindsight
        self.goal_reward: GoalReward | None = None

        flags = {"only_frame"} if self.older else set()
        written_once = {"action", "reward", "terminated", *self._obs_names.values(), *flags}
        self.columns = frozenset(written_once)  # a later row may still truncate the one before
        self._saved_end = self._new_end = self.end.clone()
        self.unsaved = frozenset(() if is_saved else self.state_dict())  # but for the next one
        # Env steps of the whole run that were only stored, of all ranks
        self.register_buffer("refilled", torch.zeros((), dtype=torch.int64))
        self.env_steps_of_refills = 0  # the same, without waiting for a device
        self._refill, self.newest_version = refill, -1
        # How many env steps are still to be stored without learning; whether the newest batch is
        # among them (1 or 0); that batch's version
        self._refilling = torch.tensor([0, 0, -1])

    def begin_again(self) -> None:
        self.env_steps_of_refills = int(self.refilled)
        self._refilling[0] = self._refill

    def shared(self) -> dict[str, Tensor]:
        found = {"refilling": self._refilling}
        if self.priorities is not None:
            found["greatest"] = self.priorities.greatest
        return found

    def taken_over(self) -> None:
        self.env_steps_of_refills = int(self.refilled)

    @property
    def is_refilling(self) -> bool:
        """Whether the newest batch is only stored, since a resumed run lost its rows."""
        return bool(self._refilling[1])

    def count_env_steps(self, env_steps: int, new_env_steps: int, version: int) -> None:
        """Count the env steps of a new batch, of all ranks, once. It sets `is_refilling`.

        Args:
            env_steps: of the run before these.
            version: of the weights.
        """
        left, _, counted = self._refilling.tolist()
        if counted == version:
            return
        had = env_steps - self.env_steps_of_refills  # the same as long as it refills
        left = min(left, had)
        self._refilling.copy_(torch.tensor([max(0, left - new_env_steps), left > 0, version]))
        if self.is_refilling:
            self.env_steps_of_refills += new_env_steps
            self.refilled.fill_(self.env_steps_of_refills)

    def env_axis(self, name: str) -> int | None:
        if name.endswith("greatest") or name == "refilled":
            return None
        return 0 if name.startswith(("end", "num_", "priorities.")) else 1

    @torch.no_grad()
    def insert(self, batch: Fragment) -> None:
        """Append a batch `[T, n]`; an environment may be in it several times, or not at all."""
        env = batch.env_id % self.num_envs
        for part in one_of_each(env):
            is_all = len(part) == batch.num_envs
            self._insert(batch if is_all else batch.take(part), env[part])

    def _insert(self, batch: Fragment, env: Tensor) -> None:
        device = env.device
        final_obs, last_step, column = batch.finals()
        used = (last_step < batch.num_steps).nonzero().squeeze(-1)
        last_obs = each(lambda o: o[used], final_obs)
        last_step, column = last_step[used], column[used]
        before = self.end[env]
        lost = self._close(env, each(itemgetter(0), batch.obs), batch.valid[0])
        # Whether a stack of frames does not continue the one before
        is_new = torch.zeros((batch.num_steps + 1, len(env)), dtype=torch.bool, device=device)
        last_is_new = torch.zeros_like(column, dtype=torch.bool)
        if self.older:
            obs, last = _frames(batch.obs), _frames(last_obs)
            is_new[0] = lost | (before == 0)
            is_new[1:] = ~continues(obs[1:], obs[:-1], 2)
            last_is_new = ~continues(last, obs[last_step, column], 1)
        # Rows that are no steps: those of older frames, and that of an episode's last observation
        extra = self.older * is_new.long()
        extra[last_step + 1, column] += 1 + self.older * last_is_new
        step = torch.arange(batch.num_steps + 1, device=device).unsqueeze(1)
        number = before + lost + step + extra.cumsum(0)
        if self.older:  # which take rows that nobody counted
            check_room(int((number[-1] - before).max()), self.capacity - 1 - self.older)
        self._write_obs(batch.obs, number, env, is_new)
        last_at = number[last_step, column] + 1 + self.older * last_is_new
        self._write_obs(last_obs, last_at, env[column], last_is_new)
        number, end = number[:-1], number[-1]
        if self.episodes is not None:
            ended = batch.terminated | batch.truncated
            newest = self.starts[(self.num_starts[env] - 1) % self.capacity, env] % self.capacity
            goes_on = ~ended.roll(1, 0)
            has_ended = self.terminated[newest, env] | self.truncated[newest, env]
            goes_on[0] = (before > 0) & ~has_ended
            self.episodes.add(env, number, goes_on, batch.valid & ~batch.terminated)
        at = number % self.capacity, env.expand_as(number)
        self.action[at], self.reward[at] = batch.action, batch.reward
        self.terminated[at], self.truncated[at] = batch.terminated, batch.truncated | is_new[1:]
        self._list(env, number, batch.valid, before, end)

    def _write_obs(self, obs: Obs, number: Tensor, env: Tensor, is_new: Tensor) -> None:
        """Write observations of rows. Of frames only the newest; where `is_new`, all of them."""
        env = env.expand_as(number)
        at = number % self.capacity, env
        for key, name in self._obs_names.items():
            value, stored = obs[key] if isinstance(obs, dict) else obs, getattr(self, name)
            if not self.older:
                stored[at] = value
                continue
            frames = value.movedim(number.dim(), 0)  # [k, ..., *shape]
            stored[at], self.only_frame[at] = frames[-1], False
            for age, frame in enumerate(frames[:-1].flip(0), start=1):
                older = (number[is_new] - age) % self.capacity, env[is_new]
                stored[older], self.only_frame[older] = frame[is_new], True

    def _close(self, env: Tensor, first_obs: Obs, first_valid: Tensor) -> Tensor:
        """End episodes that do not go on with the first row of a batch: the row before is cut off.

        Where a fragment was lost, that row's next observation is another than the first of the
        batch. Return where that is so. Where the first step failed, it is the same.
        """
        end, before = self.end[env], (self.end[env] - 1) % self.capacity
        goes_on = torch.ones_like(env, dtype=torch.bool)
        stored = self.observations(end, env)
        for key in self._obs_names:
            obs, was = (o[key] if isinstance(o, dict) else o for o in (first_obs, stored))
            goes_on &= (was == obs).flatten(1).all(1) if obs.dim() > 1 else was == obs
        lost, has_failed = (end > 0) & ~goes_on, (end > 0) & ~first_valid
        self.truncated[before, env] |= lost | has_failed
        return lost

    def _list(
        self, env: Tensor, number: Tensor, valid: Tensor, before: Tensor, end: Tensor
    ) -> None:
        """Forget the transitions that were overwritten, and list the new ones in their places."""
        # The oldest row that has all of its frames
        oldest, most = end - self.capacity + 1 + self.older, int((end - before).max())
        candidate = self.num_gone[env] + torch.arange(most, device=env.device).unsqueeze(1)
        is_gone = self.starts[candidate % self.capacity, env] < oldest
        self.num_gone[env] += (is_gone & (candidate < self.num_starts[env])).sum(0)
        is_start = valid.long()
        place = (self.num_starts[env] + is_start.cumsum(0) - is_start) % self.capacity
        self.starts[place.where(valid, self.capacity), env] = number
        self.num_starts[env] += is_start.sum(0)
        self.end[env] = end
        if self.priorities is not None:
            none = most + 1 + self.older  # nor is the next row one, or rows without all frames
            written = before + torch.arange(none, device=env.device).unsqueeze(1)
            written = torch.minimum(written, end + self.older)
            zero = torch.zeros(written.numel(), dtype=torch.float64, device=env.device)
            self.priorities.set(env.expand_as(written).flatten(), self._at(written), zero)
            of, at = env.expand_as(number)[valid], self._at(number[valid])
            self.priorities.set(of, at, self.priorities.greatest.expand_as(at))

    def new_rows(self) -> tuple[dict[str, Tensor], int]:
        end, device = self.end, self.end.device
        self._saved_end = self._saved_end.to(device)
        first = torch.maximum(self._saved_end, end - self.capacity + 1)
        count = end - first + 1  # with the next one, which has an observation
        env = torch.arange(self.num_envs, device=device).repeat_interleave(count)
        skipped = (count.cumsum(0) - count)[env]
        number = first[env] + torch.arange(len(env), device=device) - skipped
        at = number % self.capacity, env
        rows = {name: getattr(self, name)[at].cpu() for name in sorted(self.columns)}
        rows |= {"env": (env + self._ranks.rank * self.num_envs).cpu(), "number": number.cpu()}
        self._new_end = end.clone()
        return rows, int((end - self._saved_end).min())

    def mark_saved(self) -> None:
        self._saved_end = self._new_end

    @torch.no_grad()
    def put_rows(self, rows: Mapping[str, Tensor]) -> None:
        device = self.end.device
        env, number = rows["env"].to(device), rows["number"].to(device)
        env, number, which = own_rows(
            env, self.num_envs, self._ranks, number, torch.arange(len(env), device=device)
        )
        for name in self.columns:
            column = rows[name].to(device)[which]
            getattr(self, name)[number % self.capacity, env] = column
        self._new_end = self.end.clone()

    def _at(self, number: Tensor) -> Tensor:
        return (number % self.capacity).flatten()

    def __len__(self) -> int:
        """Return the number of transitions that can be drawn, of all ranks."""
        return int(self.left().sum())

    def left(self) -> Tensor:
        """Return the number of transitions of each environment of all ranks."""
        return self._ranks.gather(self.num_starts - self.num_gone).flatten()

    def metrics(self, drawn: Rows | None) -> dict[str, Tensor]:
        """Return how many transitions there are, and the mean age of drawn ones, in env steps.

        Args:
            drawn: this rank's rows of the last gradient step; None: there was none, on any rank.
        """
        found = {"replay_rows": self.left().sum()}
        if drawn is not None:
            age = self.end[drawn.env] - drawn.number
            of_rank = torch.stack([age.sum(), age.new_tensor(len(age))])
            total, count = self._ranks.gather(of_rank).sum(0).double()
            found["replay_age"] = total / count * (self.num_envs * self._ranks.size)
        return found

    @torch.no_grad()
    def draw(
        self, seed: int, first_step: int, num_steps: int, batch_size: int
    ) -> tuple[Rows, list[int]]:
        """Draw `batch_size` transitions for each of `num_steps` gradient steps.

        Each transition is equally likely. Slot j of a gradient step draws from the j-th of
        `batch_size` equal parts of all transitions, environment by environment.

        Returns:
            The rows of this rank, step after step, and how many each step has.
        """
        left = self.left()
        ends = left.cumsum(0)
        total = ends[-1]
        uniform = replay_draws(seed, first_step, num_steps, batch_size, ends.device)
        slot = torch.arange(batch_size, device=ends.device)
        pick = ((slot + uniform) * (total.double() / batch_size)).long().clamp(max=total - 1)
        env = torch.searchsorted(ends, pick, right=True)
        place = pick - (ends - left)[env]
        sizes = [batch_size] * num_steps
        if self._ranks.size > 1:
            rank = env // self.num_envs
            sizes = (rank == self._ranks.rank).sum(1).tolist()
        columns = env, place, slot.expand_as(env)
        env, *rest = (column.flatten() for column in columns)
        env, place, slot = own_rows(env, self.num_envs, self._ranks, *rest)
        number = self.starts[(place + self.num_gone[env]) % self.capacity, env]
        return Rows(number, env, slot), sizes

    @torch.no_grad()
    def draw_by_priority(
        self, seed: int, step: int | Tensor, batch_size: int, beta: float | Tensor
    ) -> tuple[Rows, Tensor]:
        """Draw `[batch_size]` transitions of a gradient step, in proportion to their priorities.

        Returns:
            The rows of this rank, and weights that undo a share `beta` of the bias: (n P(i))^-β, of
            which the largest is 1 (Schaul et al. 2016, arXiv:1511.05952, section 3.4).
        """
        assert self.priorities is not None
        uniform = replay_draws(seed, step, 1, batch_size, self.end.device)[0]
        env, place, slot, probability = self.priorities.draw(uniform)
        number = self.end[env] - (self.end[env] - place) % self.capacity
        weight = (self.left().sum() * probability) ** -beta  # nothing waits for the device
        largest = weight.max() if len(weight) else torch.zeros_like(self.priorities.greatest)
        return Rows(number, env, slot), (weight / self._ranks.gather(largest).max()).float()

    @torch.no_grad()
    def set_priorities(self, rows: Rows, priority: Tensor) -> None:
        """Write the priorities `[B]` of rows that were drawn."""
        assert self.priorities is not None
        # One that is not finite would spoil all sums for good; its gradient step is masked as well.
        # With 0 its row would never be drawn again.
        priority = priority.double().nan_to_num(nan=_LEAST_PRIORITY, posinf=_LEAST_PRIORITY)
        self.priorities.set(rows.env, self._at(rows.number), priority)
        self.priorities.raise_greatest(priority)

    @torch.no_grad()
    def transitions(
        self, rows: Rows, n_step: int, gamma: float, scaled: Callable[[Tensor], Tensor]
    ) -> Minibatch:
        """Return transitions over up to `n_step` steps, which end with the episode or the newest.

        Args:
            rows: `[...]`.
            scaled: clips and normalizes rewards.

        Returns:
            `obs, action, next_obs` of rows `[..., *shape]`; `reward` and `discount`, see `returns`.
        """
        return self.with_returns(rows, *self.returns(rows, n_step, gamma, scaled))

    @torch.no_grad()
    def with_returns(
        self, rows: Rows, reward: Tensor, discount: Tensor, following: Tensor
    ) -> Minibatch:
        """Return `transitions`, given what `returns` says of these rows."""
        return {
            "obs": self.observations(rows.number, rows.env),
            "action": self.action[rows.number % self.capacity, rows.env],
            "reward": reward,
            "discount": discount,
            "next_obs": self.observations(following, rows.env),
        }

    @torch.no_grad()
    def returns(
        self, rows: Rows, n_step: int, gamma: float, scaled: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over up to `n_step` steps from rows `[...]`, see `transitions`.

        Returns:
            The sum Σ_j γ^j r_j of m steps; γ^m, or 0 if the episode ended by then; and the number
            of the row that has the observation after these steps.
        """
        ahead = torch.arange(n_step, device=rows.env.device)
        number, env = rows.number.unsqueeze(-1) + ahead, rows.env.unsqueeze(-1)
        at = number % self.capacity
        ended = self.terminated[at, env] | self.truncated[at, env]
        counts = (number < self.end[env]) & ~(ended.cumsum(-1) - ended.long()).bool()
        powers = gamma**ahead
        reward = (scaled(self.reward[at, env]) * powers * counts).sum(-1)
        m = counts.sum(-1)
        terminated = (self.terminated[at, env] & counts).any(-1)
        discount = (gamma**m).masked_fill(terminated, 0.0)
        following = rows.number + m
        if self.older:
            following += self.older * self.only_frame[following % self.capacity, rows.env]
        return reward, discount.to(reward.dtype), following

    @torch.no_grad()
    def relabel(
        self, columns: Minibatch, rows: Rows, uniform: Tensor, scaled: Callable[[Tensor], Tensor]
    ) -> None:
        """Replace a share of the goals in `transitions` of one step by what was reached later.

        Args:
            uniform: `[2, B]`, in [0, 1).
        """
        assert self.episodes is not None
        assert self.goal_reward is not None
        ahead = self.episodes.newest_of(rows.number, rows.env, self.end) - rows.number + 1
        is_chosen = (uniform[0] < self._hindsight) & (ahead > 0)
        later = rows.number + (uniform[1] * ahead.clamp(min=1)).long() + 1
        reached = self.observations(later, rows.env)
        assert isinstance(reached, dict)
        hindsight.relabel(columns, reached[hindsight.ACHIEVED], is_chosen, self.goal_reward)
        columns["reward"] = torch.where(is_chosen, scaled(columns["reward"]), columns["reward"])

    def observations(self, number: Tensor, env: Tensor) -> Obs:
        """Return the observations of rows `[...]`, with all their frames."""
        if self.older:
            age = torch.arange(self.older, -1, -1, device=number.device)
            number, env = number.unsqueeze(-1) - age, env.unsqueeze(-1)
        at = number % self.capacity * self.num_envs + env
        named = {
            key: getattr(self, name).flatten(0, 1).index_select(0, at.flatten())
            for key, name in self._obs_names.items()
        }
        named = {key: obs.unflatten(0, at.shape) for key, obs in named.items()}
        if self.older:
            named = {key: side_by_side(obs, at.dim() - 1) for key, obs in named.items()}
        return named[""] if list(named) == [""] else named


def _frames(obs: Obs) -> Tensor:
    assert isinstance(obs, Tensor)
    return obs
