"""Checks the declarations of a kernel environment's class, without calling its functions."""

import keyword
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.check.plays import kernel_spec
from headrace.envs.kernels.env import BUILTIN_FIELDS, KernelEnv
from headrace.errors import UsageError

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""Dtypes of fields: those that NumPy, torch, and Numba's CPU and CUDA targets all have."""

_STATE_NAMES = ("episode_step", "so_far")
"""Further names in the state of a vector."""


def find_problems(env: KernelEnv) -> list[str]:
    """Return all that is wrong, each with what to do."""
    return [*_spaces(env), *_agents(env), *_fields(env), *_functions(env)]


def _spaces(env: KernelEnv) -> Iterator[str]:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.spaces.Space):
            yield f"{name} is {space!r}: expected one of gymnasium.spaces."
            return
    try:
        kernel_spec(env)
    except UsageError as error:
        yield str(error)


def _agents(env: KernelEnv) -> Iterator[str]:
    for role, count in env.agents.items():
        if not isinstance(count, int) or count < 1:
            yield f"agents[{role!r}] is {count!r}: expected the number of agents, 1 or more."
    if env.agent_state and not env.agents:
        yield "agent_state is declared, but agents is {}: declare agents, or use state."
    if not isinstance(env.max_episode_steps, int) or env.max_episode_steps < 0:
        yield f"max_episode_steps is {env.max_episode_steps!r}: expected 0 (no limit) or more."


def _fields(env: KernelEnv) -> Iterator[str]:
    groups: dict[str, Mapping[str, Any]] = {
        name: getattr(env, name) for name in ("state", "agent_state", "constants")
    }
    taken = dict.fromkeys(BUILTIN_FIELDS + _STATE_NAMES, "every world")
    for group, fields in groups.items():
        for name, value in fields.items():
            if name in taken:
                yield f"{group}[{name!r}]: the name is in use, by {taken[name]}. Use another."
            taken[name] = group
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
                yield f"{group}[{name!r}]: expected a name as in w.position, without _ in front."
            if group == "constants":
                yield from _constant(name, value)
            else:
                yield from _dtype(group, name, value)
    for name in env.scratch:
        if name not in env.state and name not in env.agent_state:
            yield f"scratch names {name!r}, which neither state nor agent_state has."


def _constant(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, np.generic | np.ndarray):
        kind = "int32" if isinstance(value, int) else "float32"
        number = f"np.{kind}({value!r})"
        yield f"constants[{name!r}] is {value!r}: expected a number with a dtype, {number}."
    elif value.dtype.name not in (*DTYPES, "uint64"):
        yield f"constants[{name!r}] is {value.dtype}: expected one of {', '.join(DTYPES)}."


def _dtype(group: str, name: str, value: Any) -> Iterator[str]:
    dtype, shape = value if isinstance(value, tuple) and len(value) == 2 else (value, ())
    try:
        kind = np.dtype(dtype).name
    except TypeError:
        kind = repr(dtype)
    if kind not in DTYPES:
        yield f"{group}[{name!r}] is {kind}: expected one of {', '.join(DTYPES)}."
    if not isinstance(shape, tuple) or not all(isinstance(k, int) and k > 0 for k in shape):
        yield f"{group}[{name!r}] has the shape {shape!r}: expected whole numbers, as in (3,)."


def _functions(env: KernelEnv) -> Iterator[str]:
    for group in ("resets", "phases"):
        names: Iterable[str] = getattr(env, group)
        if isinstance(names, str):
            yield f'{group} is the string {names!r}: expected names in a tuple, ("{names}",).'
            continue
        if (count := [*names].count("observe")) != (group == "phases"):
            expected = "once" if group == "phases" else "none: it is called after a reset anyway"
            yield f"{group} names observe {count} times: expected {expected}."
        for name in dict.fromkeys(names):
            try:
                env.per_agent(name)
            except UsageError as error:
                yield str(error)
