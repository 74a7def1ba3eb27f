"""Generates the text of the program that steps a kernel environment, for the CPU or the GPU.

Both programs have the same sections in the same order. On the CPU a section is a loop over agents
within a loop over environments. On a GPU each agent is a lane of a block, and a barrier ends each
section.
"""

from collections.abc import Sequence
from textwrap import indent
from typing import Literal, NamedTuple

import numpy as np
import torch

from headrace.batch import Column
from headrace.envs.kernels.env import KernelEnv
from headrace.spec import Agents, EnvSpec

Scope = Literal["env", "agent"]

THREADS = 128
"""Threads of a block on a GPU: several environments, or one whose agents share the threads."""


class ProgramSpec:
    """All that the program's text depends on.

    Attributes:
        autoreset: whether a step begins the next episode where one has ended.
        world: shape (without the axis of environments) and dtype of the world's arrays, by name.
        by_agent: names of the functions that are called for each agent.
        action_parts: numbers of an action; 0: a single number, without an axis.
        lanes: on a GPU, threads of one environment, a power of 2. A block has a multiple of them.
    """

    def __init__(
        self, env: KernelEnv, env_spec: EnvSpec, parts: tuple[Agents, ...], *, autoreset: bool
    ) -> None:
        action = env_spec.action
        self.parts, self.autoreset = parts, autoreset
        self.num_agents, self.has_agents = env.num_agents, bool(env.agents)
        self.is_box, self.obs_size = action.kind == "box", env_spec.given.size
        self.max_episode_steps = env.max_episode_steps
        self.action_parts = 0 if action.kind == "discrete" else action.size
        self.lanes = min(THREADS, 1 << (env.num_agents - 1).bit_length())
        self.resets, self.phases = env.resets, env.phases
        self.by_agent = {name for name in env.functions() if env.per_agent(name)}
        agents = (env.num_agents,) if env.agents else ()
        parts_of_action = (action.size,) if self.action_parts else ()
        self.world: dict[str, Column] = {
            "env_id": ((), torch.int64),
            "episode": ((), torch.int64),
            "step": ((), torch.int32),
            "terminated": ((), torch.bool),
            "action": (agents + parts_of_action, torch.float32 if self.is_box else torch.int64),
            "reward": (agents, torch.float32),
        }
        if env.agents:
            self.world["alive"] = (agents, torch.bool)
        for lead, fields in (((), env.state), ((env.num_agents,), env.agent_state)):
            for name, field in fields.items():
                dtype, shape = field if isinstance(field, tuple) else (field, ())
                self.world[name] = (lead + shape, getattr(torch, np.dtype(dtype).name))
        self.names = (*self.world, *env.constants, "seed")


ROWS = (
    "obs", "action", "reward", "terminated", "truncated", "valid", "final_obs", "final_step",
)  # fmt: skip
"""The columns of a fragment that the program reads or writes."""

BUFFERS = (
    "ended", "num_truncated", "episode_return", "was_alive", "ended_return", "ended_length",
    "scale", "shift", "low", "high",
)  # fmt: skip
"""The other arrays of the program; see `KernelVector`."""


class _Section(NamedTuple):
    """Lines that run for each environment, or for each agent (of one part, or of all)."""

    scope: Scope
    lines: str
    part: int | None = None
    condition: str = ""


def generate(spec: ProgramSpec, target: Literal["cpu", "cuda"]) -> str:
    """Return the program: the functions `begin` and `step`, and the types of their arguments.

    `begin(w, b, rows, ...)` begins an episode where `b.ended`, and writes row 0 of observations
    there. `step(w, b, rows, t, ...)` runs step t. On the CPU `...` is the range of environments
    (first, end); on a GPU it is their number.
    """
    names = ", ".join(f"r{p}" for p in range(len(spec.parts)))
    lines = [
        "from collections import namedtuple\n",
        f"World = namedtuple('World', {spec.names!r})",
        f"Buffers = namedtuple('Buffers', {BUFFERS!r})",
        f"Rows = namedtuple('Rows', {ROWS!r})\n",
        _function(spec, target, f"begin(w, b, {names}, ", _reset(spec, "0")),
        _function(spec, target, f"step(w, b, {names}, t, ", _step(spec)),
    ]
    return "\n".join(lines)


def _step(spec: ProgramSpec) -> list[_Section]:
    agent = "[e, i]" if spec.has_agents else "[e]"
    limit = spec.max_episode_steps
    sections = [_Section("env", "w.step[e] += 1\nw.terminated[e] = False")]
    for p in range(len(spec.parts)):
        lines = [*_read_action(spec, p), f"w.reward{agent} = 0"]
        if spec.has_agents:
            lines.append("b.was_alive[e, i] = w.alive[e, i]")
        sections.append(_Section("agent", "\n".join(lines), p))
    for function in spec.phases:
        sections += _call(spec, function, "t + 1")
    ended = "w.terminated[e]" + (f" or w.step[e] >= {limit}" if limit else "")
    sections.append(_Section("env", f"b.ended[e] = {ended}"))
    sections += [_Section("agent", _write_rows(spec, p), p) for p in range(len(spec.parts))]
    sections.append(_Section("env", _count_episode(spec)))
    return [*sections, *(_reset(spec, "t + 1") if spec.autoreset else [])]


