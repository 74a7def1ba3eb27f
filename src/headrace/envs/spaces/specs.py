"""Describes environments: reads an `EnvSpec` from their spaces, and from PettingZoo's games."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.wrappers import FrameStackObservation

from headrace.envs.gym import atari
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.spaces import gym_spaces, masks
from headrace.envs.spaces.masks import MASK
from headrace.errors import ConfigError, UnsupportedSpaceError, UsageError
from headrace.spec import AgentSpaces, EnvSpec, Interface, Space


def read(
    env_id: str,
    observation: Any,
    action: Any,
    info: Mapping[str, Any],
    *,
    drop_obs_keys: tuple[str, ...] = (),
    action_mask: str = "auto",
) -> EnvSpec:
    """Describe an environment's spaces.

    `info`, which a reset returned, may hold an action mask. `action_mask` is `auto` (an observation
    or info called `action_mask` that fits the actions), `off`, `info`, or an observation's key.

    Raises:
        UnsupportedSpaceError: naming the space and its key.
        ConfigError: there is no such key, or no such mask.
    """
    if drop_obs_keys and not isinstance(
        observation, gymnasium.spaces.Dict | gymnasium.spaces.Tuple
    ):
        raise ConfigError(
            f"drop_obs_keys={drop_obs_keys}, but {env_id} has no Dict or Tuple observation: "
            f"{observation}."
        )
    act_space = gym_spaces.read_action(action)
    mask = {"auto": MASK, "off": "", "info": ""}.get(action_mask, action_mask)
    obs_space, notes = gym_spaces.read_observation(
        observation, act_space, drop=drop_obs_keys, mask=mask
    )
    key = masks.find_key(obs_space, act_space, info, action_mask)
    in_info = key == MASK and action_mask in ("auto", "info") and MASK not in dict(obs_space.parts)
    if in_info:
        parts = (*obs_space.leaves, (MASK, masks.space_of_masks(act_space)))
        paths = (*obs_space.paths, (MASK,)) if obs_space.paths else ()
        obs_space = Space("dict", parts=parts, paths=paths)
    if key and [name for name, _ in obs_space.leaves] == [key]:
        raise UnsupportedSpaceError(
            f"The observation of {env_id} is nothing but its action mask ({key!r}): expected "
            "something that a policy can see.\nAdd a key to the Dict, such as a Box of one number "
            "that is always 0."
        )
    if key:
        place = "info" if in_info else "the observation"
        notes += (f"actions are masked by {place}[{key!r}]",)
    return EnvSpec(env_id, obs_space, act_space, key, in_info, notes=notes)


def num_frames(env: Any, observation: gymnasium.Space[Any]) -> int:
    """Return how many frames the first axis of observations is a stack of; 0 if it is none.

    Args:
        env: one environment, or a vector.
    """
    shape = observation.shape or ()
    found = shape[0] if atari.is_vector_form(env) else 0
    while isinstance(env, gymnasium.Wrapper) and not found:
        if isinstance(env, FrameStackObservation):
            found = env.stack_size
        env = env.env
    return int(found) if len(shape) > 1 and shape[0] == found else 0


def read_kernel(env_id: str, env: KernelEnv, **options: Any) -> EnvSpec:
    """Describe a kernel environment's spaces, those of one agent; see `read`."""
    spec = read(env_id, env.observation_space, env.action_space, {}, **options)
    for role, space in (("observation", spec.observation), ("action", spec.action)):
        kinds = ("box",) if role == "observation" else ("box", "discrete", "multi_discrete")
        declared = env.observation_space if role == "observation" else env.action_space
        is_box = isinstance(declared, gymnasium.spaces.Box)
        if (
            space.kind not in kinds
            or is_box != (space.kind == "box")  # whole numbers are read as choices
            or (space.kind != "discrete" and len(space.shape) != 1)
        ):
            raise UnsupportedSpaceError(
                f"The {role} space of the kernel environment {env_id} cannot be used: "
                f"{declared}.\nExpected a Box of one dimension"
                + ("." if role == "observation" else " (of floats), Discrete or MultiDiscrete.")
            )
    return replace(spec, interface="kernel", roles=tuple(env.agents.items()))


