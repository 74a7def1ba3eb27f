"""Traces which numbers of a kernel environment's arrays its functions read and write, interpreted.

Each function gets the world's arrays as `TracedArray`s, so that a plain loop shows, with the line,
what would fail only on a GPU or in a later episode.
"""

import copy
import dis
import functools
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import numpy as np

from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.errors import EnvError
from headrace.spec import Array

Kind = Literal["agents", "resets", "rows", "own", "out", "draws"]
Line = tuple[str, int]
"""File and line number."""

_STEP_FIELDS = ("action", "reward", "terminated")
"""Fields that are set before each step; in a reset they are left over from the last episode."""
_READ_ONLY = ("step", "episode", "env_id")

_OURS = (
    "headrace/envs/check/access_trace.py",
    "headrace/envs/kernels/env.py",
    "headrace/seeding.py",
)
"""Files that are not the author's; see `describe_failure`."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBA_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_BUILD_OPS = ("BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_STRING")


class AccessTrace:
    """The accesses of one environment's functions, and what is wrong with them.

    Attributes:
        findings: kind -> messages, one for each function, field and line:
            `agents`: an agent reads or writes what another agent writes in the same phase;
            `resets`: a number is read that was not written since the episode began;
            `rows`: another environment's row is read or written;
            `own`: a read-only field or constant is written;
            `out`: a part of an observation is not written;
            `draws`: the same random number is drawn again in the same step.
    """

    def __init__(self, env: KernelEnv) -> None:
        self.findings: dict[Kind, list[str]] = {kind: [] for kind in get_args(Kind)}
        self.function, self.env, self.agent = "", 0, -1
        self.scratch = env.scratch
        self._reported: set[tuple[str, ...]] = set()
        self._arrays: Any = None
        self._world: Any = None
        self._fields: dict[str, _FieldTrace] = {}
        self._agents_called: set[int] = set()
        self._time: dict[int, tuple[int, int]] = {}
        self._draws: dict[tuple[int, ...], Line] = {}
        self._tables = [k for k, value in env.constants.items() if isinstance(value, np.ndarray)]

    def begin(self, function: str, w: Any, e: int, agent: int) -> Any:
        """Prepare for a call (`agent` -1: for an environment), and return the traced world."""
        if self._arrays is not w:
            self._trace_world(w)
        if (function, e) != (self.function, self.env) or agent in self._agents_called:
            self._agents_called.clear()
            for field in self._fields.values():
                field.readers.clear()
                field.writer.clear()
        self._agents_called.add(agent)
        self.function, self.env, self.agent = function, e, agent
        episode, step = time = int(w.episode[e]), int(w.step[e])
        before, self._time[e] = self._time.get(e), time
        if step == 0 and (before is None or before[0] != episode):
            for field in self._fields.values():
                field.set_fresh(e, field.name in ("alive", *_READ_ONLY))
        elif before is None:  # in the middle of an episode
            for field in self._fields.values():
                field.set_fresh(e, field.name not in self.scratch)
        elif before[1] != step:
            for name in _STEP_FIELDS:
                self._fields[name].set_fresh(e, True)
            for name in self.scratch:
                self._fields[name].set_fresh(e, False)
        return self._world

    def draw(self, e: int, number: int, line: Line) -> None:
        """Count a draw of a random number."""
        key = (e, *self._time[e], number)
        if before := self._draws.get(key):
            text = f"draw {number} is drawn again in the same step, and gives the same number"
            self.report("draws", "", text, before, line)
        self._draws[key] = line

    def report(self, kind: Kind, field: str, text: str, *lines: Line) -> None:
        """Add a finding, unless there is one of the same function, field and lines."""
        key = (kind, self.function, field, *map(str, lines))
        if key not in self._reported:
            self._reported.add(key)
            sources = "".join(f"\n  {show_line(line)}" for line in dict.fromkeys(lines))
            self.findings[kind].append(f"{self.function}: {text}{sources}")

    def _trace_world(self, w: Any) -> None:
        self._arrays = w
        self._time.clear()
        self._draws.clear()
        arrays = {name: a for name, a in w._asdict().items() if isinstance(a, np.ndarray)}
        traces: dict[str, _FieldTrace | _ConstantTrace] = {
            name: _ConstantTrace(self) if name in self._tables else _FieldTrace(name, array, self)
            for name, array in arrays.items()
        }
        self._fields = {k: trace for k, trace in traces.items() if isinstance(trace, _FieldTrace)}
        self._world = w._replace(
            **{
                name: TracedArray(array, np.arange(array.size).reshape(array.shape), traces[name])
                for name, array in arrays.items()
            }
        )


class _FieldTrace:
    """The readers and writers of an array's numbers, by their index in the flat array."""

    def __init__(self, name: str, array: Array, trace: AccessTrace) -> None:
        self.name = name
        self.readers: dict[int, dict[int, Line]] = {}
        self.writer: dict[int, tuple[int, Any, Line]] = {}
        self._row_size = array[0].size
        self._fresh = np.zeros(array.size, bool)
        self._trace = trace

    def set_fresh(self, e: int, fresh: bool) -> None:
        """Set whether a row's numbers belong to the current episode or step."""
        self._fresh[e * self._row_size : (e + 1) * self._row_size] = fresh

    def read(self, number: int, line: Line) -> None:
        trace, e = self._trace, number // self._row_size
        if self.name == "env_id" and (draw := _uniform_draw(sys._getframe(2))):
            trace.draw(e, *draw)
        if e != trace.env:
            self._report_row(e, "reads", line)
        elif not self._fresh[number]:
            period = "step" if self.name in trace.scratch else "episode"
            trace.report(
                "resets",
                self.name,
                f"reads {self._describe(number)}, which was not written since the {period} began "
                "(so it is 0, or left over)",
                line,
            )
        if trace.agent < 0:
            return
        writer, _, written = self.writer.get(number, (trace.agent, None, line))
        if writer != trace.agent:
            self._report_dependence(number, trace.agent, writer, line, written)
        self.readers.setdefault(number, {}).setdefault(trace.agent, line)

    def write(self, number: int, value: Any, old: Any, line: Line) -> None:
        trace, e = self._trace, number // self._row_size
        self._fresh[number] = True
        if e != trace.env:
            self._report_row(e, "writes to", line)
        if self.name in _READ_ONLY:
            trace.report("own", self.name, f"writes to {self.name} ({old} -> {value})", line)
        if trace.agent < 0:
            return
        for reader, read in self.readers.get(number, {}).items():
            if reader != trace.agent:
                self._report_dependence(number, reader, trace.agent, read, line)
        writer, other, written = self.writer.setdefault(number, (trace.agent, value, line))
        if writer != trace.agent and value != other:
            trace.report(
                "agents",
                self.name,
                f"agents {writer} and {trace.agent} both write {self._describe(number)}: {other} "
                f"and {value}",
                written,
                line,
            )

    def _report_dependence(self, number: int, reader: int, writer: int, *lines: Line) -> None:
        text = f"agent {reader} reads {self._describe(number)}, which agent {writer} writes"
        self._trace.report("agents", self.name, text, *lines)

    def _report_row(self, e: int, verb: str, line: Line) -> None:
        text = f"{verb} the row of environment {e} of {self.name}, called for {self._trace.env}"
        self._trace.report("rows", self.name, text, line)

    def _describe(self, number: int) -> str:
        return f"{self.name} (number {number % self._row_size} of {self._row_size})"


