"""From Gymnasium's spaces to a spec. Left out: making environments (`factory.py`)."""

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

    Args:
        env_id: its name.
        observation: Gymnasium's space of observations.
        action: of actions.
        info: what a reset gave: it may hold an action mask.
        drop_obs_keys: keys of a Dict observation that nobody looks at.
        action_mask: `auto` (an observation or info called `action_mask` that fits the actions),
            `off`, `info`, or the key of an observation.

    Raises:
        UnsupportedSpaceError: naming the space and its key.
        ConfigError: there is no such key, or no such mask.
    """
    acts = _action(action)
    notes: list[str] = []
    if isinstance(observation, gymnasium.spaces.Dict):
        sees = _dict(observation, drop_obs_keys, notes)
    elif drop_obs_keys:
        raise ConfigError(
            f"drop_obs_keys={drop_obs_keys}, but {env_id} has no Dict observation: {observation}."
        )
    else:
        sees = _leaf("observation", observation, notes, "")
    key = _mask_key(sees, acts, info, action_mask)
    in_info = key == MASK and action_mask in ("auto", "info") and MASK not in dict(sees.parts)
    if in_info:
        bits = Space("multi_binary", (sum(acts.nvec),), "int8")
        parts = sees.parts if sees.kind == "dict" else ((PLAIN, sees),)
        sees = Space("dict", parts=(*parts, (MASK, bits)))
    if key:
        notes.append(f"actions are masked by {'info' if in_info else 'the observation'}[{key!r}]")
    return EnvSpec(env_id, sees, acts, key, in_info, notes=tuple(notes))


def of_kernel(
    env_id: str,
    env: KernelEnv,
    *,
    drop_obs_keys: tuple[str, ...] = (),
    action_mask: str = "auto",
) -> EnvSpec:
    """Describe a kernel environment's spaces, those of one agent; args and errors as of `read`."""
    spec = read(
        env_id, env.observation_space, env.action_space, {},
        drop_obs_keys=drop_obs_keys, action_mask=action_mask,
    )  # fmt: skip
    for role, space in (("observation", spec.observation), ("action", spec.action)):
        boxes = ("box",) if role == "observation" else ("box", "discrete", "multi_discrete")
        if space.kind not in boxes or (space.kind == "box" and len(space.shape) != 1):
            raise UnsupportedSpaceError(
                f"The {role} space of the kernel environment {env_id} cannot be used: "
                f"{space.describe()}.\nExpected a Box of one dimension"
                + ("." if role == "observation" else ", Discrete or MultiDiscrete.")
            )
    return replace(spec, kind="kernel", roles=tuple(env.agents.items()))


def of_tensors(
    env_id: str, observation: Any, action: Any, info: Mapping[str, Any], **options: Any
) -> EnvSpec:
    """Describe the spaces of environments that step tensors; args and errors as of `read`."""
    spec = read(env_id, observation, action, info, **options)
    _check_one_array(spec, f"of {env_id}, which steps tensors,")
    return replace(spec, kind="tensor")


def of_parallel(
    env_id: str, env: Any, infos: Mapping[Any, Mapping[str, Any]], **options: Any
) -> EnvSpec:
    """Describe the spaces of a game in PettingZoo's parallel form.

    Args:
        env_id: its name.
        env: the game.
        infos: what a reset gave, by agent.
        **options: as of `read`.

    Raises:
        UnsupportedSpaceError, ConfigError: as of `read`.
    """
    agents, of_each, notes = list(env.possible_agents), [], []
    if not agents:
        raise UsageError(f"{env_id} has no possible_agents: expected a list of their names.")
    for agent in agents:
        its = env.observation_space(agent), env.action_space(agent)
        try:
            spec = read(env_id, *its, infos.get(agent, {}), **options)
        except UsageError as error:
            raise type(error)(f"{error}\n(agent {agent} of {env_id})") from None
        _check_one_array(spec, f"of {env_id}, agent {agent},")
        of_each.append((spec.observation, spec.action))
        notes += [note for note in spec.notes if note not in notes]
    roles = parallel_roles(agents)
    if differ := len(set(of_each)) > 1:
        for i, (observation, action) in enumerate(of_each):
            if not i or of_each[i] != of_each[i - 1]:
                seen, done = observation.describe(), action.describe()
                notes.append(f"from agent {agents[i]} on: observation {seen}, action {done}")
    return EnvSpec(
        env_id, *of_each[0],
        roles=roles, of_each=tuple(of_each) if differ else (), notes=tuple(notes), kind="parallel",
    )  # fmt: skip


def is_parallel(env: Any) -> bool:
    """Whether it is a game in PettingZoo's parallel form; that package need not be there.

    Raises:
        UsageError: it is in its other form, or does not name its agents.
    """
    if not (
        callable(getattr(env, "observation_space", None))
        and callable(getattr(env, "action_space", None))
    ):
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
    """Roles of PettingZoo's agents: names up to a number, of those that follow each other.

    A role is the name of a policy, and of its files: of letters, digits, - and _. One that comes
    back after another gets a number of its own.
    """
    names = []
    for agent in agents:
        found = _ROLE.fullmatch(str(agent))
        assert found is not None, agent
        name = re.sub(r"[^A-Za-z0-9_-]", "-", found[1])
        names.append(name if re.match("[A-Za-z]", name) else f"agent-{name}".rstrip("-"))
    roles: dict[str, int] = {}
    for name, group in itertools.groupby(names):
        number = 1
        while (role := name if number == 1 else f"{name}-{number}") in roles:
            number += 1
        roles[role] = len(list(group))
    return tuple(roles.items())


