"""The text of the program that steps a kernel environment: one for the CPU, one for the GPU.

Both are made of the same sections, in the same order. On the CPU a section is a loop over agents
within a loop over environments; on a GPU each agent is a lane of a block, and sections end with a
barrier. Sizes are written into the text, so that a compiler knows them.

Left out: compiling and calling it (`compiler.py`), and whose memory it works on (`vector.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Literal, NamedTuple

from headrace.spec import Agents

Scope = Literal["env", "agent"]


class Call(NamedTuple):
    """A function of the author's: its name, and what it is called for each of."""

    name: str
    scope: Scope

    @property
    def in_text(self) -> str:
        """What the program calls it: no name of the program's own."""
        return f"env_{self.name}"


@dataclass(frozen=True)
class Shape:
    """All that the program's text depends on.

    Attributes:
        world: names of the world's arrays and numbers.
        resets, phases: the author's functions, in order.
        parts: which agents are rows of which fragment.
        several: whether the author's arrays have an axis of agents.
        action_parts: numbers of an action; 0: it is one, without an axis.
        is_box: whether actions are stretched and clipped, and not shifted.
        max_episode_steps: 0: no limit.
        obs_size: numbers of an observation.
        lanes: on a GPU, threads of one environment; blocks have a multiple of them.
        autoreset: whether a step begins the next episode where one has ended.
    """

    world: tuple[str, ...]
    resets: tuple[Call, ...]
    phases: tuple[Call, ...]
    parts: tuple[Agents, ...]
    several: bool
    action_parts: int
    is_box: bool
    max_episode_steps: int
    obs_size: int
    lanes: int
    autoreset: bool = True

    @property
    def num_agents(self) -> int:
        """Of one environment."""
        return sum(part.size for part in self.parts)


ROWS = (
    "obs", "action", "reward", "terminated", "truncated", "valid", "final_obs", "final_step",
)  # fmt: skip
"""What the program needs of a fragment."""

BOOKS = (
    "over", "num_cut", "so_far", "was_alive", "ended_return", "ended_length", "scale", "shift",
    "low", "high",
)  # fmt: skip
"""What it keeps besides, see `vector.py`."""


class _Section(NamedTuple):
    """Lines that are carried out for each environment, or each agent of a part, or of all."""

    scope: Scope
    lines: str
    part: int | None = None
    only_if: str = ""


def text(shape: Shape, target: Literal["cpu", "cuda"]) -> str:
    """The program: functions `begin` and `step`, and the types of what they take.

    `begin(w, b, rows, ...)` begins the next episode where `b.over`, and writes row 0 of
    observations there. `step(w, b, rows, t, ...)` carries out step t. On the CPU `...` is the range
    of environments (first, end); on a GPU it is how many there are.
    """
    names = ", ".join(f"r{p}" for p in range(len(shape.parts)))
    lines = [
        "from collections import namedtuple\n",
        f"World = namedtuple('World', {shape.world!r})",
        f"Books = namedtuple('Books', {BOOKS!r})",
        f"Rows = namedtuple('Rows', {ROWS!r})\n",
        _function(shape, target, f"begin(w, b, {names}, ", _reset(shape, "0")),
        _function(shape, target, f"step(w, b, {names}, t, ", _step(shape)),
    ]
    return "\n".join(lines)


def _step(shape: Shape) -> list[_Section]:
    """All sections of a step."""
    agent = "[e, i]" if shape.several else "[e]"
    limit = shape.max_episode_steps
    sections = [_Section("env", "w.step[e] += 1\nw.terminated[e] = False")]
    for p in range(len(shape.parts)):
        lines = [*_action_in(shape, p), f"w.reward{agent} = 0"]
        if shape.several:
            lines.append("b.was_alive[e, i] = w.alive[e, i]")
        sections.append(_Section("agent", "\n".join(lines), p))
    for call in shape.phases:
        sections += _call(shape, call, "t + 1")
    over = "w.terminated[e]" + (f" or w.step[e] >= {limit}" if limit else "")
    sections.append(_Section("env", f"b.over[e] = {over}"))
    sections += [_Section("agent", _rows_out(shape, p), p) for p in range(len(shape.parts))]
    sections.append(_Section("env", _episode(shape)))
    return [*sections, *(_reset(shape, "t + 1") if shape.autoreset else [])]


def _action_in(shape: Shape, p: int) -> list[str]:
    """From what a policy emits to what the environment expects: see `spec.ActionCodec`."""
    to, given = ("w.action[e, i", "r{p}.action[t, row") if shape.several else (
        "w.action[e", "r{p}.action[t, row",
    )  # fmt: skip
    given = given.format(p=p)
    if not shape.action_parts:
        return [f"{to}] = {given}] + b.shift[0]"]
    value = f"{given}, c]" + (" * b.scale[c] + b.shift[c]" if shape.is_box else " + b.shift[c]")
    if shape.is_box:
        value = f"min(max({value}, b.low[c]), b.high[c])"
    return [f"for c in range({shape.action_parts}):", f"    {to}, c] = {value}"]


