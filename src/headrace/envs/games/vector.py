"""Games as a vector, stepped one after the other in one process.

Agents are rows, in the order of `possible_agents`. One that has left the game has rows that are not
valid until it is there again, at the latest in the next episode, which begins in the step after
which no agent is left. PettingZoo itself need not be installed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.batch import Fragment
from headrace.envs.api import Episode, Restored, VectorContext, explain_errors
from headrace.envs.games.game import Game
from headrace.envs.games.moves import KeptMoves, pack
from headrace.envs.games.parallel import ParallelGame
from headrace.envs.games.rows import AgentRows
from headrace.envs.games.turns import TurnGame
from headrace.envs.seats import LATEST, MEMBER, SIDE, score
from headrace.envs.single_envs import SingleEnvs
from headrace.errors import EnvError, UsageError
from headrace.spec import Array

_FORMS: dict[str, type[Game]] = {"parallel": ParallelGame, "turns": TurnGame}
_COUNTS = "episode", "episode_step", "return"
TAKEN = "taken"
"""In a vector's state: the actions of the last fragment, in the units of the environment,
`[T, n, numbers of all agents]`."""


class GameVector(SingleEnvs):
    """A `VectorEnv` over games of several agents, which it closes; `remake` replaces one.

    Rows are columns of a fragment: the agents of game 0, then those of game 1, ...

    Raises:
        UsageError: `possible_agents` differ between them.
    """

    def __init__(
        self, envs: Sequence[Any], context: VectorContext, remake: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(envs, context, remake)
        spec, n = self.spec, len(self.env_id)
        self.parts, self.seats = context.all_parts(), context.seats()
        self._rows = [AgentRows(spec.for_agents(part), part, n) for part in self.parts]
        self._rows_of = [rows for rows in self._rows for _ in range(rows.agents.size)]
        self._games = [self._game_of(env) for env in self._envs]
        self.names = self._games[0].names
        for game in self._games:
            if game.names != self.names:
                raise UsageError(
                    f"{spec.id} has other possible_agents each time that it is made: "
                    f"{self.names}, then {game.names}. Expected always the same."
                )
        shape = n, spec.num_agents
        self._alive, self._acts = np.zeros(shape, bool), np.zeros(shape, bool)
        self._reward, self._return = np.zeros(shape, np.float32), np.zeros(shape)
        self._terminated, self._truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self._episode = np.full(n, -1)
        self._episode_step = np.zeros(n, np.int64)
        self._kept = [
            KeptMoves(n * part.size) if spec.interface == "turns" else None for part in self.parts
        ]
        sizes = [rows.action_size for rows in self._rows_of]
        self._ends = np.cumsum(sizes).tolist()  # of each agent's numbers among all
        self._taken = np.zeros((0, n, self._ends[-1]))
        self._failed = np.zeros((0, n), bool)
        self._finished: list[Episode] = []
        self._begun, self._checks_all = False, True
        self._views = [_OneGame(self, e) for e in range(n)]

    def _game_of(self, env: Any) -> Game:
        return _FORMS[self.spec.interface](env)

    def bind(self, *fragments: Fragment) -> None:
        self.dropped, self.lost_steps = [], 0
        if not self._begun:
            for e in range(len(self._games)):
                self._next_episode(e)
            self._begun = True
        for i, (fragment, rows) in enumerate(zip(fragments, self._rows, strict=True)):
            rows.bind(fragment)
            rows.rows.env_id[:] = self.context.row_ids(i)
        num_steps = fragments[0].num_steps
        self._taken = np.zeros((num_steps, len(self._games), self._ends[-1]))
        self._failed = np.zeros((num_steps, len(self._games)), bool)
        self._bound_at = time.monotonic()

    def step(self, t: int) -> None:
        actions = np.concatenate(
            [rows.actions(t).reshape(len(self._games), -1) for rows in self._rows], 1
        )
        self._taken[t] = actions
        self._checks_all = t == 0  # once per fragment: often enough to notice, too seldom to cost
        acted = self._acts & self._learns()
        for array in (self._reward, self._terminated, self._truncated):
            array.fill(0)
        failed = []
        for e in range(len(self._games)):
            try:
                self._step_game(e, actions[e])
            except EnvError as error:
                self._fail(e, error)
                failed.append(e)
        self.context.meter.lap("env_step")
        if self.context.guards.enabled:
            for e, problem in self._bad_games(failed):
                self._fail(e, problem)
                failed.append(e)
        self._return += self._reward
        self._episode_step += 1
        for e in failed:
            acted[e] = False
            self._drop(t, e)
        for e in range(len(self._games)):
            if e not in failed:
                self._end_step(t, e)
        for rows in self._rows:
            first, size = rows.agents
            mine, to = slice(first, first + size), rows.rows
            to.valid[t] = acted[:, mine].reshape(-1)
            to.reward[t] = self._reward[:, mine].reshape(-1)
            to.terminated[t] = self._terminated[:, mine].reshape(-1)
            to.truncated[t] = self._truncated[:, mine].reshape(-1)
            rows.write_obs(t + 1)

    def finish(self) -> list[Episode]:
        self.step_s = (time.monotonic() - self._bound_at) / self._failed.size
        for rows, kept in zip(self._rows, self._kept, strict=True):
            finals = rows.take_finals()
            if kept is not None:
                lost = np.repeat(self._failed, rows.agents.size, 1)
                finals = pack(rows.rows, kept, finals, lost)
            rows.write_finals(finals)
        finished, self._finished = self._finished, []
        return finished

    def count_env_steps(self, num_steps: int) -> int:
        return num_steps * len(self._games) - int(self._failed[:num_steps].sum())

    def state(self) -> dict[str, Array]:
        state = {name: getattr(self, f"_{name}").copy() for name in _COUNTS}
        state |= {TAKEN: self._taken, "alive": self._alive.copy(), "acts": self._acts.copy()}
        for p, (rows, kept) in enumerate(zip(self._rows, self._kept, strict=True)):
            state |= {f"obs.{p}.{key}": array.copy() for key, array in rows.leaves.items()}
            if kept is not None:
                moves = kept.state(len(self._games))
                state |= {f"moves.{p}.{name}": array for name, array in moves.items()}
        if self.seats is not None:
            state |= {MEMBER: self.seats.member.numpy().copy()}
            state |= {SIDE: self.seats.side.numpy().copy()}
        return state | self._env_states()

    def restore(self, state: dict[str, Array]) -> Restored:
        if "alive" not in state:  # of a former version, which began games anew
            return self.start_after(state["episode"])
        for name in _COUNTS:
            getattr(self, f"_{name}")[:] = state[name]
        self._alive[:], self._acts[:] = state["alive"], state["acts"]
        if self.seats is not None:
            self.seats.member.copy_(torch.from_numpy(state[MEMBER]))
            self.seats.side.copy_(torch.from_numpy(state[SIDE]))
            self.seats.version += 1
        for p, (rows, kept) in enumerate(zip(self._rows, self._kept, strict=True)):
            for key, array in rows.leaves.items():
                array[:] = state[f"obs.{p}.{key}"]
            if kept is not None:
                prefix = f"moves.{p}."
                kept.restore(
                    {k.removeprefix(prefix): a for k, a in state.items() if k.startswith(prefix)}
                )
        return self._restore_envs(state)

    def _replay_actions(self, i: int, actions: Array, before_step: Callable[[int], None]) -> bool:
        saved = self._snapshot(i)
        self._games[i].reset(self._seed_of_episode(i), self._views[i])
        for step, action in enumerate(actions):
            before_step(step)
            self._clear_step(i)
            if not self._acts[i].any():
                return False
            self._games[i].step(self._elements(action), self._views[i])
            for agent in np.flatnonzero(self._terminated[i] | self._truncated[i]).tolist():
                self._rows_of[agent].clear(i, agent)
        again = self._snapshot(i)
        self._clear_step(i)
        return all(np.array_equal(saved[name], again[name]) for name in saved)

    def _snapshot(self, e: int) -> dict[str, Array]:
        """Return copies of what is known of game e: who is there, and what they observe."""
        found = {"alive": self._alive[e].copy(), "acts": self._acts[e].copy()}
        for p, rows in enumerate(self._rows):
            found |= {f"{p}.{key}": array[e].copy() for key, array in rows.leaves.items()}
        return found

    def _reset_only(self, i: int) -> None:
        saved = self._snapshot(i)
        self._games[i].reset(self._seed_of_episode(i), self._views[i])
        self._alive[i], self._acts[i] = saved.pop("alive"), saved.pop("acts")
        for p, rows in enumerate(self._rows):
            for key, array in rows.leaves.items():
                array[i] = saved[f"{p}.{key}"]

    def _begin_anew(self, i: int) -> None:
        self._drop_kept(i)
        self._next_episode(i, always_seeded=True)

    def _replaced(self, i: int) -> None:
        self._games[i] = self._game_of(self._envs[i])

    def _clear_step(self, e: int) -> None:
        self._reward[e], self._terminated[e], self._truncated[e] = 0, False, False

    def _elements(self, values: Array) -> list[Any]:
        """Return each agent's action as the environment takes it, from the numbers of all."""
        firsts = [0, *self._ends[:-1]]
        return [
            rows.element(values[first:end])
            for rows, first, end in zip(self._rows_of, firsts, self._ends, strict=True)
        ]

    def _step_game(self, e: int, values: Array) -> None:
        actions = self._elements(values)
        self._views[e].actions = actions
        with explain_errors(lambda: f"in {self._views[e].position()}"):
            self._games[e].step(actions, self._views[e])
        self._views[e].actions = None

    def _end_step(self, t: int, e: int) -> None:
        for i in np.flatnonzero(self._terminated[e] | self._truncated[e]).tolist():
            rows = self._rows_of[i]
            if self._truncated[e, i] and not self._terminated[e, i]:
                rows.keep_final(t, e, i)
            rows.clear(e, i)
        if self._alive[e].any():
            return
        means = np.array([self._return[e, first : first + n].mean() for first, n in self.parts])
        total, by_policy = self.context.returns_of(means)
        steps, match = (
            int(self._episode_step[e]),
            () if self.seats is None else self._match(e, means),
        )
        self._finished.append(Episode(t, int(self.env_id[e]), total, steps, by_policy, match))
        try:
            self._next_episode(e)
        except EnvError as error:
            self._fail(e, error)
            self._replace(e, partial(self._next_episode, e, always_seeded=True))

    def _learns(self) -> Array:
        """Return `[n, agents]` bool: the learned policies play the agent."""
        if self.seats is None:
            return np.ones_like(self._acts)
        of_sides = [
            np.repeat(self.seats.learns(i).numpy()[:, None], part.size, 1)
            for i, part in enumerate(self.parts)
        ]
        return np.concatenate(of_sides, 1)

    def _match(self, e: int, means: Array) -> tuple[float, ...]:
        """Return the `match` of an episode of game e that has ended; () if it is none."""
        assert self.seats is not None
        member, side = int(self.seats.member[e]), int(self.seats.side[e])
        if member == LATEST:
            return ()
        sizes = np.array([part.size for part in self.parts])
        return member, side, float(score(means[None], sizes, np.array([side]))[0])

    def _drop(self, t: int, e: int) -> None:
        """Give up game e, in which step t failed, and begin another one."""
        self._failed[t, e] = True
        self.lost_steps += 1
        self._clear_step(e)
        if self.spec.interface == "parallel":  # of turns, `pack` takes the moves out
            for rows in self._rows:
                rows.cut_before(t, e)
            self._truncated[e] = True
        self._replace(e, partial(self._next_episode, e, always_seeded=True))

    def _drop_kept(self, e: int) -> None:
        for rows, kept in zip(self._rows, self._kept, strict=True):
            if kept is not None:
                kept.drop(slice(e * rows.agents.size, (e + 1) * rows.agents.size))

    def _next_episode(self, e: int, *, always_seeded: bool = False) -> None:
        self._episode[e] += 1
        self._episode_step[e], self._return[e] = 0, 0.0
        if self.seats is not None:
            self.seats.draw(e, int(self._episode[e]))
        self._applied[e].begin_episode()
        seeded = self.context.reseed or self._episode[e] == 0 or always_seeded
        seed = self._seed_of_episode(e) if seeded else None
        self._alive[e], self._checks_all = False, True
        for i, rows in enumerate(self._rows_of):
            rows.clear(e, i)
        view, before = self._views[e], self._keep_step(e)
        with explain_errors(lambda: f"in reset, {self._describe(e)}"):
            self._games[e].reset(seed, view)
        self._put_step(e, before)
        if not self._acts[e].any():
            raise EnvError(f"After reset there is nobody in `agents` ({self._describe(e)}).")
        if self.context.guards.enabled:
            for _, error in self._bad_games([], only=e):
                raise error
        self.context.meter.lap("env_reset")

    def _keep_step(self, e: int) -> list[Array]:
        """Return copies of what the step under way gave, which a reset is not to change."""
        return [a[e].copy() for a in (self._reward, self._terminated, self._truncated)]

    def _put_step(self, e: int, kept: list[Array]) -> None:
        arrays = self._reward, self._terminated, self._truncated
        for array, before in zip(arrays, kept, strict=True):
            array[e] = before

    def _bad_games(self, failed: list[int], only: int | None = None) -> list[tuple[int, EnvError]]:
        """Return the games that gave what is not finite, not in its space, or no action at all."""
        bad, found = ~np.isfinite(self._reward), []
        nobody = np.zeros_like(bad)
        for rows in self._rows:
            first, size = rows.agents
            bad[:, first : first + size] |= rows.bad_values()
            for _, none in rows.without_action():
                nobody[:, first : first + size] |= none
        nobody &= self._acts
        for e in np.flatnonzero((bad | nobody).any(1)).tolist():
            if e in failed or only not in (None, e):
                continue
            i = int(np.flatnonzero((bad | nobody)[e])[0])
            rows = self._rows_of[i]
            if bad[e, i]:
                problem = (
                    "a value that is not finite or not in its space: observation "
                    f"{rows.observation(e, i)}, reward {self._reward[e, i]}; it declares "
                    f"{rows.spec.observation.describe()}"
                )
            else:
                problem = "an action mask that allows no action at all"
            text = f"The environment gave agent {self.names[i]} {problem} ({self._describe(e)})."
            found.append((e, EnvError(text)))
        return found

    def _describe(self, i: int, actions: Any = None) -> str:
        action = None
        if actions is not None:
            action = {
                self.names[k]: np.asarray(actions[k]).tolist()
                for k in np.flatnonzero(self._acts[i]).tolist()
            }
        episode, steps = int(self._episode[i]), int(self._episode_step[i])
        seeded = self.context.reseed or episode == 0
        seed = self.context.episode_seed(i, episode) if seeded else None
        return self.context.describe(i, episode, steps, seed, action)


class _OneGame:
    """The memory of game e of a vector: `GameRows`."""

    def __init__(self, vector: GameVector, e: int) -> None:
        self._vector, self._e = vector, e
        self.alive, self.acts = vector._alive[e], vector._acts[e]
        self.reward = vector._reward[e]
        self.terminated, self.truncated = vector._terminated[e], vector._truncated[e]
        self.actions: list[Any] | None = None

    def put(self, agent: int, obs: Any, info: Any, *, ended: bool) -> None:
        vector, rows = self._vector, self._vector._rows_of[agent]
        plain = rows.spec.observation
        must_check = vector._checks_all or (plain.kind != "dict" and np.shape(obs) != plain.shape)
        if must_check and (problem := rows.reader.misfit(obs)):
            name = vector.names[agent]
            raise EnvError(f"The environment gave agent {name} {problem} ({self.position()}).")
        try:
            rows.put(self._e, agent, obs, info, ended=ended)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            problem = rows.reader.misfit(obs) or rows.reader.mask_misfit(info)
            if not problem:
                raise
            name = vector.names[agent]
            raise EnvError(
                f"The environment gave agent {name} {problem} ({self.position()})."
            ) from error

    def position(self) -> str:
        return self._vector._describe(self._e, self.actions)