class _ConstantTrace:
    def __init__(self, trace: AccessTrace) -> None:
        self._trace = trace

    def read(self, number: int, line: Line) -> None:
        """Do nothing: every read is allowed."""

    def write(self, _number: int, value: Any, old: Any, line: Line) -> None:
        self._trace.report("own", "constant", f"writes to a constant ({old} -> {value})", line)


class _OutputTrace:
    def __init__(self, size: int, trace: AccessTrace) -> None:
        self.written = np.zeros(size, bool)
        self._trace = trace

    def read(self, number: int, line: Line) -> None:
        if not self.written[number]:
            text = f"reads out[{number}] before it is written"
            self._trace.report("out", str(number), text, line)

    def write(self, number: int, _value: Any, _old: Any, _line: Line) -> None:
        self.written[number] = True


class TracedArray:
    """An array, or a part of one, that reports its accesses. It supports indexing only."""

    __slots__ = ("_array", "_numbers", "_trace")

    def __init__(
        self, array: Array, numbers: Array, trace: _FieldTrace | _OutputTrace | _ConstantTrace
    ) -> None:
        self._array, self._numbers, self._trace = array, numbers, trace

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, as an array's."""
        return tuple(self._array.shape)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        value, numbers = self._array[index], self._numbers[index]
        if isinstance(value, np.ndarray):
            return TracedArray(value, numbers, self._trace)
        self._trace.read(int(numbers), _author_line())
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        before, line = np.copy(self._array[index]), _author_line()
        self._array[index] = value
        numbers = np.ravel(self._numbers[index]).tolist()
        after = np.ravel(self._array[index])
        for number, new, old in zip(numbers, after, before.flat, strict=True):
            self._trace.write(number, new, old, line)

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        for number in self._numbers.flat:
            self._trace.read(int(number), _author_line())
        return np.array(self._array, *args, **kwargs)


