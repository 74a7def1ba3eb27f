"""An environment whose functions are watched as they run, interpreted: who touches which number.

Each function gets the world's arrays behind a `WatchedArray`, which notes every read and write. So
what would go wrong only on a GPU, or only in the second episode, shows in a plain loop, with its
line: agents of one phase that depend on each other, numbers left over from an earlier episode, rows
of other environments, numbers of an observation that nobody wrote.

Left out: playing (`plays.py`), and what is said about it (`kernel_checks.py`).
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
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv, uniform
from headrace.errors import EnvError
from headrace.spec import Array

Kind = Literal["agents", "resets", "rows", "own", "out", "draws"]
Place = tuple[str, int]
"""File and line."""

_OF_A_STEP = ("action", "reward", "terminated")
"""What a step begins with; in a reset there are those of the last episode."""
_OF_THE_DRIVER = ("step", "episode", "env_id")
"""What functions only read."""

_KernelEnv = TypeVar("_KernelEnv", bound=KernelEnv)


class Watch:
    """What was seen of one environment.

    Args:
        env: the environment.

    Attributes:
        found: kind -> what is wrong, once for each line and field, as it was seen first:
            `agents`: an agent touches what another one writes in the same phase;
            `resets`: a number is read that nothing wrote since the episode began;
            `rows`: another environment's row is touched;
            `own`: what functions only read is written;
            `out`: a part of an observation is not written;
            `draws`: a random number is drawn that was drawn before in the same step.
    """

    def __init__(self, env: KernelEnv) -> None:
        self.found: dict[Kind, list[str]] = {kind: [] for kind in get_args(Kind)}
        self.function, self.env, self.agent = "", 0, -1
        self._seen: set[tuple[str, ...]] = set()
        self._arrays: Any = None
        self._world: Any = None
        self._fields: dict[str, _Field] = {}
        self._called: set[int] = set()
        self._time: dict[int, tuple[int, int]] = {}
        self._drawn: dict[tuple[int, ...], Place] = {}
        self.scratch = env.scratch
        self._tables = [name for name, of in env.constants.items() if isinstance(of, np.ndarray)]

    def begin(self, function: str, w: Any, e: int, agent: int) -> Any:
        """A function is about to be called.

        Args:
            function: its name.
            w: the world.
            e: the environment.
            agent: for which; -1: for the environment.

        Returns:
            The world, watched.
        """
        if self._arrays is not w:
            self._watch(w)
        if (function, e) != (self.function, self.env) or agent in self._called:
            self._called.clear()
            for field in self._fields.values():
                field.readers.clear()
                field.writer.clear()
        self._called.add(agent)
        self.function, self.env, self.agent = function, e, agent
        episode, step = time = int(w.episode[e]), int(w.step[e])
        before, self._time[e] = self._time.get(e), time
        if step == 0 and (before is None or before[0] != episode):
            for field in self._fields.values():
                field.age(e, field.name in ("alive", *_OF_THE_DRIVER))
        elif before is None:  # in the middle of an episode
            for field in self._fields.values():
                field.age(e, field.name not in self.scratch)
        elif before[1] != step:
            for name in _OF_A_STEP:
                self._fields[name].age(e, True)
            for name in self.scratch:
                self._fields[name].age(e, False)
        return self._world

    def draw(self, e: int, number: int, place: Place) -> None:
        """A random number is asked for."""
        key = (e, *self._time[e], number)
        if before := self._drawn.get(key):
            text = f"draw {number} is drawn again in the same step, and gives the same number"
            self.report("draws", "", text, before, place)
        self._drawn[key] = place

    def report(self, kind: Kind, field: str, text: str, *places: Place) -> None:
        """Something is wrong: told once for each function, field and place."""
        key = (kind, self.function, field, *map(str, places))
        if key not in self._seen:
            self._seen.add(key)
            where = "".join(f"\n  {line_of(place)}" for place in dict.fromkeys(places))
            self.found[kind].append(f"{self.function}: {text}{where}")

    def _watch(self, w: Any) -> None:
        self._arrays = w
        self._time.clear()
        self._drawn.clear()
        arrays = {name: of for name, of in w._asdict().items() if isinstance(of, np.ndarray)}
        tables = {name: arrays.pop(name) for name in self._tables}
        self._fields = {name: _Field(name, array, self) for name, array in arrays.items()}
        self._world = w._replace(
            **{
                name: WatchedArray(array, np.arange(array.size).reshape(array.shape), field)
                for (name, array), field in zip(arrays.items(), self._fields.values(), strict=True)
            },
            **{
                name: WatchedArray(array, np.arange(array.size).reshape(array.shape), _Table(self))
                for name, array in tables.items()
            },
        )


class _Field:
    """Who has touched which numbers of an array. Numbers go by their place in the flat array."""

    def __init__(self, name: str, array: Array, watch: Watch) -> None:
        self.name = name
        self.readers: dict[int, dict[int, Place]] = {}
        self.writer: dict[int, tuple[int, Any, Place]] = {}
        self._row_size = array[0].size
        self._fresh = np.zeros(array.size, bool)
        self._watch = watch

    def age(self, e: int, fresh: bool) -> None:
        """A new episode or step: whether what is there belongs to it."""
        self._fresh[e * self._row_size : (e + 1) * self._row_size] = fresh

    def read(self, number: int, place: Place) -> None:
        watch, e = self._watch, number // self._row_size
        if self.name == "env_id" and (asked := _asked(sys._getframe(2))):
            watch.draw(e, *asked)
        if e != watch.env:
            self._touches_row(e, "reads", place)
        elif not self._fresh[number]:
            began = "step" if self.name in watch.scratch else "episode"
            watch.report(
                "resets",
                self.name,
                f"reads {self._at(number)}, which nothing has written since the {began} began (so "
                "it is 0, or of an earlier one)",
                place,
            )
        if watch.agent < 0:
            return
        agent, _, written = self.writer.get(number, (watch.agent, None, place))
        if agent != watch.agent:
            self._depends(number, watch.agent, agent, place, written)
        self.readers.setdefault(number, {}).setdefault(watch.agent, place)

    def write(self, number: int, value: Any, was: Any, place: Place) -> None:
        watch, e = self._watch, number // self._row_size
        self._fresh[number] = True
        if e != watch.env:
            self._touches_row(e, "writes to", place)
        if self.name in _OF_THE_DRIVER:
            watch.report("own", self.name, f"writes to {self.name} ({was} -> {value})", place)
        if watch.agent < 0:
            return
        for agent, line in self.readers.get(number, {}).items():
            if agent != watch.agent:
                self._depends(number, agent, watch.agent, line, place)
        agent, other, line = self.writer.setdefault(number, (watch.agent, value, place))
        if agent != watch.agent and value != other:
            watch.report(
                "agents",
                self.name,
                f"agents {agent} and {watch.agent} both write {self._at(number)}: {other} and "
                f"{value}",
                line,
                place,
            )

    def _depends(self, number: int, reads: int, writes: int, *places: Place) -> None:
        self._watch.report(
            "agents",
            self.name,
            f"agent {reads} reads {self._at(number)}, which agent {writes} writes",
            *places,
        )

    def _touches_row(self, e: int, does: str, place: Place) -> None:
        text = f"{does} the row of environment {e} of {self.name}, called for {self._watch.env}"
        self._watch.report("rows", self.name, text, place)

    def _at(self, number: int) -> str:
        return f"{self.name} (number {number % self._row_size} of {self._row_size})"


class _Table:
    """A constant that is an array."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def read(self, number: int, place: Place) -> None:
        """Anybody may, at any time."""

    def write(self, _number: int, now: Any, was: Any, place: Place) -> None:
        self._watch.report("own", "constant", f"writes to a constant ({was} -> {now})", place)


