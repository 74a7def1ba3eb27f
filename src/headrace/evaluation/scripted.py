"""Scripted players: functions of one's own that play a game, in the place of a policy."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import VectorEnv
from headrace.envs.spaces.masks import MASK
from headrace.envs.spaces.obs_reader import leaf
from headrace.errors import ConfigError, PlayerError
from headrace.models.policy import Actor
from headrace.spec import PLAIN, ActionCodec, Agents, Array, EnvSpec, Space, nested

Script = Callable[..., Any]
"""(observation, agent's name) or (observation) -> action, as the environment gives and takes them.
One that accepts `action_mask` or `info` gets a mask from `info` so."""

_NAMES = ("agent", "agent_name", "name")


class ScriptedPolicy:
    """A script as a player, for agents whose spaces are all the same.

    Args:
        name: of the script, for messages.
        spec: of these agents.
        agents: the names of all agents of the game.

    Raises:
        ConfigError: the script cannot be called so.
    """

    state_size = num_draws = 0

    def __init__(self, script: Script, name: str, spec: EnvSpec, agents: Sequence[str]) -> None:
        self.spec, self.name, self._script, self._agents = spec, name, script, list(agents)
        self._takes_name, self._keywords = _arguments(script, name)
        self._codec = ActionCodec(spec.action)

    def actor(self, vector: VectorEnv, part: Agents) -> Actor:
        """Return an actor of these agents in a vector."""
        return _ScriptedActor(self, vector, part)

    def act(self, leaves: Mapping[str, Array], agent: int) -> Array:
        """Return an agent's action, as a policy would emit it: `[1]` or `[1, size]`.

        Args:
            leaves: its observation, as it is stored: an array for each key of `Space.leaves`.

        Raises:
            PlayerError: the script failed, or its action is none of the space.
        """
        spec, name = self.spec, self._agents[agent]
        space = spec.seen if spec.mask_in_info else spec.observation
        found: dict[str, Any] = {key: leaves[key].copy()[()] for key, _ in space.leaves}
        obs = nested(space, found) if space.kind == "dict" else found[PLAIN]
        mask = leaves[spec.mask_key].copy() if spec.mask_key else None
        about = {MASK: mask, "info": {MASK: mask} if spec.mask_in_info else {}}
        more = {key: about[key] for key in self._keywords}
        try:
            action = self._script(obs, *([name] if self._takes_name else []), **more)
        except Exception as error:
            raised = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            text = "".join(traceback.format_exception(raised))
            seen = f"agent {name}, observation {obs}"
            raise PlayerError(f"{text}\nThe player {self.name} failed ({seen}).") from error
        return self._checked(action, name)

    def _checked(self, action: Any, agent: str) -> Array:
        space = self.spec.action
        if not _is_of(space, action):
            raise PlayerError(
                f"The player {self.name} chose {action!r} for agent {agent}: expected an action of "
                f"{space.describe()}."
            )
        return self._codec.from_env(_batch_of_one(space, action))


def _arguments(script: Script, name: str) -> tuple[bool, tuple[str, ...]]:
    """Return whether a script takes the agent's name, and which of the keywords."""
    signature = inspect.signature(script)
    taken = signature.parameters.values()
    keywords = tuple(each.name for each in taken if each.name in (MASK, "info"))
    places = [
        each
        for each in taken
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.name not in keywords
    ]
    # Another second argument, with a default, is an option of the script.
    second = places[1:2] and (places[1].default is places[1].empty or places[1].name in _NAMES)
    takes_name = bool(second) or any(each.kind is each.VAR_POSITIONAL for each in taken)
    try:
        signature.bind(None, *([None] if takes_name else []), **dict.fromkeys(keywords))
    except TypeError:
        raise ConfigError(
            f"The player {name} takes {signature}: expected (observation, agent) or "
            f"(observation), and maybe {MASK} or info."
        ) from None
    return takes_name, keywords


def _parts(space: Space, action: Any) -> list[tuple[str, Space, Any]]:
    """Return (key, space, action) of each part of a Dict's or Tuple's action; LookupError."""
    keys = [key if space.kind == "dict" else int(key) for key, _ in space.parts]
    return [(key, part, action[at]) for (key, part), at in zip(space.parts, keys, strict=True)]


def _is_of(space: Space, action: Any) -> bool:
    """Return whether an action is of a space. A Box's are clipped to its bounds, and all are."""
    if space.parts:
        try:
            return all(_is_of(part, of) for _, part, of in _parts(space, action))
        except (LookupError, TypeError):
            return False
    array = np.asarray(action)
    if array.shape != space.shape or array.dtype.kind not in "iubf":
        return False
    if space.kind == "box":
        return bool(np.isfinite(array).all())
    first = np.reshape(space.start, space.shape)
    choices, count = np.trunc(array) == array, np.reshape(space.nvec, space.shape)
    return bool((choices & (array >= first) & (array < first + count)).all())


def _batch_of_one(space: Space, action: Any) -> Any:
    """Return an action as Gymnasium's vectors take it."""
    if not space.parts:
        return np.asarray(action)[None]
    batches = {key: _batch_of_one(part, of) for key, part, of in _parts(space, action)}
    return batches if space.kind == "dict" else tuple(batches.values())


class _ScriptedActor(Actor):
    """Asks a script for the action of each agent that acts; all others get one of zeros."""

    def __init__(self, policy: ScriptedPolicy, vector: VectorEnv, part: Agents) -> None:
        self._policy, self._vector, self._part = policy, vector, part

    def begin(self, fragment: Fragment, noise: Tensor) -> Callable[[int], None]:
        keys = [key for key, _ in self._policy.spec.observation.leaves]
        leaves = {key: leaf(fragment.obs, key) for key in keys}
        first, size = self._part

        def act(t: int) -> None:
            fragment.action[t].zero_()
            acts = self._vector.acting()[:, first : first + size]
            for e, i in np.argwhere(acts).tolist():
                row = e * size + i
                obs = {key: array[t, row].numpy() for key, array in leaves.items()}
                action = self._policy.act(obs, first + i)
                fragment.action[t, row] = torch.from_numpy(action)[0]

        return act

    def finish(self, rows: slice) -> None:
        """Write nothing: there are no other outputs."""
