"""Reads Gymnasium's spaces, and PettingZoo's games, into a spec."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.kernels.env import KernelEnv
from headrace.errors import ConfigError, UnsupportedSpaceError, UsageError
from headrace.spec import Array, EnvSpec, KeyPath, Space

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
    if isinstance(observation, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        mask = {"auto": MASK, "off": "", "info": ""}.get(action_mask, action_mask)
        obs_space = _Parts(drop_obs_keys, notes, mask, act_space).read(observation)
    elif drop_obs_keys:
        raise ConfigError(
            f"drop_obs_keys={drop_obs_keys}, but {env_id} has no Dict or Tuple observation: "
            f"{observation}."
        )
    else:
        obs_space = _leaf("observation", observation, notes)
    key = _mask_key(obs_space, act_space, info, action_mask)
    in_info = key == MASK and action_mask in ("auto", "info") and MASK not in dict(obs_space.parts)
    if in_info:
        parts = (*obs_space.leaves, (MASK, _bits(act_space)))
        paths = (*obs_space.paths, (MASK,)) if obs_space.paths else ()
        obs_space = Space("dict", parts=parts, paths=paths)
    if key:
        notes.append(f"actions are masked by {'info' if in_info else 'the observation'}[{key!r}]")
    return EnvSpec(env_id, obs_space, act_space, key, in_info, notes=tuple(notes))


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
    if spec.action.parts:
        raise UnsupportedSpaceError(
            f"The action {whose} is {spec.action.describe()}: expected one array (Box, Discrete, "
            "MultiDiscrete or MultiBinary); Dict and Tuple actions are for Gymnasium's "
            "environments only.\nLet your callable take one array."
        )


def mask_array(mask: Any, action: Space) -> Array:
    """Return an action mask as one array, with the bits of several arrays side by side.

    The mask of a MultiDiscrete may be a tuple of one per component. That of a Dict or Tuple may be
    one of masks, with the structure of the actions; there is none for a Box.

    Raises:
        KeyError, IndexError: a part of `action` has choices and no mask.
    """
    if action.parts and isinstance(mask, Mapping | tuple):
        keys: Iterable[Any] = range(len(action.parts))
        if isinstance(mask, Mapping):
            keys = (key for key, _ in action.parts)
        mask = [
            mask_array(mask[key], part)
            for key, (_, part) in zip(keys, action.parts, strict=True)
            if part.nvec
        ]
    if isinstance(mask, tuple | list) and any(np.ndim(part) for part in mask):
        mask = np.concatenate([np.asarray(part) for part in mask], -1)
    return np.asarray(mask)


def has_choices(action: Any) -> bool:
    """Return whether a space of actions has choices, for which there may be a mask."""
    if isinstance(action, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return any(has_choices(part) for _, part in _inner(action, "action"))
    if isinstance(action, gymnasium.spaces.Box):
        return not np.issubdtype(action.dtype, np.floating)
    return isinstance(action, gymnasium.spaces.MultiBinary) or _choices(action) is not None


def flat_mask(mask: Any, action: Space) -> Array:
    """Flatten a mask, of any form that `mask_array` takes, to a vector of bool."""
    bits: Array = mask_array(mask, action).ravel() != 0
    return bits


def _bits(action: Space) -> Space:
    return Space("multi_binary", (sum(action.nvec),), "int8")


def _mask_key(obs_space: Space, act_space: Space, info: Mapping[str, Any], action_mask: str) -> str:
    count, parts = sum(act_space.nvec), dict(obs_space.parts)
    info_size = flat_mask(info[MASK], act_space).size if MASK in info else None
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


class _Parts:
    """Reads the parts of a Dict or Tuple observation, nested as it may be, into one flat Dict.

    Args:
        drop: paths, or heads of paths, of parts that are not wanted.
        notes: gets a line for each part that is left out or changed.
        mask: key of a mask for `action`, which may be a Dict or Tuple; "": there is none.
    """

    def __init__(self, drop: tuple[str, ...], notes: list[str], mask: str, action: Space) -> None:
        self._drop, self._notes, self._mask, self._action = drop, notes, mask, action
        self._dropped: set[str] = set()
        self._parts: dict[str, tuple[KeyPath, Space]] = {}

    def read(self, space: Any) -> Space:
        """Return the flat Dict. Errors are those of `spaces.read`."""
        self._add_all(space, ())
        if unknown := [key for key in self._drop if key not in self._dropped]:
            raise ConfigError(
                f"drop_obs_keys={self._drop}: the observation has no {unknown[0]!r}, its keys are "
                f"{', '.join(self._parts)}."
            )
        if not self._parts and self._drop:
            raise ConfigError(f"drop_obs_keys={self._drop} leaves no observation.")
        if not self._parts:
            raise _unsupported("observation", space, _NO_NUMBERS)
        paths = tuple(path for path, _ in self._parts.values())
        flat = all(path == (key,) for path, key in zip(paths, self._parts, strict=True))
        parts = tuple((key, part) for key, (_, part) in self._parts.items())
        return Space("dict", parts=parts, paths=() if flat else paths)

    def _add_all(self, space: Any, path: KeyPath) -> None:
        for step, part in _inner(space, "observation"):
            self._add(part, (*path, step))

    def _add(self, space: Any, path: KeyPath) -> None:
        key = ".".join(map(str, path))
        is_nested = isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple)
        name = f"observation {key!r}"
        if key in self._drop:
            self._dropped.add(key)
            self._notes.append(f"the {name} ({type(space).__name__}) is dropped")
        elif is_nested and key == self._mask and self._is_mask(space):
            self._put(key, path, _bits(self._action))
        elif is_nested:
            self._add_all(space, path)
        elif reason := _why_not(space):
            self._notes.append(f"the {name} ({type(space).__name__}) is left out: {reason}")
        else:
            self._put(key, path, _leaf(name, space, self._notes))

    def _is_mask(self, space: Any) -> bool:
        try:
            bits = mask_array(_zeros(space), self._action)
        except (KeyError, IndexError, ValueError):
            return False
        return bool(bits.shape == (sum(self._action.nvec),))

    def _put(self, key: str, path: KeyPath, space: Space) -> None:
        if key in self._parts:
            raise UnsupportedSpaceError(
                f"Two parts of the observation would be stored as {key!r}: {self._parts[key][0]} "
                f"and {path}.\nGive one of these keys another name, without a dot."
            )
        self._parts[key] = path, space


def _inner(space: Any, role: str) -> list[tuple[str | int, Any]]:
    """Return (key or index, space) of each part of a Dict or Tuple."""
    if isinstance(space, gymnasium.spaces.Tuple):
        return list(enumerate(space.spaces))
    for key in space.spaces:
        if not isinstance(key, str) or not key:
            raise UnsupportedSpaceError(
                f"The {role} space has the key {key!r}: expected a string that is not empty.\n"
                "Give this part another key."
            )
    return list(space.spaces.items())


def _zeros(space: Any) -> Any:
    """Return an element of a nested space, of zeros."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _zeros(part) for key, part in space.items()}
    if isinstance(space, gymnasium.spaces.Tuple):
        return tuple(_zeros(part) for part in space)
    return np.zeros(space.shape or ())


