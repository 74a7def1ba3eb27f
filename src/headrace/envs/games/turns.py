"""A game in PettingZoo's AEC form, in which agents take turns."""

from collections.abc import Sequence
from typing import Any

from headrace.envs.api import describe_result
from headrace.envs.games.game import Game, GameRows, number
from headrace.errors import EnvError
from headrace.spec import Array

_MOST_DEAD_TURNS = 1_000
"""Turns in a row of agents that have left the game: far more than there are agents."""


class TurnGame(Game):
    """One game. A step is one move: that of the agent whose turn it is.

    What the environment says is read as PettingZoo's `last()` gives it, when an agent's turn comes:
    the reward is that since its own last move, which other agents' moves may have brought. An agent
    that has left the game has a turn without a move, in which its episode ends.
    """

    def reset(self, seed: int | None, rows: GameRows) -> None:
        self.env.reset(seed=seed)
        rows.alive[:] = False
        rows.alive[self.present(rows)] = True
        self._turn(rows)

    def step(self, actions: Sequence[Any], rows: GameRows) -> None:
        (mover,) = rows.acts.nonzero()[0].tolist()
        self.env.step(actions[mover])
        self._turn(rows)

    def _turn(self, rows: GameRows) -> None:
        """Read whose turn it is, and what that agent observes; let those go who have left."""
        last_state: Array | None = None  # of all who are cut off in this step
        for _ in range(_MOST_DEAD_TURNS):
            present = self.present(rows)
            for i in set(rows.alive.nonzero()[0].tolist()).difference(present):
                raise EnvError(
                    f"The agent {self.names[i]} is no longer in `agents`, and had no turn in which "
                    f"last() said that it is terminated or truncated ({rows.position()}).\n"
                    "Expected that step(None), in that turn, removes it, and it alone."
                )
            if not present:
                rows.acts[:] = False
                return
            i = self.index(self.env.agent_selection, "`agent_selection`", rows)
            obs, reward, ends, cut, info = self._last(i, rows)
            rows.reward[i] += number(reward, self.names[i], rows)
            if not ends and not cut:
                rows.put(i, obs, info, ended=False)
                self._put_state(i, self._state(rows), rows)
                rows.acts[:] = False  # not before: until here, messages tell of the last move
                rows.acts[i] = rows.alive[present] = True  # some may have joined
                return
            rows.terminated[i], rows.truncated[i], rows.alive[i] = bool(ends), bool(cut), False
            if not ends and obs is not None:
                rows.put(i, obs, info, ended=True)
                last_state = self._state(rows) if last_state is None else last_state
                self._put_state(i, last_state, rows)
            self.env.step(None)
        raise EnvError(
            f"Agents that have left the game, such as {self.names[i]}, had {_MOST_DEAD_TURNS} "
            f"turns in a row ({rows.position()}).\n"
            "Expected that step(None) removes the agent whose turn it is from `agents`."
        )

    def _state(self, rows: GameRows) -> Array | None:
        """Return the state of the game now, to which those who have terminated do not belong."""
        if self.states is None:
            return None
        there = [i for i in self.present(rows) if not self.env.terminations[self.names[i]]]
        return self.states.read(there, lambda i: self.env.observe(self.names[i]), rows.position)

    def _put_state(self, i: int, state: Array | None, rows: GameRows) -> None:
        if state is not None:
            rows.put_state(i, state)

    def _last(self, i: int, rows: GameRows) -> tuple[Any, Any, bool, bool, Any]:
        result = self.env.last()
        if not isinstance(result, tuple | list) or len(result) != 5:
            raise EnvError(
                f"last() of agent {self.names[i]} returned {describe_result(result)}; "
                "expected (observation, reward, terminated, truncated, info) "
                f"({rows.position()})."
            )
        return tuple(result)
