"""Reads Gymnasium's spaces, and PettingZoo's games, into a spec."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import KernelEnv
from headrace.errors import ConfigError, UnsupportedSpaceError, UsageError
from headrace.spec import PLAIN, Array, EnvSpec, Space

MASK = "action_mask"
"""What Gymnasium's environments call a mask, in `info` or among observations."""


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
    act_space = _action(action)
    notes: list[str] = []
    if isinstance(observation, gymnasium.spaces.Dict):
        obs_space = _dict(observation, drop_obs_keys, notes)
    elif drop_obs_keys:
        raise ConfigError(
            f"drop_obs_keys={drop_obs_keys}, but {env_id} has no Dict observation: {observation}."
        )
    else:
        obs_space = _leaf("observation", observation, notes, "")
    key = _mask_key(obs_space, act_space, info, action_mask)
    in_info = key == MASK and action_mask in ("auto", "info") and MASK not in dict(obs_space.parts)
    if in_info:
        bits = Space("multi_binary", (sum(act_space.nvec),), "int8")
        parts = obs_space.parts if obs_space.kind == "dict" else ((PLAIN, obs_space),)
        obs_space = Space("dict", parts=(*parts, (MASK, bits)))
    if key:
        notes.append(f"actions are masked by {'info' if in_info else 'the observation'}[{key!r}]")
    return EnvSpec(env_id, obs_space, act_space, key, in_info, notes=tuple(notes))


def read_kernel(env_id: str, env: KernelEnv, **options: Any) -> EnvSpec:
    """Describe a kernel environment's spaces, those of one agent; see `read`."""
    spec = read(env_id, env.observation_space, env.action_space, {}, **options)
    for role, space in (("observation", spec.observation), ("action", spec.action)):
        kinds = ("box",) if role == "observation" else ("box", "discrete", "multi_discrete")
        if space.kind not in kinds or (space.kind == "box" and len(space.shape) != 1):
            raise UnsupportedSpaceError(
                f"The {role} space of the kernel environment {env_id} cannot be used: "
                f"{space.describe()}.\nExpected a Box of one dimension"
                + ("." if role == "observation" else ", Discrete or MultiDiscrete.")
            )
    return replace(spec, kind="kernel", roles=tuple(env.agents.items()))


def read_tensors(
    env_id: str, observation: Any, action: Any, info: Mapping[str, Any], **options: Any
) -> EnvSpec:
    """Describe the spaces of environments that step tensors; args and errors as of `read`."""
    spec = read(env_id, observation, action, info, **options)
    _check_one_array(spec, f"of {env_id}, which steps tensors,")
    return replace(spec, kind="tensor")


def read_parallel(
    env_id: str, env: Any, infos: Mapping[Any, Mapping[str, Any]], **options: Any
) -> EnvSpec:
    """Describe the spaces of a game in PettingZoo's parallel form; see `read`."""
    agents, agent_spaces, notes = list(env.possible_agents), [], []
    if not agents:
        raise UsageError(f"{env_id} has no possible_agents: expected a list of their names.")
    for agent in agents:
        spaces = env.observation_space(agent), env.action_space(agent)
        try:
            spec = read(env_id, *spaces, infos.get(agent, {}), **options)
        except UsageError as error:
            raise type(error)(f"{error}\n(agent {agent} of {env_id})") from None
        _check_one_array(spec, f"of {env_id}, agent {agent},")
        agent_spaces.append((spec.observation, spec.action))
        notes += [note for note in spec.notes if note not in notes]
    if differ := len(set(agent_spaces)) > 1:
        for i, (observation, action) in enumerate(agent_spaces):
            if not i or agent_spaces[i] != agent_spaces[i - 1]:
                notes.append(
                    f"from agent {agents[i]} on: observation {observation.describe()}, "
                    f"action {action.describe()}"
                )
    return EnvSpec(
        env_id, *agent_spaces[0],
        roles=parallel_roles(agents), agent_spaces=tuple(agent_spaces) if differ else (),
        notes=tuple(notes), kind="parallel",
    )  # fmt: skip


def is_parallel(env: Any) -> bool:
    """Return whether it is a game in PettingZoo's parallel form (which need not be installed).

    Raises:
        UsageError: it is in PettingZoo's other form, or does not name its agents.
    """
    if not all(callable(getattr(env, f"{role}_space", None)) for role in ("observation", "action")):
        return False
    if hasattr(env, "agent_iter"):
        raise UsageError(
            f"A {type(env).__name__} is a game in PettingZoo's AEC form, in which agents take "
            "turns.\nExpected its parallel form: parallel_env, or "
            "pettingzoo.utils.aec_to_parallel(env) where that is possible."
        )
    if not hasattr(env, "possible_agents"):
        raise UsageError(
            f"A {type(env).__name__} has spaces for each agent, as PettingZoo's games, and no "
            "possible_agents: expected a list of their names."
        )
    return True


_ROLE = re.compile(r"(.*?)(?:(?:^|_)\d+)?", re.DOTALL)