def trace_env(env: KernelEnv, trace: AccessTrace) -> KernelEnv:
    """Return a copy of the environment whose functions report to `trace`."""
    functions = {name: staticmethod(_trace_function(env, name, trace)) for name in env.functions()}
    twin = copy.copy(env)
    twin.__class__ = type(type(env).__name__, (type(env),), functions)
    return twin


def _trace_function(env: KernelEnv, name: str, trace: AccessTrace) -> Callable[..., None]:
    function, per_agent = env.function(name), env.per_agent(name)

    @functools.wraps(function)
    def call(w: Any, e: int, *rest: Any) -> None:
        agent = rest[0] if per_agent else -1
        world = trace.begin(name, w, e, agent)
        if name != "observe":
            function(world, e, *rest)
            return
        out = _OutputTrace(len(rest[-1]), trace)
        numbers = np.arange(len(rest[-1]))
        function(world, e, *rest[:-1], TracedArray(rest[-1], numbers, out))
        missing = np.flatnonzero(~out.written)
        if len(missing):
            code = function.__code__
            text = f"out[{', '.join(map(str, missing))}] is not written"
            trace.report("out", "out", text, (code.co_filename, code.co_firstlineno))

    return call


def show_line(line: Line) -> str:
    """Return `FILE:LINE: the line itself`."""
    return f"{line[0]}:{line[1]}: {linecache.getline(*line).strip()}"


def _uniform_draw(frame: FrameType) -> tuple[int, Line] | None:
    """Return the draw and the author's line, if the frame is a call of `uniform`."""
    if frame.f_code is not uniform.__code__ or frame.f_back is None:
        return None
    line = (frame.f_back.f_code.co_filename, frame.f_back.f_lineno)
    return int(frame.f_locals["draw"]), line


def _author_line() -> Line:
    """Return the line that accesses an array: the caller's caller."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def lines_with(env: KernelEnv, *opnames: str) -> list[Line]:
    """Find lines of the author's compiled functions with one of these bytecode operations."""
    lines = [
        (function.__code__.co_filename, instruction.positions.lineno or 0)
        for function in compiler.compiled_functions(env)
        for instruction in dis.get_instructions(function)
        if instruction.opname in opnames and instruction.positions is not None
    ]
    return list(dict.fromkeys(lines))


def describe_failure(error: Exception, env: KernelEnv | None = None) -> str:
    """Describe an exception of the author's code or of its compiler, with the author's line.

    If the compiler names no line, it is searched for in `env`.
    """
    module = type(error).__module__
    if module.startswith("numba.") and module.endswith(".errors"):
        return _describe_numba_error(error, env)
    if isinstance(error, EnvError):  # its text has a traceback
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame = [frame for frame in frames if not frame.filename.endswith(_OURS)][-1]
    line = show_line((frame.filename, frame.lineno or 0))
    return f"{frame.name} raised {type(error).__name__}: {error}\n  {line}"


def _describe_numba_error(error: Exception, env: KernelEnv | None) -> str:
    message = _COLORS.sub("", str(error))  # Numba uses colors where colorama is installed
    text = next(line for line in message.splitlines() if not line.startswith("Failed in"))
    loc = getattr(error, "loc", None)
    lines = [(path, int(line)) for path, line in _NUMBA_LINE.findall(message)]
    lines += [(loc.filename, loc.line)] if loc else []
    lines = [line for line in lines if "numba" not in Path(line[0]).parts][-1:]
    if env is not None and not lines and "NRT required" in text:
        text = "it makes a list or an array (as w.x[e] + 1 does, of several numbers)"
        lines = lines_with(env, *_BUILD_OPS)
    sources = "".join(f"\n  {show_line(line)}" for line in lines)
    name = getattr(error, "__notes__", ["it"])[0]
    return f"{name} does not compile: {text[:300]}{sources}"
