"""A game in PettingZoo's parallel form, in which all agents act in each step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.envs.api import check_fields
from headrace.envs.games.game import Game, GameRows, number, with_info
from headrace.envs.spaces.game_state import StateReader
from headrace.errors import EnvError


class ParallelGame(Game):
    """One game. An agent that is terminated or truncated has left it, until it is there again."""

    def __init__(self, env: Any, states: StateReader | None = None) -> None:
        super().__init__(env, states)
        self._seen: dict[int, Any] = {}  # observations of the step under way

    def reset(self, seed: int | None, rows: GameRows) -> None:
        result = self.env.reset(seed=seed)
        check_fields("reset", result, rows.position)
        obs, infos = result
        rows.alive[:] = False
        self._seen = {}
        for i in self.present(rows):
            rows.alive[i] = True
            self._put(i, obs, infos, rows)
        rows.acts[:] = rows.alive
        self._put_state(rows)

    def step(self, actions: Sequence[Any], rows: GameRows) -> None:
        before = self.present(rows)
        left = {i for i in before if not rows.alive[i]}  # and lingers in `agents`
        result = self.env.step({self.names[i]: actions[i] for i in before})
        check_fields("step", result, rows.position, reward=False)
        obs, reward, terminated, truncated, infos = result
        present = set(self.present(rows))
        self._seen = {}
        for i in np.flatnonzero(rows.alive).tolist():
            paid = self.of(i, "reward", reward, rows)
            rows.reward[i] = number(paid, self.names[i], rows)
            ends = bool(self.of(i, "terminated", terminated, rows))
            cut = bool(self.of(i, "truncated", truncated, rows))
            rows.terminated[i], rows.truncated[i] = ends, cut
            rows.alive[i] = not ends and not cut
            if rows.alive[i] and i not in present:
                raise EnvError(
                    f"The agent {self.names[i]} is no longer in `agents`, and step said "
                    f"neither that it is terminated nor that it is truncated ({rows.position()})."
                )
            if not rows.alive[i]:
                left.add(i)
            if not ends:
                self._put(i, obs, infos, rows, ended=cut)
        for i in present:
            if not rows.alive[i] and i not in left:  # has joined
                rows.alive[i] = True
                self._put(i, obs, infos, rows)
        rows.acts[:] = rows.alive
        self._put_state(rows)

    def _put(self, i: int, obs: Any, infos: Any, rows: GameRows, *, ended: bool = False) -> None:
        own = self.of(i, "observation", obs, rows)
        rows.put(i, own, with_info(infos, self.names[i]), ended=ended)
        self._seen[i] = own

    def _put_state(self, rows: GameRows) -> None:
        """Write the states of those who have observed something in this step.

        To the last state of those who are cut off, these belong as well.
        """
        if self.states is None:
            return
        staying = [i for i in self._seen if rows.alive[i]]
        leaving = [i for i in self._seen if not rows.alive[i]]
        for agents, there in ((leaving, self._seen), (staying, staying)):
            if agents:
                state = self.states.read(there, self._seen.__getitem__, rows.position)
                for i in agents:
                    rows.put_state(i, state)
