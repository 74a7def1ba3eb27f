"""Games of others in PettingZoo's parallel form as a vector, stepped one after the other.

Agents are rows, in the order of `possible_agents`. One that is terminated or truncated has left the
game: its rows are not valid until it is there again, at the latest in the next episode, which
begins in the step after which nobody is left. PettingZoo itself need not be there.

Left out: what a game offers (`spaces.py`), memory (`pettingzoo_vector.py`), observations of several
arrays, action masks, and episodes under way when a run was saved: every game begins a new one.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import (
    GUARDS,
    Episode,
    Guards,
    Restored,
    check_fields,
    close_all,
    describe_position,
    env_error,
)
from headrace.envs.episodes import ObsWriter, ended_episodes
from headrace.errors import EnvError, UsageError
from headrace.meter import Meter
from headrace.seeding import derive
from headrace.spec import ActionCodec, Agents, Array, EnvSpec

# Rows of one policy's agents in games that are stepped in Python, on their way into a fragment.


class AgentRows:
    """The rows of the agents of one policy: on the CPU until a step is whole, then in the fragment.

    Args:
        spec: what is offered to each.
        agents: of each game.
        n: number of games.

    Attributes:
        obs: `[n, size, ...]`: current observations.
        intake: knows what they should be.
    """

    def __init__(self, spec: EnvSpec, agents: Agents, n: int) -> None:
        self.spec, self.agents = spec, agents
        space = spec.observation
        # Of an agent that is not there; a choice must be one that there is.
        self._absent = np.zeros(space.shape, space.dtype)
        if space.nvec:
            self._absent[...] = np.reshape(space.start, space.shape)
        self.obs = np.broadcast_to(self._absent, (n, agents.size, *space.shape)).copy()
        self.intake, self._codec = ObsWriter(spec), ActionCodec(spec.action)
        self._finals: list[tuple[int, int, Array]] = []

    def bind(self, fragment: Fragment, env_id: Array) -> None:
        """Write into this from now on; its observation row 0 is filled."""
        self._fragment, self._finals = fragment, []
        ids = Agents(0, self.agents.size).ids(env_id, self.agents.size)
        fragment.env_id.copy_(torch.from_numpy(ids))
        self._write_obs(0)

    def actions(self, t: int) -> list[Array]:
        """Row t of the actions, as the game expects them: of each agent, `[n, ...]`."""
        rows = self._codec.to_env(self._fragment.action[t].cpu().numpy())
        rows = rows.reshape(-1, self.agents.size, *rows.shape[1:])
        return [rows[:, i] for i in range(self.agents.size)]

    def write(self, t: int, *columns: Array) -> None:
        """Write row t, and row t + 1 of observations.

        Args:
            t: the step.
            *columns: `[n, agents]`, of all agents: valid, reward, terminated, truncated.
        """
        own, first = self._fragment, self.agents.first
        to = own.valid, own.reward, own.terminated, own.truncated
        for column, of in zip(to, columns, strict=True):
            mine = of[:, first : first + self.agents.size].reshape(-1)
            column[t].copy_(torch.from_numpy(mine))
        self._write_obs(t + 1)

    def keep_final(self, t: int, e: int, i: int) -> None:
        """Keep the current observation of agent i, whose episode was cut off in step t."""
        row = i - self.agents.first
        self._finals.append((t, e * self.agents.size + row, self.obs[e, row].copy()))

    def clear(self, e: int, i: int) -> None:
        """Agent i is not there."""
        self.obs[e, i - self.agents.first] = self._absent

    def finish(self) -> None:
        """Write the final observations."""
        to, count = self._fragment, len(self._finals)
        to.num_final.fill_(count)
        if count:
            step, column, obs = zip(*self._finals, strict=True)
            to.final_step[:count] = torch.tensor(step, device=to.final_step.device)
            to.final_row[:count] = torch.tensor(column, device=to.final_row.device)
            to.final_obs[:count].copy_(torch.from_numpy(np.stack(obs)))  # type: ignore[index]

    def misplaced(self) -> Array:
        """`[n, size]` bool: whose observation is not finite, or no choice of its space."""
        space = self.spec.observation
        good: Array = np.ones(self.obs.shape, bool)
        if space.dtype.startswith("float"):
            good &= np.isfinite(self.obs)
        elif space.nvec:
            choice = self.obs - np.reshape(space.start, space.shape)
            good &= (choice >= 0) & (choice < np.reshape(space.nvec, space.shape))
        return np.asarray(~good.reshape(*self.obs.shape[:2], -1).all(-1))

    def _write_obs(self, t: int) -> None:
        rows = torch.from_numpy(self.obs.reshape(-1, *self.spec.observation.shape))
        self._fragment.obs[t].copy_(rows)  # type: ignore[index]


class ParallelVector:
    """A `VectorEnv` over games in PettingZoo's parallel form; see there for the contract.

    Their rows are columns of the fragment as those of `KernelVector`: of env 0, then of env 1, ...

    Args:
        envs: the games, already made; they are closed with the vector.
        spec: what they all offer.
        env_id: `[n]`, the logical index of each.
        seed: the run's seed; each reset gets its own from it, by env and episode.
        meter: told of step and reset times.
        parts: which agents are rows of which fragment; default: all, of one.
        role: `env` for training, `eval` for evaluation: their seeds differ.
        sampler: named in errors.
        guards: whether to check what games give.
        reseed: seed every episode, or each env's first one only.
        last_episodes: `finish` gives so many of those that ended, the last ones; 0: all.

    Attributes:
        num_ended: how many episodes ended in the last fragment.
    """

    can_be_recorded = False

    def __init__(
        self,
        envs: Sequence[Any],
        spec: EnvSpec,
        env_id: Array,
        seed: int,
        meter: Meter,
        *,
        parts: Sequence[Agents] = (),
        role: str = "env",
        sampler: str = "inline",
        guards: Guards = GUARDS,
        reseed: bool = True,
        last_episodes: int = 0,
    ) -> None:
        self.spec, self.env_id = spec, env_id
        self.dropped: list[str] = []
        self.lost_steps = self.num_ended = 0
        self.step_s = 0.0
        self._envs, self._meter = list(envs), meter
        self._seed, self._role, self._reseed = seed, role, reseed
        self._sampler, self._guards, self._last_episodes = sampler, guards, last_episodes
        self._parts = [
            AgentRows(spec.of(agents), agents, len(env_id))
            for agents in (tuple(parts) or (Agents(0, spec.num_agents),))
        ]
        self._part_of = [part for part in self._parts for _ in range(part.agents.size)]
        self._id_of = {agent: i for i, agent in enumerate(self._envs[0].possible_agents)}
        self._names = list(self._id_of)
        for env in self._envs:
            if list(env.possible_agents) != self._names:
                raise UsageError(
                    f"{spec.id} has other possible_agents each time that it is made: "
                    f"{self._names}, then {env.possible_agents}. Expected always the same."
                )
        rows = (len(env_id), spec.num_agents)
        self._alive, self._left = np.zeros(rows, bool), np.zeros(rows, bool)
        self._reward = np.zeros(rows, np.float32)
        self._terminated, self._truncated = np.zeros(rows, bool), np.zeros(rows, bool)
        self._so_far = np.zeros(rows)
        self._episode = np.full(len(env_id), -1)
        self._episode_step = np.zeros(len(env_id), np.int64)
        self._was_seeded = np.zeros(len(env_id), bool)
        self._seeds: list[int | None] = [None] * len(env_id)
        self._begun = False
        self._bound_at = 0.0

    def bind(self, *fragments: Fragment) -> None:
        """Write into these, one of each part; the very first time this resets all envs."""
        if not self._begun:
            for e in range(len(self._envs)):
                self._next_episode(e)
            self._begun = True
        for fragment, part in zip(fragments, self._parts, strict=True):
            part.bind(fragment, self.env_id)
        n, num_steps = len(self._envs), fragments[0].num_steps
        self._length = torch.zeros(num_steps, n, dtype=torch.int32)
        self._total = torch.zeros(num_steps, n, len(self._parts), dtype=torch.float64)
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        """Step every game, and begin the next episode where nobody is left; raises EnvError."""
        actions = [row for part in self._parts for row in part.actions(t)]
        valid = self._alive.copy()
        for of in (self._reward, self._terminated, self._truncated):
            of.fill(0)
        for e in range(len(self._envs)):
            # All is looked at once per fragment: often enough to notice, too seldom to cost.
            self._step_one(e, [of[e] for of in actions], check_all=t == 0)
        self._so_far += self._reward
        self._episode_step += 1
        self._meter.lap("env_step")
        if self._guards.enabled:
            self._check_values()
        for e in range(len(self._envs)):
            self._end_of_step(t, e, valid[e])
        for part in self._parts:
            part.write(t, valid, self._reward, self._terminated, self._truncated)

    def finish(self) -> list[Episode]:
        """The episodes that ended in the fragment."""
        self.step_s = (time.monotonic() - self._bound_at) / self._length.numel()
        for part in self._parts:
            part.finish()
        sizes = [part.agents.size for part in self._parts]
        episodes, self.num_ended = ended_episodes(
            self._length, self._total, self.env_id, sizes, self._last_episodes
        )
        return episodes

    def finals_per_row(self, num_steps: int) -> int:
        """How many final observations of each row there is a place for."""
        return num_steps

    def tensors(self) -> list[Tensor]:
        """Nothing that changes can be changed back."""
        return []

    def state(self) -> dict[str, Array]:
        """The number of each env's episode."""
        return {"episode": self._episode.copy()}

    def obs(self) -> dict[str, Array]:
        """See `VectorEnv`: nothing goes on from there."""
        return {}

    def restore(self, state: dict[str, Array]) -> Restored:
        """Begin an episode after the one that was under way, in every env."""
        self._episode[:] = state["episode"]
        return Restored(new_episode=len(self._envs))

    def start_after(self, num_steps: int) -> Restored:
        """Begin episodes with an index that earlier ones, of one step at least, cannot have had."""
        self._episode[:] = num_steps
        return Restored(new_episode=len(self._envs))

    def close(self) -> None:
        """Close all games, whatever one of them does; then raise EnvError if one failed."""
        close_all(self._envs, self._where)

    def _step_one(self, e: int, actions: list[Any], *, check_all: bool) -> None:
        """Step a game: what it gives is taken, and who is alive after it."""
        env = self._envs[e]
        given = {self._names[i]: actions[i] for i in self._here(e)}
        try:
            result = env.step(given)
            if check_all:
                check_fields("step", result, self._where(e, given))
            obs, reward, terminated, truncated, _ = result
            now = set(self._here(e))
            for i in np.flatnonzero(self._alive[e]).tolist():
                self._reward[e, i] = self._of(e, i, "reward", reward)
                ends = bool(self._of(e, i, "terminated", terminated))
                cut = bool(self._of(e, i, "truncated", truncated))
                self._terminated[e, i], self._truncated[e, i] = ends, cut
                self._alive[e, i] = not ends and not cut
                if self._alive[e, i] and i not in now:
                    raise EnvError(
                        f"The agent {self._names[i]} is no longer in `agents`, and step said "
                        "neither that it is terminated nor that it is truncated "
                        f"({self._where(e, given)})."
                    )
                if not ends:
                    self._put(e, i, obs, check_all=check_all)
            # Some games keep agents in `agents` that have left.
            self._left[e] |= self._terminated[e] | self._truncated[e]
            self._left[e, [i for i in range(len(self._names)) if i not in now]] = False
            for i in now:
                if not self._alive[e, i] and not self._left[e, i]:  # has joined
                    self._alive[e, i] = True
                    self._put(e, i, obs, check_all=True)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in {self._where(e, given)}") from error

    def _end_of_step(self, t: int, e: int, valid: Array) -> None:
        """Keep final observations, clear the rows of who left, begin the next episode if due."""
        for i in np.flatnonzero(valid & ~self._alive[e]).tolist():
            part = self._part_of[i]
            if self._truncated[e, i] and not self._terminated[e, i]:
                part.keep_final(t, e, i)
            part.clear(e, i)
        if self._alive[e].any():
            return
        self._length[t, e] = int(self._episode_step[e])
        for p, part in enumerate(self._parts):
            first, size = part.agents
            self._total[t, e, p] = float(self._so_far[e, first : first + size].mean())
        self._next_episode(e)

    def _next_episode(self, e: int) -> None:
        """Begin an episode of env e."""
        self._episode[e] += 1
        self._episode_step[e], self._so_far[e] = 0, 0.0
        self._alive[e] = self._left[e] = False
        is_seeded = self._reseed or not self._was_seeded[e]
        path = int(self.env_id[e]), int(self._episode[e])
        self._seeds[e] = derive(self._seed, self._role, *path) if is_seeded else None
        self._was_seeded[e] = True
        try:
            result = self._envs[e].reset(seed=self._seeds[e])
            check_fields("reset", result, self._where(e))
            for i in self._here(e):
                self._alive[e, i] = True
                self._put(e, i, result[0], check_all=True)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise env_error(error, f"in reset, {self._where(e)}") from error
        if not self._alive[e].any():
            raise EnvError(f"After reset there is nobody in `agents` ({self._where(e)}).")
        if self._guards.enabled:
            self._check_values()
        self._meter.lap("env_reset")

    def _put(self, e: int, i: int, all_obs: Any, *, check_all: bool) -> None:
        """Write an agent's observation; a shape that NumPy would broadcast is refused."""
        part, obs = self._part_of[i], self._of(e, i, "observation", all_obs)
        is_looked_at = check_all or np.shape(obs) != part.spec.observation.shape
        if is_looked_at and (wrong := part.intake.misfit(obs)):
            raise EnvError(
                f"The environment gave agent {self._names[i]} {wrong} ({self._where(e)})."
            )
        part.obs[e, i - part.agents.first] = obs

    def _check_values(self) -> None:
        """NaN, infinity and choices that there are not: EnvError, before anybody sees them."""
        bad = ~np.isfinite(self._reward)
        for part in self._parts:
            first, size = part.agents
            bad[:, first : first + size] |= part.misplaced()
        if not bad.any():
            return
        e, i = np.argwhere(bad)[0].tolist()
        part = self._part_of[i]
        raise EnvError(
            f"The environment gave agent {self._names[i]} a value that is not finite or not in its "
            f"space: observation {part.obs[e, i - part.agents.first]}, reward "
            f"{self._reward[e, i]}; it declares {part.spec.observation.describe()} "
            f"({self._where(e)})."
        )

    def _here(self, e: int) -> list[int]:
        """Who is in a game now."""
        agents = list(self._envs[e].agents)
        if unknown := [agent for agent in agents if agent not in self._id_of]:
            raise EnvError(
                f"The agent {unknown[0]!r} is in `agents`, and not in `possible_agents` "
                f"{self._names} ({self._where(e)})."
            )
        return [self._id_of[agent] for agent in agents]

    def _of(self, e: int, i: int, what: str, values: Mapping[Any, Any]) -> Any:
        """What was said of an agent."""
        try:
            return values[self._names[i]]
        except (LookupError, TypeError):
            raise EnvError(
                f"The environment gave no {what} of agent {self._names[i]}, which was or is in the "
                f"game ({self._where(e)})."
            ) from None

    def _where(self, e: int, given: Mapping[Any, Any] | None = None) -> str:
        """Where a game is in its life: for messages."""
        action = None if given is None else {a: np.asarray(of).tolist() for a, of in given.items()}
        env, episode = f"{self.env_id[e]} of {self.spec.id}", int(self._episode[e])
        steps = int(self._episode_step[e])
        return describe_position(env, self._sampler, episode, self._seeds[e], steps, action)
