"""Where in the author's code something is, or went wrong.

Left out: what is looked for (`kernel_checks.py`, `equivalence.py`).
"""

import dis
import re
import traceback
from pathlib import Path

from headrace.envs.check.access_trace import Place, line_of
from headrace.envs.kernels import compiler
from headrace.envs.kernels.env import KernelEnv
from headrace.errors import EnvError

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