def _check_one_array(spec: EnvSpec, whose: str) -> None:
    """Where rows are written many at a time there are no keys: UnsupportedSpaceError."""
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
    """A mask as one vector of 0 and 1; MultiDiscrete's may be a tuple of one per component."""
    if isinstance(mask, tuple | list):
        mask = np.concatenate([np.asarray(part).ravel() for part in mask])
    bits: Array = np.asarray(mask).ravel() != 0
    return bits


def _mask_key(sees: Space, acts: Space, info: Mapping[str, Any], wanted: str) -> str:
    """Where the mask is stored; "" for none."""
    count = sum(acts.nvec)
    parts = dict(sees.parts)
    if wanted == "auto":
        fits = MASK in parts and parts[MASK].size == count and parts[MASK].kind != "discrete"
        in_info = MASK in info and flat_mask(info[MASK]).size == count
        return MASK if count and (fits or (in_info and MASK not in parts)) else ""
    if wanted == "off":
        return ""
    if not count:
        raise ConfigError(
            f"action_mask={wanted!r}: masks are for Discrete and MultiDiscrete actions, and these "
            f"are {acts.describe()}."
        )
    if wanted == "info":
        size = flat_mask(info[MASK]).size if MASK in info else None
        given = f"keys {sorted(info)}" if size is None else f"{size} entries"
    else:
        size = parts[wanted].size if wanted in parts else None
        given = f"keys {[key for key, _ in sees.parts]}" if size is None else f"{size} entries"
    if size != count:
        where = f"info[{MASK!r}]" if wanted == "info" else f"the observation {wanted!r}"
        raise ConfigError(
            f"action_mask={wanted!r}: expected {where} with {count} entries, one per choice of "
            f"{acts.describe()}; got {given}."
        )
    return MASK if wanted == "info" else wanted


def _dict(space: Any, drop: tuple[str, ...], notes: list[str]) -> Space:
    unknown = [key for key in drop if key not in space.spaces]
    if unknown:
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
    match space:
        case gymnasium.spaces.Box():
            # Floats are stored as float32 whatever they are declared as; integers as they are.
            dtype = "float32" if np.issubdtype(space.dtype, np.floating) else str(space.dtype)
            if dtype in ("uint16", "uint32", "uint64"):
                raise _unsupported(role, space, f"dtype {dtype} has no equal in torch", key)
            if space.dtype == np.float64:
                notes.append(f"the {role} is float64, and stored as float32")
            return Space("box", space.shape, dtype)
        case gymnasium.spaces.MultiBinary():
            return Space("multi_binary", space.shape, "int8")
    if (choices := _choices(space)) is not None:
        return choices
    raise _unsupported(
        role,
        space,
        "supported: Box, Discrete, MultiBinary, MultiDiscrete of one dimension, a Dict of these",
        key,
    )


def _choices(space: Any) -> Space | None:
    match space:
        case gymnasium.spaces.Discrete():
            return Space("discrete", (), "int64", nvec=(int(space.n),), start=(int(space.start),))
        case gymnasium.spaces.MultiDiscrete() if len(space.shape) == 1:
            nvec = tuple(int(n) for n in space.nvec)
            start = tuple(int(n) for n in space.start)
            return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=start)
    return None


def _action(space: Any) -> Space:
    match space:
        case gymnasium.spaces.Box() if np.issubdtype(space.dtype, np.floating):
            low = tuple(float(x) for x in space.low.ravel())
            high = tuple(float(x) for x in space.high.ravel())
            return Space("box", space.shape, str(space.dtype), low, high)
        case gymnasium.spaces.MultiBinary() if len(space.shape) == 1:
            count = len(space.sample())
            return Space("multi_discrete", (count,), "int64", nvec=(2,) * count, start=(0,) * count)
    if (choices := _choices(space)) is not None:
        return choices
    raise _unsupported(
        "action", space, "supported: Box of floats, Discrete, MultiBinary and MultiDiscrete of one "
        "dimension", "",
    )  # fmt: skip


def _unsupported(role: str, space: Any, why: str, key: str) -> UnsupportedSpaceError:
    keys = ""
    if isinstance(space, gymnasium.spaces.Dict):
        keys = " with the keys " + ", ".join(f"{key!r}: {part}" for key, part in space.items())
    remedy = "Wrap the environment so that it offers one of these (--wrapper module:callable)"
    if key:
        remedy += f", or leave it out: --drop-obs-keys {key}"
    return UnsupportedSpaceError(
        f"The {role} space cannot be used: {type(space).__name__}{keys or f' {space}'} ({why}).\n"
        f"{remedy}."
    )
