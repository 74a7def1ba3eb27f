"""The state of a whole game, which critics see, and agents' indices, added to observations.

A state is what the environment gives as `state`, or else all agents' observations side by side.
Left out: games that are compiled, whose vector joins observations itself (`kernels/vector.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.spaces import gym_spaces
from headrace.envs.spaces.obs_reader import ObsReader, misfit
from headrace.errors import ConfigError, EnvError
from headrace.models.networks import image_layout
from headrace.spec import Agents, Array, EnvSpec, Space

STATE, AGENT_ID = "state", "agent_id"
"""The keys of what is added, unless the environment's own observation has such a key."""


def add(spec: EnvSpec, env: Any, *, shared_critic: bool, agent_ids: bool) -> EnvSpec:
    """Add the state of the game, and the agent's index, to the observations of a game's agents.

    Args:
        spec: of `env`.

    Raises:
        ConfigError: it is no game of several agents, or there is no state that fits a critic.
    """
    if not shared_critic and not agent_ids:
        return spec
    if not spec.roles:
        setting = "critic='shared'" if shared_critic else "agent_ids=True"
        raise ConfigError(
            f"{setting} is for games of several agents, and {spec.id} has one agent.\n"
            f"Leave {'--critic' if shared_critic else '--agent-ids'} out."
        )
    whole = [of.observation for of in spec.agent_spaces] or [spec.observation]
    taken = {key for space in whole for key, _ in space.parts}
    added, notes = list[tuple[str, Space]](), list[str]()
    id_key = state_key = ""
    if agent_ids:
        id_key = _free(AGENT_ID, taken)
        added.append(
            (id_key, Space("discrete", nvec=(spec.num_agents,), start=(0,), dtype="int64"))
        )
    if shared_critic:
        state_key = _free(STATE, taken)
        space, note = _space_of_states(spec, env)
        added.append((state_key, space))
        notes.append(note)
    return replace(
        spec,
        observation=_extended(spec.observation, added),
        agent_spaces=tuple(
            of._replace(observation=_extended(of.observation, added)) for of in spec.agent_spaces
        ),
        state_key=state_key,
        id_key=id_key,
        notes=(*spec.notes, *notes),
    )


def _free(key: str, taken: set[str]) -> str:
    while key in taken:
        key += "_"
    return key


def _extended(whole: Space, added: list[tuple[str, Space]]) -> Space:
    paths = (*whole.paths, *((key,) for key, _ in added)) if whole.paths else ()
    return Space("dict", parts=(*whole.leaves, *added), paths=paths)


def _own_space(env: Any) -> gymnasium.spaces.Box | None:
    """Return the space of `env.state()`; None: it gives no state that is a Box."""
    space = getattr(env, "state_space", None)
    gives = callable(getattr(env, "state", None)) and isinstance(space, gymnasium.spaces.Box)
    return space if gives else None


def _space_of_states(spec: EnvSpec, env: Any) -> tuple[Space, str]:
    """Return the space of states, and a line about it."""
    if (own := _own_space(env)) is not None:
        space, notes = gym_spaces.read_observation(own, spec.action)
        more = "".join(f" ({note.replace('observation', 'state')})" for note in notes)
        return space, f"the critic also sees state(): {space.describe()}{more}"
    of_each = [spec.for_agents(Agents(i, 1)).seen for i in range(spec.num_agents)]
    for i, of in enumerate(of_each):
        if any(image_layout(part) for _, part in of.leaves):
            raise ConfigError(
                f"critic='shared', but {spec.id} gives no state, and agent {i} observes an image "
                f"({of.describe()}), which is not joined with other agents' observations.\n"
                "Give the environment a method state(), and a state_space, which is a Box."
            )
    size = sum(part.flat_size for of in of_each for _, part in of.leaves)
    space = Space("box", (size,), "float32")
    return space, f"the critic also sees all agents' observations: {space.describe()}"


class StateReader(ABC):
    """Reads the state of a game as it is now."""

    @abstractmethod
    def read(
        self, there: Iterable[int], observe: Callable[[int], Any], position: Callable[[], str]
    ) -> Array:
        """Return the state, or raise EnvError.

        Args:
            there: indices of the agents that are in the game.
            observe: returns what one of them observes, as the environment gives it.
            position: describes the game and the step under way, for messages.
        """


class _OwnState(StateReader):
    """What the environment gives as `state`."""

    def __init__(self, env: Any, space: Space) -> None:
        self._env, self._space = env, space

    def read(
        self, there: Iterable[int], observe: Callable[[int], Any], position: Callable[[], str]
    ) -> Array:
        state = self._env.state()
        if problem := misfit("a state", self._space, state):
            raise EnvError(f"The environment gave {problem} ({position()}).")
        return np.asarray(state)


class _JoinedState(StateReader):
    """All agents' observations side by side: 0 for one that is not there, and choices one-hot."""

    def __init__(self, spec: EnvSpec) -> None:
        of_each = [spec.for_agents(Agents(i, 1)) for i in range(spec.num_agents)]
        self._readers = [ObsReader(of) for of in of_each]
        self._parts = [
            [part for part in reader.parts if part.key in dict(of.seen.leaves)]
            for of, reader in zip(of_each, self._readers, strict=True)
        ]
        self._sizes = [sum(part.space.flat_size for part in parts) for parts in self._parts]

    def read(
        self, there: Iterable[int], observe: Callable[[int], Any], position: Callable[[], str]
    ) -> Array:
        joined = [np.zeros(size, np.float32) for size in self._sizes]
        for i in there:
            obs = observe(i)
            if problem := self._readers[i].misfit(obs):
                raise EnvError(f"The environment gave agent {i} {problem} ({position()}).")
            flat = [_flat(part.space, part.get(obs)) for part in self._parts[i]]
            joined[i] = np.concatenate(flat)
        return np.concatenate(joined, dtype=np.float32)


def _flat(space: Space, value: Any) -> Array:
    numbers = np.asarray(value).ravel()
    if not space.nvec:
        return numbers
    first = np.cumsum((0, *space.nvec[:-1])) - space.start  # of each choice's places
    hot = np.zeros(space.flat_size, np.float32)
    hot[numbers + first] = 1
    return hot


def state_reader(env: Any, spec: EnvSpec) -> StateReader | None:
    """Return what reads the states that `add` added to the spec of `env`; None: it added none."""
    if not spec.state_key:
        return None
    if _own_space(env) is not None:
        return _OwnState(env, dict(spec.observation.parts)[spec.state_key])
    return _JoinedState(spec)
