"""Games in PettingZoo's parallel form as a vector, stepped one after the other.

Agents are rows, in the order of `possible_agents`. One that is terminated or truncated has left the
game: its rows are not valid until it is there again, at the latest in the next episode, which
begins in the step after which no agent is left. PettingZoo itself need not be installed.
After a resume every game begins a new episode.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace.batch import Fragment
from headrace.envs.api import (
    Episode,
    Restored,
    VectorContext,
    check_fields,
    check_reward,
    close_all,
    explain_errors,
)
from headrace.envs.episodes import DeviceVector, misfit
from headrace.errors import EnvError, UsageError
from headrace.spec import ActionCodec, Agents, Array, EnvSpec


class _AgentRows:
    """The rows of one policy's agents: on the CPU until a step is whole, then in the fragment.

    `obs`, `[n, size, ...]`, are the current observations of `size` agents in each of n games.
    """

    def __init__(self, spec: EnvSpec, agents: Agents, n: int) -> None:
        self.agents, self.space = agents, spec.observation
        self._codec = ActionCodec(spec.action)
        # The row of an agent that has left; a choice must be within its space.
        self._absent = np.zeros(self.space.shape, self.space.dtype)
        if self.space.nvec:
            self._absent[...] = np.reshape(self.space.start, self.space.shape)
        self.obs = np.broadcast_to(self._absent, (n, agents.size, *self.space.shape)).copy()
        self._finals: list[tuple[int, int, Array]] = []

    def bind(self, fragment: Fragment) -> None:
        self._fragment, self._finals = fragment, []
        self._write_obs(0)

    def actions(self, t: int) -> list[Array]:
        """Return row t of the game's actions: of each agent, `[n, ...]`."""
        rows = self._codec.to_env(self._fragment.action[t].cpu().numpy())
        rows = rows.reshape(-1, self.agents.size, *rows.shape[1:])
        return [rows[:, i] for i in range(self.agents.size)]

    def write(self, t: int, *columns: Array) -> None:
        """Write row t, and row t + 1 of observations.

        The columns are `[n, agents]`, of all agents: valid, reward, terminated, truncated.
        """
        fragment, (first, size) = self._fragment, self.agents
        targets = fragment.valid, fragment.reward, fragment.terminated, fragment.truncated
        for target, column in zip(targets, columns, strict=True):
            target[t].copy_(torch.from_numpy(column[:, first : first + size].reshape(-1)))
        self._write_obs(t + 1)

    def keep_final(self, t: int, e: int, i: int) -> None:
        """Keep the current observation of agent i, whose episode was truncated in step t."""
        row = i - self.agents.first
        self._finals.append((t, e * self.agents.size + row, self.obs[e, row].copy()))

    def clear(self, e: int, i: int) -> None:
        self.obs[e, i - self.agents.first] = self._absent

    def finish(self) -> None:
        to, count = self._fragment, len(self._finals)
        to.num_final.fill_(count)
        if count:
            step, column, obs = zip(*self._finals, strict=True)
            to.final_step[:count] = torch.tensor(step, device=to.final_step.device)
            to.final_row[:count] = torch.tensor(column, device=to.final_row.device)
            to.final_obs[:count].copy_(torch.from_numpy(np.stack(obs)))  # type: ignore[index]

    def invalid_rows(self) -> Array:
        """Return `[n, size]` bool: the observation is not finite, or no choice of its space."""
        space = self.space
        good: Array = np.ones(self.obs.shape, bool)
        if space.dtype.startswith("float"):
            good &= np.isfinite(self.obs)
        elif space.nvec:
            choice = self.obs - np.reshape(space.start, space.shape)
            good &= (choice >= 0) & (choice < np.reshape(space.nvec, space.shape))
        return np.asarray(~good.reshape(*self.obs.shape[:2], -1).all(-1))

    def _write_obs(self, t: int) -> None:
        rows = torch.from_numpy(self.obs.reshape(-1, *self.space.shape))
        self._fragment.obs[t].copy_(rows)  # type: ignore[index]