_NO_NUMBERS = "a policy takes numbers of a fixed shape"
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""torch computes little with these: the dtype in which they are stored."""


def _why_not(space: Any) -> str:
    """Return why an observation, which is no Dict or Tuple, is not supported; "" if it is."""
    if isinstance(space, gymnasium.spaces.Box):
        is_too_wide = space.dtype == np.uint64 and bool((space.high >= 2**63).any())
        return "torch has no integers above 2**63 - 1" if is_too_wide else ""
    is_supported = isinstance(space, gymnasium.spaces.MultiBinary) or _choices(space) is not None
    return "" if is_supported else _NO_NUMBERS


def _leaf(role: str, space: Any, notes: list[str]) -> Space:
    if reason := _why_not(space):
        raise _unsupported(role, space, reason)
    if isinstance(space, gymnasium.spaces.Box):
        # All floats are stored as float32, integers as they are.
        given = str(space.dtype)
        is_float = np.issubdtype(space.dtype, np.floating)
        dtype = "float32" if is_float else _WIDER.get(given, given)
        if given in ("float64", *_WIDER):
            notes.append(f"the {role} is {given}, and stored as {dtype}")
        return Space("box", space.shape, dtype)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return Space("multi_binary", space.shape, "int8")
    choices = _choices(space)
    assert choices is not None, space
    return choices


_MOST_CHOICES = 1000  # of a whole number of a Box
_MOST_EXACT = 2**24  # float32 holds no larger integers exactly


def _action(space: Any, name: str = "action") -> Space:
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return _product(space, name)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (tuple(map(float, bound.ravel())) for bound in (space.low, space.high))
        return Space("box", space.shape, str(space.dtype), low, high)
    if isinstance(space, gymnasium.spaces.Box):
        start, last = ([int(x) for x in bound.ravel()] for bound in (space.low, space.high))
        nvec = tuple(end - first + 1 for first, end in zip(start, last, strict=True))
        if max(nvec, default=0) > _MOST_CHOICES:
            reason = f"each whole number is a choice, and {max(nvec)} are more than {_MOST_CHOICES}"
            raise _unsupported(name, space, reason)
        return Space("multi_discrete", space.shape, str(space.dtype), nvec=nvec, start=tuple(start))
    if isinstance(space, gymnasium.spaces.MultiBinary):
        nvec = (2,) * int(np.prod(space.shape))
        return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=(0,) * len(nvec))
    if choices := _choices(space):
        return choices
    raise _unsupported(name, space, "a policy gives numbers of a fixed shape")


def _product(space: Any, name: str) -> Space:
    """Read a Dict or Tuple of actions."""
    of = [(str(key), _action(part, f"action {key!r}")) for key, part in _inner(space, "action")]
    nvec = tuple(itertools.chain.from_iterable(part.nvec for _, part in of))
    start = tuple(itertools.chain.from_iterable(part.start for _, part in of))
    if max(nvec, default=0) > _MOST_EXACT:
        raise _unsupported(name, space, f"{max(nvec)} choices are more than {_MOST_EXACT}")
    if not of:
        raise _unsupported(name, space, "it has no parts")
    kind = "dict" if isinstance(space, gymnasium.spaces.Dict) else "tuple"
    size = sum(part.size for _, part in of)
    return Space(kind, (size,), "float64", nvec=nvec, start=start, parts=tuple(of))  # type: ignore[arg-type]


def _choices(space: Any) -> Space | None:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Space("discrete", (), "int64", nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        nvec, start = (tuple(map(int, of.ravel())) for of in (space.nvec, space.start))
        return Space("multi_discrete", space.shape, "int64", nvec=nvec, start=start)
    return None


def _unsupported(role: str, space: Any, reason: str) -> UnsupportedSpaceError:
    """Describe in one line what cannot be used, and in another one what to do."""
    if role.startswith("action"):
        remedy = (
            "gymnasium.wrappers.TransformAction can offer another space, in a function of yours "
            "(--wrapper module:function)"
        )
    elif _flattens(space):
        remedy = (
            "gymnasium.wrappers.FlattenObservation makes numbers of it: "
            "--wrapper gymnasium.wrappers:FlattenObservation"
        )
    else:
        remedy = (
            "gymnasium.wrappers.TransformObservation can make numbers of it, in a function of "
            "yours (--wrapper module:function)"
        )
    return UnsupportedSpaceError(f"The {role} space cannot be used: {space} ({reason}).\n{remedy}.")


def _flattens(space: Any) -> bool:
    """Return whether Gymnasium can make one array of it, of numbers that a policy takes."""
    try:
        flat = gymnasium.spaces.flatten_space(space)
        return isinstance(flat, gymnasium.spaces.Box) and flat.dtype != np.uint64
    except (NotImplementedError, ValueError):  # of a custom space; of no parts
        return False