def _read_action(spec: ProgramSpec, p: int) -> list[str]:
    """Convert the policy's action to the environment's: see `spec.ActionCodec`."""
    to, source = "w.action[e, i" if spec.has_agents else "w.action[e", f"r{p}.action[t, row"
    if not spec.action_parts:
        return [f"{to}] = {source}] + b.shift[0]"]
    value = f"{source}, c]" + (" * b.scale[c] + b.shift[c]" if spec.is_box else " + b.shift[c]")
    if spec.is_box:
        value = f"min(max({value}, b.low[c]), b.high[c])"
    return [f"for c in range({spec.action_parts}):", f"    {to}, c] = {value}"]


def _write_rows(spec: ProgramSpec, p: int) -> str:
    limit, row = spec.max_episode_steps, f"r{p}"
    if spec.has_agents:
        agent, valid, alive = "[e, i]", "b.was_alive[e, i]", "w.alive[e, i]"
        terminated = f"{valid} and (w.terminated[e] or not {alive})"
        truncated = f"{alive} and b.ended[e] and not w.terminated[e]"
    else:
        agent, valid = "[e]", "True"
        terminated, truncated = "w.terminated[e]", "b.ended[e] and not w.terminated[e]"
    lines = [
        f"{row}.reward[t, row] = w.reward{agent}",
        f"{row}.valid[t, row] = {valid}",
        f"{row}.terminated[t, row] = {terminated}",
        f"{row}.truncated[t, row] = {truncated if limit else 'False'}",
        f"b.episode_return[e, i] += w.reward{agent}",
    ]
    if limit and spec.autoreset:
        lines += [
            f"if {truncated}:",
            f"    slot = b.num_truncated[e] * {row}.reward.shape[1] + row",
            f"    {row}.final_step[slot] = t",
            f"    for f in range({spec.obs_size}):",
            f"        {row}.final_obs[slot, f] = {row}.obs[t + 1, row, f]",
        ]
    return "\n".join(lines)


def _count_episode(spec: ProgramSpec) -> str:
    lines = ["b.ended_length[t, e] = 0", "if b.ended[e]:", "    b.ended_length[t, e] = w.step[e]"]
    if spec.max_episode_steps:
        lines += ["    if not w.terminated[e]:", "        b.num_truncated[e] += 1"]
    for p, part in enumerate(spec.parts):
        lines += [
            "    total = 0.0",
            f"    for i in range({part.first}, {part.first + part.size}):",
            "        total += b.episode_return[e, i]",
            f"    b.ended_return[t, e, {p}] = total / {part.size}",
        ]
    return "\n".join(lines)


def _reset(spec: ProgramSpec, row: str) -> list[_Section]:
    agents = "b.episode_return[e, i] = 0" + ("\nw.alive[e, i] = True" if spec.has_agents else "")
    sections = [_Section("env", "w.episode[e] += 1\nw.step[e] = 0"), _Section("agent", agents)]
    for function in (*spec.resets, "observe"):
        sections += _call(spec, function, row)
    return [section._replace(condition="b.ended[e]") for section in sections]


def _call(spec: ProgramSpec, function: str, row: str) -> list[_Section]:
    scope: Scope = "agent" if function in spec.by_agent else "env"
    # The prefix keeps it from hiding another name
    call = f"env_{function}(w, e" + (", i" if scope == "agent" else "")
    if function != "observe":
        return [_Section(scope, f"{call})")]
    return [_Section("agent", f"{call}, r{p}.obs[{row}, row])", p) for p in range(len(spec.parts))]


def _function(spec: ProgramSpec, target: str, head: str, sections: Sequence[_Section]) -> str:
    if target == "cpu":
        body = "".join(_cpu_section(spec, section) for section in sections)
        return f"def {head}first, end):\n    for e in range(first, end):\n" + indent(body, " " * 8)
    body = (
        f"lane = cuda.threadIdx.x % {spec.lanes}\n"
        f"envs_per_block = cuda.blockDim.x // {spec.lanes}\n"
        f"e = cuda.blockIdx.x * envs_per_block + cuda.threadIdx.x // {spec.lanes}\n"
        "has_env = e < num_envs\n"
    )
    body += "".join(_gpu_section(spec, section) for section in sections)
    return f"def {head}num_envs):\n" + indent(body, " " * 4)


def _cpu_section(spec: ProgramSpec, section: _Section) -> str:
    lines = _agent_loop(spec, section, 1) if section.scope == "agent" else section.lines
    if section.condition:
        lines = f"if {section.condition}:\n" + indent(lines, " " * 4)
    return lines + "\n"


def _gpu_section(spec: ProgramSpec, section: _Section) -> str:
    condition = "has_env" + (f" and {section.condition}" if section.condition else "")
    lines = section.lines
    if section.scope == "agent":
        lines = _agent_loop(spec, section, spec.lanes)
    elif spec.lanes > 1:
        condition += " and lane == 0"
    barrier = "cuda.syncthreads()\n" if spec.lanes > 1 else ""
    return f"if {condition}:\n" + indent(lines, " " * 4) + f"\n{barrier}"


def _agent_loop(spec: ProgramSpec, section: _Section, lanes: int) -> str:
    """Run the section's lines for each of its agents, shared among the lanes of an environment."""
    part = section.part
    first, count = (0, spec.num_agents) if part is None else spec.parts[part]
    row = "" if part is None else f"    row = e * {count} + (i - {first})\n"
    end = first + count
    steps = f"{first}, {end}" if lanes == 1 else f"{first} + lane, {end}, {lanes}"
    return f"for i in range({steps}):\n{row}" + indent(section.lines, " " * 4)