def read_tensors(
    env_id: str, observation: Any, action: Any, info: Mapping[str, Any], **options: Any
) -> EnvSpec:
    """Describe the spaces of environments that step tensors; args and errors as of `read`."""
    spec = read(env_id, observation, action, info, **options)
    _check_one_array(spec, f"of {env_id}, which steps tensors,")
    return replace(spec, interface="tensor")


def read_game(
    env_id: str, env: Any, infos: Mapping[Any, Mapping[str, Any]], **options: Any
) -> EnvSpec:
    """Describe the spaces of a game in one of PettingZoo's forms; see `read`."""
    agents, agent_spaces, notes = list(env.possible_agents), list[AgentSpaces](), list[str]()
    if not agents:
        raise UsageError(f"{env_id} has no possible_agents: expected a list of their names.")
    for agent in agents:
        spaces = env.observation_space(agent), env.action_space(agent)
        try:
            spec = read(env_id, *spaces, infos.get(agent) or {}, **options)
        except UsageError as error:
            raise type(error)(f"{error}\n(agent {agent} of {env_id})") from None
        agent_spaces.append(
            AgentSpaces(spec.observation, spec.action, spec.mask_key, spec.mask_in_info)
        )
        notes += [note for note in spec.notes if note not in notes]
    if differ := len(set(agent_spaces)) > 1:
        for i, of in enumerate(agent_spaces):
            if not i or of != agent_spaces[i - 1]:
                notes.append(
                    f"from agent {agents[i]} on: observation {of.observation.describe()}, "
                    f"action {of.action.describe()}"
                )
    return EnvSpec(
        env_id, **agent_spaces[0]._asdict(),
        roles=parallel_roles(agents), agent_spaces=tuple(agent_spaces) if differ else (),
        notes=tuple(notes), interface=game_form(env) or "parallel",
    )  # fmt: skip


def game_form(env: Any) -> Interface | None:
    """Return in which of PettingZoo's forms a game is; None: it is no game.

    PettingZoo need not be installed.

    Raises:
        UsageError: it does not name its agents.
    """
    if not all(callable(getattr(env, f"{role}_space", None)) for role in ("observation", "action")):
        return None
    if not hasattr(env, "possible_agents"):
        raise UsageError(
            f"A {type(env).__name__} has spaces for each agent, as PettingZoo's games, and no "
            "possible_agents: expected a list of their names."
        )
    return "turns" if hasattr(env, "agent_iter") or hasattr(env, "last") else "parallel"


_ROLE = re.compile(r"(.*?)(?:(?:^|_)\d+)?", re.DOTALL)


def parallel_roles(agents: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Return the roles of PettingZoo's agents, and how many agents each has.

    Consecutive agents whose names differ only in a final number have one role. Characters other
    than letters, digits, - and _ become -. A role that occurs again later gets a number.
    """
    names = []
    for agent in agents:
        match = _ROLE.fullmatch(str(agent))
        assert match is not None, agent
        name = re.sub(r"[^A-Za-z0-9_-]", "-", match[1])
        names.append(name if re.match("[A-Za-z]", name) else f"agent-{name}".rstrip("-"))
    roles: dict[str, int] = {}
    for name, group in itertools.groupby(names):
        number = 1
        while (role := name if number == 1 else f"{name}-{number}") in roles:
            number += 1
        roles[role] = len(list(group))
    return tuple(roles.items())


def _check_one_array(spec: EnvSpec, whose: str) -> None:
    if spec.mask_in_info:
        raise UnsupportedSpaceError(
            f"The info {whose} has an action mask, and masks are read from environments that are "
            "stepped in Python only.\n--action-mask off plays without it."
        )
    if spec.observation.kind == "dict":
        raise UnsupportedSpaceError(
            f"The observation {whose} is {spec.observation.describe()}: expected one array (Box, "
            "Discrete, MultiDiscrete or MultiBinary).\nLet your callable make one array of it."
        )
    if spec.action.parts:
        raise UnsupportedSpaceError(
            f"The action {whose} is {spec.action.describe()}: expected one array (Box, Discrete, "
            "MultiDiscrete or MultiBinary).\nLet your callable take one array."
        )