def parallel_roles(agents: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Return the roles of PettingZoo's agents: names up to a number, of those in sequence.

    A role has letters, digits, - and _, and a number of its own if it comes back after another.
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
            f"The info {whose} has an action mask, and masks are read from Gymnasium's "
            "environments only.\n--action-mask off plays without it."
        )
    if spec.observation.kind == "dict":
        raise UnsupportedSpaceError(
            f"The observation {whose} is {spec.observation.describe()}: expected one array (Box, "
            "Discrete, MultiDiscrete or MultiBinary); action masks are read from Gymnasium's "
            "environments only.\nLet your callable make one array of it."
        )


def flat_mask(mask: Any) -> Array:
    """Flatten a mask to a vector of bool; MultiDiscrete's may be a tuple of one per component."""
    if isinstance(mask, tuple | list):
        mask = np.concatenate([np.asarray(part).ravel() for part in mask])
    bits: Array = np.asarray(mask).ravel() != 0
    return bits


def _mask_key(obs_space: Space, act_space: Space, info: Mapping[str, Any], action_mask: str) -> str:
    count, parts = sum(act_space.nvec), dict(obs_space.parts)
    info_size = flat_mask(info[MASK]).size if MASK in info else None
    if action_mask == "auto":
        fits = MASK in parts and parts[MASK].size == count and parts[MASK].kind != "discrete"
        return MASK if count and (fits or (info_size == count and MASK not in parts)) else ""
    if action_mask == "off":
        return ""
    if not count:
        raise ConfigError(
            f"action_mask={action_mask!r}: masks are for Discrete and MultiDiscrete actions, and "
            f"these are {act_space.describe()}."
        )
    if action_mask == "info":
        key, place, size, keys = MASK, f"info[{MASK!r}]", info_size, sorted(info)
    else:
        key, place, keys = action_mask, f"the observation {action_mask!r}", list(parts)
        size = parts[key].size if key in parts else None
    if size != count:
        actual = f"keys {keys}" if size is None else f"{size} entries"
        raise ConfigError(
            f"action_mask={action_mask!r}: expected {place} with {count} entries, one per choice "
            f"of {act_space.describe()}; got {actual}."
        )
    return key


def _dict(space: Any, drop: tuple[str, ...], notes: list[str]) -> Space:
    if unknown := [key for key in drop if key not in space.spaces]:
        raise ConfigError(
            f"drop_obs_keys={drop}: the observation has no {unknown[0]!r}, its keys are "
            f"{', '.join(space.spaces)}."
        )
    notes += [f"the observation {key!r} ({type(space[key]).__name__}) is dropped" for key in drop]
    kept = [(key, part) for key, part in space.items() if key not in drop]
    if not kept:
        raise ConfigError(f"drop_obs_keys={drop} leaves no observation.")
    parts = tuple((str(key), _leaf(f"observation {key!r}", part, notes, key)) for key, part in kept)
    return Space("dict", parts=parts)


def _leaf(role: str, space: Any, notes: list[str], key: str) -> Space:
    if isinstance(space, gymnasium.spaces.Box):
        # All floats are stored as float32, integers as they are.
        dtype = "float32" if np.issubdtype(space.dtype, np.floating) else str(space.dtype)
        if dtype in ("uint16", "uint32", "uint64"):
            raise _unsupported(role, space, f"dtype {dtype} has no equal in torch", key)
        if space.dtype == np.float64:
            notes.append(f"the {role} is float64, and stored as float32")
        return Space("box", space.shape, dtype)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return Space("multi_binary", space.shape, "int8")
    supported = "Box, Discrete, MultiBinary, MultiDiscrete of one dimension, a Dict of these"
    return _choices(role, space, supported, key)


def _action(space: Any) -> Space:
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return Space("box", space.shape, str(space.dtype), low, high)
    if isinstance(space, gymnasium.spaces.MultiBinary) and len(space.shape) == 1:
        count = space.shape[0]
        return Space("multi_discrete", (count,), "int64", nvec=(2,) * count, start=(0,) * count)
    supported = "Box of floats, Discrete, MultiBinary and MultiDiscrete of one dimension"
    return _choices("action", space, supported, "")


def _choices(role: str, space: Any, supported: str, key: str) -> Space:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Space("discrete", (), "int64", nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, gymnasium.spaces.MultiDiscrete) and len(space.shape) == 1:
        nvec, start = tuple(map(int, space.nvec)), tuple(map(int, space.start))
        return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=start)
    raise _unsupported(role, space, f"supported: {supported}", key)


def _unsupported(role: str, space: Any, reason: str, key: str) -> UnsupportedSpaceError:
    keys = ""
    if isinstance(space, gymnasium.spaces.Dict):
        keys = " with the keys " + ", ".join(f"{key!r}: {part}" for key, part in space.items())
    remedy = "Wrap the environment so that it offers one of these (--wrapper module:callable)"
    if key:
        remedy += f", or leave it out: --drop-obs-keys {key}"
    return UnsupportedSpaceError(
        f"The {role} space cannot be used: {type(space).__name__}{keys or f' {space}'} ({reason})."
        f"\n{remedy}."
    )