class ParallelVector(DeviceVector):
    """A `VectorEnv` over games in PettingZoo's parallel form, which it closes.

    Rows are columns of the fragment: the agents of env 0, then those of env 1, ...

    Raises:
        UsageError: `possible_agents` differ between them.
    """

    def __init__(self, envs: Sequence[Any], context: VectorContext) -> None:
        super().__init__(context, torch.device("cpu"))
        spec, env_id = self.spec, self.env_id
        self._envs = list(envs)
        self._policy_rows = [
            _AgentRows(spec.for_agents(agents), agents, len(env_id)) for agents in self.parts
        ]
        self._rows_of = [rows for rows in self._policy_rows for _ in range(rows.agents.size)]
        self._id_of = {agent: i for i, agent in enumerate(self._envs[0].possible_agents)}
        self._names = list(self._id_of)
        for env in self._envs:
            if list(env.possible_agents) != self._names:
                raise UsageError(
                    f"{spec.id} has other possible_agents each time that it is made: "
                    f"{self._names}, then {env.possible_agents}. Expected always the same."
                )
        shape = len(env_id), spec.num_agents
        self._alive, self._left = np.zeros(shape, bool), np.zeros(shape, bool)
        self._reward, self._return = np.zeros(shape, np.float32), np.zeros(shape)
        self._terminated, self._truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self._episode = np.full(len(env_id), -1)
        self._episode_step = np.zeros(len(env_id), np.int64)
        self._seeds: list[int | None] = [None] * len(env_id)
        self._was_seeded = np.zeros(len(env_id), bool)
        self._begun = False

    def bind(self, *fragments: Fragment) -> None:
        if not self._begun:
            for e in range(len(self._envs)):
                self._next_episode(e)
            self._begun = True
        for fragment, rows in zip(fragments, self._policy_rows, strict=True):
            self._write_env_id(fragment, rows.agents)
            rows.bind(fragment)
        self._allocate_ended(fragments[0].num_steps)
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        actions = [action for rows in self._policy_rows for action in rows.actions(t)]
        valid = self._alive.copy()
        for array in (self._reward, self._terminated, self._truncated):
            array.fill(0)
        for e in range(len(self._envs)):
            # All is checked once per fragment: often enough to notice, too seldom to cost.
            self._step_game(e, [action[e] for action in actions], check_all=t == 0)
        self._return += self._reward
        self._episode_step += 1
        self.context.meter.lap("env_step")
        if self.context.guards.enabled:
            self._check_values()
        for e in range(len(self._envs)):
            self._end_step(t, e, valid[e])
        for rows in self._policy_rows:
            rows.write(t, valid, self._reward, self._terminated, self._truncated)

    def finish(self) -> list[Episode]:
        for rows in self._policy_rows:
            rows.finish()
        return self._ended_episodes()

    def state(self) -> dict[str, Array]:
        return {"episode": self._episode.copy()}

    def start_after(self, episode: int | Array) -> Restored:
        self._episode[:] = episode
        return Restored(new_episode=len(self._envs))

    def close(self) -> None:
        close_all(self._envs, self._describe)

    def _step_game(self, e: int, actions: list[Any], *, check_all: bool) -> None:
        env = self._envs[e]
        action = {self._names[i]: actions[i] for i in self._present(e)}
        with explain_errors(lambda: f"in {self._describe(e, action)}"):
            result = env.step(action)
            if check_all:
                check_fields("step", result, self._describe(e, action))
            obs, reward, terminated, truncated, _ = result
            present = set(self._present(e))
            for i in np.flatnonzero(self._alive[e]).tolist():
                paid = self._value(e, i, "reward", reward)
                if hasattr(paid, "__len__"):  # an array or list of one number
                    check_reward(paid, self._describe(e, action))
                    paid = np.asarray(paid).item()
                self._reward[e, i] = paid
                ends = bool(self._value(e, i, "terminated", terminated))
                cut = bool(self._value(e, i, "truncated", truncated))
                self._terminated[e, i], self._truncated[e, i] = ends, cut
                self._alive[e, i] = not ends and not cut
                if self._alive[e, i] and i not in present:
                    raise EnvError(
                        f"The agent {self._names[i]} is no longer in `agents`, and step said "
                        "neither that it is terminated nor that it is truncated "
                        f"({self._describe(e, action)})."
                    )
                if not ends:
                    self._put(e, i, obs, check_all=check_all)
            # Some games keep agents in `agents` that have left.
            self._left[e] |= self._terminated[e] | self._truncated[e]
            self._left[e, [i for i in range(len(self._names)) if i not in present]] = False
            for i in present:
                if not self._alive[e, i] and not self._left[e, i]:  # has joined
                    self._alive[e, i] = True
                    self._put(e, i, obs, check_all=True)

    def _end_step(self, t: int, e: int, valid: Array) -> None:
        for i in np.flatnonzero(valid & ~self._alive[e]).tolist():
            if self._truncated[e, i] and not self._terminated[e, i]:
                self._rows_of[i].keep_final(t, e, i)
            self._rows_of[i].clear(e, i)
        if self._alive[e].any():
            return
        self.ended_length[t, e] = int(self._episode_step[e])
        for p, (first, size) in enumerate(self.parts):
            self.ended_return[t, e, p] = float(self._return[e, first : first + size].mean())
        self._next_episode(e)

    def _next_episode(self, e: int) -> None:
        self._episode[e] += 1
        self._episode_step[e], self._return[e] = 0, 0.0
        self._alive[e] = self._left[e] = False
        seeded = self.context.reseed or not self._was_seeded[e]
        self._seeds[e] = self.context.episode_seed(e, int(self._episode[e])) if seeded else None
        self._was_seeded[e] = True
        with explain_errors(lambda: f"in reset, {self._describe(e)}"):
            result = self._envs[e].reset(seed=self._seeds[e])
            check_fields("reset", result, self._describe(e))
            for i in self._present(e):
                self._alive[e, i] = True
                self._put(e, i, result[0], check_all=True)
        if not self._alive[e].any():
            raise EnvError(f"After reset there is nobody in `agents` ({self._describe(e)}).")
        if self.context.guards.enabled:
            self._check_values()
        self.context.meter.lap("env_reset")

    def _put(self, e: int, i: int, all_obs: Any, *, check_all: bool) -> None:
        """Write an agent's observation; a shape that NumPy would broadcast is refused."""
        rows, obs = self._rows_of[i], self._value(e, i, "observation", all_obs)
        must_check = check_all or np.shape(obs) != rows.space.shape
        if must_check and (problem := misfit("an observation", rows.space, obs)):
            raise EnvError(
                f"The environment gave agent {self._names[i]} {problem} ({self._describe(e)})."
            )
        rows.obs[e, i - rows.agents.first] = obs

    def _check_values(self) -> None:
        bad = ~np.isfinite(self._reward)
        for rows in self._policy_rows:
            first, size = rows.agents
            bad[:, first : first + size] |= rows.invalid_rows()
        if not bad.any():
            return
        e, i = np.argwhere(bad)[0].tolist()
        rows = self._rows_of[i]
        raise EnvError(
            f"The environment gave agent {self._names[i]} a value that is not finite or not in its "
            f"space: observation {rows.obs[e, i - rows.agents.first]}, reward "
            f"{self._reward[e, i]}; it declares {rows.space.describe()} "
            f"({self._describe(e)})."
        )

    def _present(self, e: int) -> list[int]:
        agents = list(self._envs[e].agents)
        if unknown := [agent for agent in agents if agent not in self._id_of]:
            raise EnvError(
                f"The agent {unknown[0]!r} is in `agents`, and not in `possible_agents` "
                f"{self._names} ({self._describe(e)})."
            )
        return [self._id_of[agent] for agent in agents]

    def _value(self, e: int, i: int, what: str, values: Mapping[Any, Any]) -> Any:
        try:
            return values[self._names[i]]
        except (LookupError, TypeError):
            raise EnvError(
                f"The environment gave no {what} of agent {self._names[i]}, which was or is in the "
                f"game ({self._describe(e)})."
            ) from None

    def _describe(self, e: int, actions: Mapping[Any, Any] | None = None) -> str:
        action = None
        if actions is not None:
            action = {agent: np.asarray(array).tolist() for agent, array in actions.items()}
        episode, steps = int(self._episode[e]), int(self._episode_step[e])
        return self.context.describe(e, episode, steps, self._seeds[e], action)