def _rows_out(shape: Shape, p: int) -> str:
    """What a step led to, into the row of a fragment."""
    limit, row = shape.max_episode_steps, f"r{p}"
    if shape.several:
        agent, alive, stays = "[e, i]", "b.was_alive[e, i]", "w.alive[e, i]"
        terminated = f"{alive} and (w.terminated[e] or not {stays})"
        truncated = f"{stays} and b.over[e] and not w.terminated[e]"
    else:
        agent, alive = "[e]", "True"
        terminated, truncated = "w.terminated[e]", "b.over[e] and not w.terminated[e]"
    lines = [
        f"{row}.reward[t, row] = w.reward{agent}",
        f"{row}.valid[t, row] = {alive}",
        f"{row}.terminated[t, row] = {terminated}",
        f"{row}.truncated[t, row] = {truncated if limit else 'False'}",
        f"b.so_far[e, i] += w.reward{agent}",
    ]
    if limit and shape.autoreset:
        lines += [
            f"if {truncated}:",
            f"    slot = b.num_cut[e] * {row}.reward.shape[1] + row",
            f"    {row}.final_step[slot] = t",
            f"    for f in range({shape.obs_size}):",
            f"        {row}.final_obs[slot, f] = {row}.obs[t + 1, row, f]",
        ]
    return "\n".join(lines)


def _episode(shape: Shape) -> str:
    """The account of an episode that has ended."""
    lines = ["b.ended_length[t, e] = 0", "if b.over[e]:", "    b.ended_length[t, e] = w.step[e]"]
    if shape.max_episode_steps:
        lines += ["    if not w.terminated[e]:", "        b.num_cut[e] += 1"]
    for p, part in enumerate(shape.parts):
        lines += [
            "    total = 0.0",
            f"    for i in range({part.first}, {part.first + part.size}):",
            "        total += b.so_far[e, i]",
            f"    b.ended_return[t, e, {p}] = total / {part.size}",
        ]
    return "\n".join(lines)


def _reset(shape: Shape, row: str) -> list[_Section]:
    """What begins an episode, where one has ended."""
    agents = "b.so_far[e, i] = 0" + ("\nw.alive[e, i] = True" if shape.several else "")
    sections = [
        _Section("env", "w.episode[e] += 1\nw.step[e] = 0"),
        _Section("agent", agents),
        *(section for call in shape.resets for section in _call(shape, call, row)),
    ]
    observe = next(call for call in shape.phases if call.name == "observe")
    sections += _call(shape, observe, row)
    return [s._replace(only_if="b.over[e]") for s in sections]


def _call(shape: Shape, call: Call, row: str) -> list[_Section]:
    """An author's function."""
    if call.name != "observe":
        i = ", i" if call.scope == "agent" else ""
        return [_Section(call.scope, f"{call.in_text}(w, e{i})")]
    i = "i, " if call.scope == "agent" else ""
    return [
        _Section("agent", f"{call.in_text}(w, e, {i}r{p}.obs[{row}, row])", p)
        for p in range(len(shape.parts))
    ]


def _function(shape: Shape, target: str, head: str, sections: Sequence[_Section]) -> str:
    """One function of the program."""
    if target == "cpu":
        body = "".join(_on_cpu(shape, section) for section in sections)
        return f"def {head}first, end):\n    for e in range(first, end):\n" + indent(body, " " * 8)
    body = (
        f"lane = cuda.threadIdx.x % {shape.lanes}\n"
        f"envs_per_block = cuda.blockDim.x // {shape.lanes}\n"
        f"e = cuda.blockIdx.x * envs_per_block + cuda.threadIdx.x // {shape.lanes}\n"
        "here = e < num_envs\n"
    )
    body += "".join(_on_gpu(shape, section) for section in sections)
    return f"def {head}num_envs):\n" + indent(body, " " * 4)


def _on_cpu(shape: Shape, section: _Section) -> str:
    lines = section.lines
    if section.scope == "agent":
        first, count = _agents(shape, section)
        row = "" if section.part is None else f"    row = e * {count} + (i - {first})\n"
        lines = f"for i in range({first}, {first + count}):\n{row}" + indent(lines, " " * 4)
    if section.only_if:
        lines = f"if {section.only_if}:\n" + indent(lines, " " * 4)
    return lines + "\n"


def _on_gpu(shape: Shape, section: _Section) -> str:
    condition = "here" + (f" and {section.only_if}" if section.only_if else "")
    lines = section.lines
    if section.scope == "agent":
        first, count = _agents(shape, section)
        row = "" if section.part is None else f"    row = e * {count} + (i - {first})\n"
        lines = f"for i in range({first} + lane, {first + count}, {shape.lanes}):\n{row}" + indent(
            lines, " " * 4
        )
    elif shape.lanes > 1:
        condition += " and lane == 0"
    text = f"if {condition}:\n" + indent(lines, " " * 4) + "\n"
    return text + ("cuda.syncthreads()\n" if shape.lanes > 1 else "")


def _agents(shape: Shape, section: _Section) -> tuple[int, int]:
    """The first agent of a section, and how many there are."""
    if section.part is None:
        return 0, shape.num_agents
    return shape.parts[section.part]