class _Out:
    """Which numbers of an observation were written."""

    def __init__(self, size: int, watch: Watch) -> None:
        self.written = np.zeros(size, bool)
        self._watch = watch

    def read(self, number: int, place: Place) -> None:
        if not self.written[number]:
            text = f"reads out[{number}] before it is written"
            self._watch.report("out", str(number), text, place)

    def write(self, number: int, _value: Any, _was: Any, _place: Place) -> None:
        self.written[number] = True


class WatchedArray:
    """An array, or a part of it: an index as for an array, and nothing else (it is not one)."""

    __slots__ = ("_array", "_log", "_numbers")

    def __init__(self, array: Array, numbers: Array, log: _Field | _Out | _Table) -> None:
        self._array, self._numbers, self._log = array, numbers, log

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array's."""
        return tuple(self._array.shape)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        value, numbers = self._array[index], self._numbers[index]
        if isinstance(value, np.ndarray):
            return WatchedArray(value, numbers, self._log)
        self._log.read(int(numbers), _caller())
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        was, place = np.copy(self._array[index]), _caller()
        self._array[index] = value
        touched = np.ravel(self._numbers[index]).tolist()
        for number, now, old in zip(touched, np.ravel(self._array[index]), was.flat, strict=True):
            self._log.write(number, now, old, place)

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        for number in self._numbers.flat:
            self._log.read(int(number), _caller())
        return np.array(self._array, *args, **kwargs)


