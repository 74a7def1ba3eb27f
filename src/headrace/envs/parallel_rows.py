"""Rows of one policy's agents in games that are stepped in Python, on their way into a fragment.

Left out: stepping (`pettingzoo_vector.py`).
"""

import numpy as np
import torch

from headrace.batch import Fragment
from headrace.envs.episodes import Intake
from headrace.spec import ActionCodec, Agents, Array, EnvSpec


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
        self.intake, self._codec = Intake(spec), ActionCodec(spec.action)
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
