"""The interface of one game to the vector that steps it, in both of PettingZoo's forms."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.envs.api import check_reward
from headrace.envs.spaces.game_state import StateReader
from headrace.errors import EnvError
from headrace.spec import Array


class GameRows(Protocol):
    """The memory of one game, of all its agents, which a step writes to.

    Attributes:
        alive: `[agents]` bool: the agent is in the game.
        acts: `[agents]` bool: the agent's action is asked for in the next step.
        reward, terminated, truncated: `[agents]`, of the step under way; 0 and False before it.
    """

    alive: Array
    acts: Array
    reward: Array
    terminated: Array
    truncated: Array

    def put(self, agent: int, obs: Any, info: Any, *, ended: bool) -> None:
        """Write what an agent observes. EnvError if it is not as declared."""

    def put_state(self, agent: int, state: Array) -> None:
        """Write the state of the game at the moment of an agent's observation."""

    def position(self) -> str:
        """Describe the game and the step under way, for messages."""


class Game(ABC):
    """One game: an environment in one of PettingZoo's forms, its agents by their index.

    Attributes:
        names: of all agents that may be in the game.
        states: reads the state of the game; None: no critic sees it.
    """

    def __init__(self, env: Any, states: StateReader | None = None) -> None:
        self.env, self.names, self.states = env, list(env.possible_agents), states
        self._index = {agent: i for i, agent in enumerate(self.names)}

    @abstractmethod
    def reset(self, seed: int | None, rows: GameRows) -> None:
        """Begin an episode; write `alive`, `acts` and observations."""

    @abstractmethod
    def step(self, actions: Sequence[Any], rows: GameRows) -> None:
        """Take a step with the actions of those who act, by index; write all rows."""

    def index(self, agent: Any, place: str, rows: GameRows) -> int:
        """Return the index of an agent that is in `place`, or EnvError."""
        try:
            return self._index[agent]
        except (KeyError, TypeError):
            raise EnvError(
                f"The agent {agent!r} is in {place}, and not in `possible_agents` "
                f"{self.names} ({rows.position()})."
            ) from None

    def present(self, rows: GameRows) -> list[int]:
        """Return the indices of `agents`."""
        return [self.index(agent, "`agents`", rows) for agent in self.env.agents]

    def of(self, i: int, what: str, values: Mapping[Any, Any], rows: GameRows) -> Any:
        """Return an agent's entry of what the environment gave, or EnvError."""
        try:
            return values[self.names[i]]
        except (LookupError, TypeError):
            raise EnvError(
                f"The environment gave no {what} of agent {self.names[i]}, which was or is in the "
                f"game ({rows.position()})."
            ) from None


def number(paid: Any, agent: Any, rows: GameRows) -> float:
    """Return an agent's reward, which may be an array or list of one number, or EnvError."""
    if hasattr(paid, "__len__") or paid is None:
        check_reward(paid, lambda: f"agent {agent}, {rows.position()}")
        return float(np.asarray(paid).item())
    return paid  # type: ignore[no-any-return]


def with_info(infos: Any, agent: Any) -> Mapping[str, Any]:
    """Return an agent's info; {} where there is none."""
    found = infos.get(agent) if hasattr(infos, "get") else None
    return found if found is not None else {}