def watched(env: _KernelEnv, watch: Watch) -> _KernelEnv:
    """The same environment, whose functions tell `watch`."""
    names = dict.fromkeys((*env.resets, *env.phases))
    own = {name: staticmethod(_tell(env, name, watch)) for name in names}
    twin = copy.copy(env)
    twin.__class__ = type(type(env).__name__, (type(env),), own)
    return twin


def _tell(env: KernelEnv, name: str, watch: Watch) -> Callable[..., None]:
    function, per_agent = env.function(name), env.per_agent(name)

    @functools.wraps(function)
    def call(w: Any, e: int, *rest: Any) -> None:
        agent = rest[0] if per_agent else -1
        world = watch.begin(name, w, e, agent)
        if name != "observe":
            function(world, e, *rest)
            return
        out = _Out(len(rest[-1]), watch)
        numbers = np.arange(len(rest[-1]))
        function(world, e, *rest[:-1], WatchedArray(rest[-1], numbers, out))
        missed = np.flatnonzero(~out.written)
        if len(missed):
            code = function.__code__
            text = f"out[{', '.join(map(str, missed))}] is not written"
            watch.report("out", "out", text, (code.co_filename, code.co_firstlineno))

    return call


def line_of(place: Place) -> str:
    """`FILE:LINE: the line itself`."""
    return f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}"


def _asked(frame: FrameType) -> tuple[int, Place] | None:
    """The draw, and the author's line, if the frame is `uniform`'s."""
    if frame.f_code is not uniform.__code__ or frame.f_back is None:
        return None
    place = (frame.f_back.f_code.co_filename, frame.f_back.f_lineno)
    return int(frame.f_locals["draw"]), place


def _caller() -> Place:
    """The author's line that touches an array."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


# Where in the author's code something is, or went wrong.


_OURS = (
    "headrace/envs/check/access_trace.py",
    "headrace/envs/kernels/env.py",
    "headrace/seeding.py",
)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_IN_NUMBAS_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
_BUILDS = ("BUILD_LIST", "BUILD_SET", "BUILD_MAP", "BUILD_STRING")


def lines_with(env: KernelEnv, *opnames: str) -> list[Place]:
    """Lines of the author's functions, and of what they call, in which the bytecode has one of."""
    found = [
        (function.__code__.co_filename, instruction.positions.lineno or 0)
        for function in compiler.functions_of(env)
        for instruction in dis.get_instructions(function)
        if instruction.opname in opnames and instruction.positions is not None
    ]
    return list(dict.fromkeys(found))


def failure(error: Exception, env: KernelEnv | None = None) -> str:
    """An exception of the author's code, or of its compiler: what, and at which line of it.

    Args:
        error: the exception.
        env: whose functions are looked through, where a compiler names no line.
    """
    module = type(error).__module__
    if module.startswith("numba.") and module.endswith(".errors"):
        said = _COLORS.sub("", str(error))  # if colorama is there
        text = next(line for line in said.splitlines() if not line.startswith("Failed in"))
        loc = getattr(error, "loc", None)
        named = [(path, int(line)) for path, line in _IN_NUMBAS_TEXT.findall(said)]
        named += [(loc.filename, loc.line)] if loc else []
        own = [place for place in named if "numba" not in Path(place[0]).parts][-1:]
        if env is not None and not own and "NRT required" in text:
            text = "it makes a list, or an array of its own (as w.x[e] + 1 is, of several numbers)"
            own = lines_with(env, *_BUILDS)
        where = "".join(f"\n  {line_of(place)}" for place in own)
        name = getattr(error, "__notes__", ["it"])[0]
        return f"{name} does not compile: {text[:300]}{where}"
    if isinstance(error, EnvError):  # it has a traceback in it
        return str(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.endswith(_OURS)
    ]
    place = (frames[-1].filename, frames[-1].lineno or 0)
    return f"{frames[-1].name} raised {type(error).__name__}: {error}\n  {line_of(place)}"
