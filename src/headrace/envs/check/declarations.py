"""What the class of a kernel environment declares, read before anything is called.

Left out: what its functions do (`kernel_checks.py`).
"""

import keyword
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np

from headrace.envs.check.plays import spec_of
from headrace.envs.kernels.env import OWN_FIELDS, KernelEnv
from headrace.errors import UsageError

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""Of fields: what NumPy, torch, Numba's CPU and its CUDA target all have."""

_KEPT = ("episode_step", "so_far")
"""Names that a vector's state has besides."""


def problems(env: KernelEnv) -> list[str]:
    """Whatever is wrong, each with what to do."""
    return [*_spaces(env), *_agents(env), *_fields(env), *_functions(env)]


def _spaces(env: KernelEnv) -> Iterator[str]:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.spaces.Space):
            yield f"{name} is {space!r}: expected one of gymnasium.spaces."
            return
    try:
        spec_of(env)
    except UsageError as error:
        yield str(error)


def _agents(env: KernelEnv) -> Iterator[str]:
    for role, count in env.agents.items():
        if not isinstance(count, int) or count < 1:
            yield f"agents[{role!r}] is {count!r}: expected how many play it, 1 or more."
    if env.agent_state and not env.agents:
        yield "agent_state is declared, and agents is {}: declare them, or use state."
    if not isinstance(env.max_episode_steps, int) or env.max_episode_steps < 0:
        yield f"max_episode_steps is {env.max_episode_steps!r}: expected 0 (no limit) or more."


def _fields(env: KernelEnv) -> Iterator[str]:
    groups: dict[str, Mapping[str, Any]] = {
        name: getattr(env, name) for name in ("state", "agent_state", "constants")
    }
    taken = dict.fromkeys(OWN_FIELDS + _KEPT, "what every world has")
    for group, fields in groups.items():
        for name, of in fields.items():
            if name in taken:
                yield f"{group}[{name!r}]: the name is taken by {taken[name]}. Use another."
            taken[name] = group
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
                yield f"{group}[{name!r}]: expected a name as in w.position, without _ in front."
            yield from _constant(name, of) if group == "constants" else _dtype(group, name, of)
    for name in env.scratch:
        if name not in env.state and name not in env.agent_state:
            yield f"scratch names {name!r}, which neither state nor agent_state has."


def _constant(name: str, of: Any) -> Iterator[str]:
    if not isinstance(of, np.generic | np.ndarray):
        kind = "int32" if isinstance(of, int) else "float32"
        yield f"constants[{name!r}] is {of!r}: expected a number with a dtype, np.{kind}({of!r})."
    elif of.dtype.name not in (*DTYPES, "uint64"):
        yield f"constants[{name!r}] is {of.dtype}: expected one of {', '.join(DTYPES)}."


def _dtype(group: str, name: str, of: Any) -> Iterator[str]:
    dtype, shape = of if isinstance(of, tuple) and len(of) == 2 else (of, ())
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
            yield f'{group} is the text {names!r}: expected names in a tuple, ("{names}",).'
            continue
        if (count := [*names].count("observe")) != (group == "phases"):
            wanted = "once" if group == "phases" else "not: it is called after a reset anyway"
            yield f"{group} names observe {count} times: expected {wanted}."
        for name in dict.fromkeys(names):
            try:
                env.per_agent(name)
            except UsageError as error:
                yield str(error)
