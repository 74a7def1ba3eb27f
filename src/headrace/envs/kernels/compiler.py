"""The compilers of kernel environments, behind one small interface: compile, launch, view.

    python   interpreted, as it is written: for debugging, and what the others are held against
    cpu      Numba's njit, without the interpreter's lock: threads share the environments out
    cuda     Numba's CUDA target, on torch's current stream (with NUMBA_ENABLE_CUDASIM=1 simulated)

Compiled code is kept per user, under the hash of everything that it was made from, so that a second
start only loads it; of several processes that start together one compiles.

Left out: the program's text (`codegen.py`), whose memory it works on
(`vector.py`).
"""

import contextlib
import fcntl
import hashlib
import importlib
import itertools
import linecache
import os
import platform
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.envs.kernels import codegen
from headrace.envs.kernels.codegen import Shape
from headrace.envs.kernels.env import KernelEnv
from headrace.errors import MissingExtraError

Target = Literal["python", "cpu", "cuda"]

_HOW = "1"
"""How functions are compiled here: to be changed with it, so that nothing kept is used."""

THREADS = 128
"""Of a block, on a GPU: several environments, or a large one, whose agents take turns."""

# As on a GPU, and in NumPy, a division by zero gives infinity. Nothing is allocated, so references
# need no counting: of a world's arrays it can take ten times as long as the functions themselves.
_ALL = {"nogil": True, "error_model": "numpy", "_nrt": False}
_WHOLE = {**_ALL, "cache": True}
# A world is handed over as hundreds of numbers: that takes longer than many a function does. Nor is
# a part called from Python, for which a compiler would unpack the world: a third of its time.
_PART = {**_ALL, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class Program(Protocol):
    """A kernel environment's program.

    Attributes:
        types: the named tuples `World`, `Books` and `Rows` that it takes.
    """

    types: ModuleType

    def view(self, tensor: Tensor) -> Any:
        """A tensor's memory, as the program takes it: nothing is copied."""

    def begin(self, num_envs: int, *args: Any) -> None:
        """Reset all environments: `driver.text`."""

    def step(self, num_envs: int, *args: Any) -> None:
        """Step all environments."""

    def close(self) -> None:
        """End what was started."""


def program(env: KernelEnv, shape: Shape, target: Target, num_threads: int = 1) -> Program:
    """Make the program of an environment; compiled when it is first called.

    Args:
        env: whose functions are called.
        shape: of the program.
        target: what it is to run on.
        num_threads: of the CPU.

    Raises:
        MissingExtraError: Numba, or its CUDA target, is not installed.
    """
    functions = {c.in_text: env.function(c.name) for c in (*shape.resets, *shape.phases)}
    text, name = codegen.text(shape, "cuda" if target == "cuda" else "cpu"), type(env).__name__
    if target == "python":
        return _OnCpu(_module(f"<{name}>", text, functions), 1, _Turns(None))
    numba: Any = _numba()
    found = _parts(functions)
    name = f"headrace_{name}_{_digest(text, found, numba.__version__, target, f'{_PART}{_WHOLE}')}"
    if target == "cuda":
        cuda: Any = importlib.import_module("numba.cuda")
        compile_part, compile_whole = cuda.jit(device=True), cuda.jit(cache=True)
        more = {"cuda": cuda}
    else:
        compile_part, compile_whole, more = numba.njit(**_PART), numba.njit(**_WHOLE), {}
    if name not in sys.modules:
        made = _compiled(found, compile_part, name)
        names = {name: made[function] for name, function in functions.items()} | more
        module = _module(_kept(name, text), text, names)
        for function in ("begin", "step"):
            setattr(module, function, compile_whole(getattr(module, function)))
        sys.modules[name] = module  # where Numba finds the types of what it kept, by name
    module, turns = sys.modules[name], _Turns(cache_dir() / f"{name}.lock")
    if target == "cuda":
        return _OnGpu(module, shape, cuda, turns)
    return _OnCpu(module, num_threads, turns)


def is_simulated() -> bool:
    """Whether this process's `cuda` is Numba's simulator: settled as Numba was imported."""
    return bool(_numba().config.ENABLE_CUDASIM)


def has_gpu() -> bool:
    """Whether torch and Numba both have a GPU to work on."""
    if is_simulated() or not torch.cuda.is_available():
        return False
    return bool(importlib.import_module("numba.cuda").is_available())


def wider(env: KernelEnv, world: Mapping[str, Tensor]) -> list[str]:
    """Where a compiler makes float64 of what was declared narrower: a float32 times `0.5`, or `2`.

    Interpreted it would stay narrow, so that results differ, and most GPUs are slow with float64.

    Args:
        env: whose functions are compiled, for the CPU.
        world: its arrays, as `KernelVector.world` has them.

    Returns:
        "FILE:LINE: FUNCTION: NAME is float64: the line itself", in the order of lines.
        Nothing if a field or constant is float64 itself.

    Raises:
        MissingExtraError: Numba is not installed.
        numba.NumbaError: a function cannot be compiled at all; a note says which.
    """
    numba: Any = _numba()
    if any(of.dtype == torch.float64 for of in world.values()) or any(
        np.asarray(of).dtype == np.float64 for of in env.constants.values()
    ):
        return []
    numbers = {**env.constants, "seed": np.uint64(0)}
    views = {name: tensor.cpu().numpy() for name, tensor in world.items()}
    types = namedtuple("World", [*views, *numbers])  # type: ignore[misc]
    w = numba.typeof(types(**views, **numbers))
    out = numba.typeof(np.empty(env.observation_space.shape, np.float32))
    functions = {name: env.function(name) for name in (*env.resets, *env.phases)}
    made = _compiled(_parts(functions), numba.njit(**_PART), __name__)
    for name, function in functions.items():
        indices = (numba.int64,) * (1 + env.per_agent(name))
        try:
            made[function].compile((w, *indices, *((out,) if name == "observe" else ())))
        except Exception as error:
            error.add_note(function.__qualname__)
            raise
    found = []
    for function, compiled in made.items():
        path = function.__code__.co_filename
        lines: dict[int, dict[str, str]] = {}
        for overload in compiled.overloads.values():
            for line, name, kind in _wide(overload.type_annotation, numba.core.ir):
                lines.setdefault(line, {})[name] = kind
        for line, kinds in lines.items():
            named = {name: kind for name, kind in kinds.items() if name} or {"a value": kinds[""]}
            what = ", ".join(f"{name} is {kind}" for name, kind in sorted(named.items()))
            source = linecache.getline(path, line).strip()
            found.append((path, line, f"{function.__qualname__}: {what}: {source}"))
    return [f"{path}:{line}: {text}" for path, line, text in sorted(found)]


class _Turns:
    """Processes take turns in first calls: one compiles, the others load what it kept.

    Args:
        path: of the lock; None: nothing is compiled.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._had: set[str] = set()

    def of(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The turn of a function: alone if it is the first."""
        if self._path is None or name in self._had:
            return _AT_ONCE
        self._had.add(name)
        return _alone(self._path)


_AT_ONCE = contextlib.nullcontext()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        yield


class _OnCpu:
    def __init__(self, module: ModuleType, num_threads: int, turns: _Turns) -> None:
        self.types, self._num_threads, self._turns = module, num_threads, turns
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None

    def view(self, tensor: Tensor) -> Any:
        return tensor.numpy()

    def begin(self, num_envs: int, *args: Any) -> None:
        with self._turns.of("begin"):
            self.types.begin(*args, 0, num_envs)

    def step(self, num_envs: int, *args: Any) -> None:
        with self._turns.of("step"):
            if self._pool is None:
                self.types.step(*args, 0, num_envs)
                return
            ends = [num_envs * i // self._num_threads for i in range(self._num_threads + 1)]
            own, *others = itertools.pairwise(ends)
            waiting = [self._pool.submit(self.types.step, *args, *share) for share in others]
            self.types.step(*args, *own)
            for other in waiting:
                other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class _OnGpu:
    def __init__(self, module: ModuleType, shape: Shape, cuda: Any, turns: _Turns) -> None:
        self.types, self._shape, self._cuda, self._turns = module, shape, cuda, turns

    def view(self, tensor: Tensor) -> Any:
        # A tensor of the CPU: the simulator's.
        return self._cuda.as_cuda_array(tensor) if tensor.is_cuda else tensor.numpy()

    def begin(self, num_envs: int, *args: Any) -> None:
        with self._turns.of("begin"):
            self._launch(self.types.begin, num_envs, args)

    def step(self, num_envs: int, *args: Any) -> None:
        with self._turns.of("step"):
            self._launch(self.types.step, num_envs, args)

    def close(self) -> None:
        """Nothing is to be ended."""

    def _launch(self, kernel: Any, num_envs: int, args: tuple[Any, ...]) -> None:
        per_block = min(THREADS // self._shape.lanes, num_envs)
        size = -(-num_envs // per_block), per_block * self._shape.lanes
        if torch.cuda.is_available():
            stream = self._cuda.external_stream(torch.cuda.current_stream().cuda_stream)
            kernel[(*size, stream)](*args, num_envs)
        else:
            kernel[size](*args, num_envs)


def _numba() -> Any:
    try:
        import numba
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A kernel environment needs a package that is not installed ({error}).\n"
            "To install it: pip install 'headrace[kernels]'"
        ) from None
    return numba


def _parts(functions: Mapping[str, Callable[..., Any]]) -> dict[FunctionType, dict[str, Any]]:
    """All Python functions that are called, from these on, each with its global names."""
    found: dict[FunctionType, dict[str, Any]] = {}
    todo: list[Any] = list(functions.values())
    while todo:
        function = todo.pop()
        if function not in found:
            world = function.__globals__
            used = {name: world[name] for name in function.__code__.co_names if name in world}
            found[function] = used
            todo += [value for value in used.values() if _is_own(value)]
    return found


def functions_of(env: KernelEnv) -> list[FunctionType]:
    """All Python functions of the author's that are compiled."""
    return list(_parts({name: env.function(name) for name in (*env.resets, *env.phases)}))


def _is_own(value: Any) -> bool:
    """Whether a global name is a Python function that is to be compiled as well."""
    return isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in (
        "numba",
        "numpy",
        "math",
    )


def _compiled(
    found: Mapping[FunctionType, Mapping[str, Any]], jit: Callable[[Any], Any], home: str
) -> dict[Any, Any]:
    """The same functions, each of them compiled, as is what it calls: the originals stay as is.

    What is kept of them is looked for in the module `home`: the author's may have another name the
    next time.
    """
    worlds = {function: {**function.__globals__, "__name__": home} for function in found}
    made = {
        function: jit(
            FunctionType(
                function.__code__, worlds[function], function.__name__, function.__defaults__
            )
        )
        for function in found
    }
    for function, used in found.items():
        worlds[function] |= {name: made[value] for name, value in used.items() if _is_own(value)}
    return made


def _wide(typed: Any, ir: Any) -> Iterator[tuple[int, str, str]]:
    """What of a compiled function is float64 or complex: its line, name ("" if none), and type."""
    for block in typed.blocks.values():
        for assign in block.find_insts(ir.Assign):
            value, names = assign.value, {assign.target.name}
            if isinstance(value, ir.Expr) and value.op in ("binop", "inplace_binop"):
                names |= {operand.name for operand in value.list_vars()}
            elif not isinstance(value, ir.Expr):
                # A constant without a name does no harm until something is computed with it.
                names = {name for name in names if not name.startswith("$")}
            for name in names:
                kind = str(typed.typemap[name])
                if kind in ("float64", "complex64", "complex128"):
                    # Numba calls the second value of x `x.1`, and what has no name `$...`.
                    yield assign.loc.line, name.partition(".")[0] if name[0] != "$" else "", kind


def _digest(text: str, found: Mapping[FunctionType, Mapping[str, Any]], *more: str) -> str:
    """Of everything that compiled code depends on (Numba adds the processor)."""
    parts = [_HOW, text, sys.version, platform.machine(), *more]
    for function, used in sorted(found.items(), key=lambda item: item[0].__qualname__):
        parts += [function.__qualname__, *_code(function.__code__)]
        parts += [
            f"{name}={value!r}:{getattr(value, 'dtype', '')}"
            for name, value in sorted(used.items())
            if not callable(value) and not isinstance(value, ModuleType)
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _code(code: CodeType) -> list[str]:
    """What a function does, as text; without where it stands."""
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    inner = [part for c in code.co_consts if isinstance(c, CodeType) for part in _code(c)]
    return [
        code.co_code.hex(),
        repr(constants),
        repr(code.co_names),
        repr(code.co_varnames),
        *inner,
    ]


def _module(path: str, text: str, names: Mapping[str, Any]) -> ModuleType:
    """The program as a module, with more names."""
    module = ModuleType(Path(path).stem)
    module.__dict__.update(names)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _kept(name: str, text: str) -> str:
    """The program's file: compiled code is kept beside it."""
    path = cache_dir() / f"{name}.py"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.rename(path)
    return str(path)


def cache_dir() -> Path:
    """Where compiled code is kept: nobody else may write there, for it is run."""
    folder = Path.home() / ".cache" / "headrace" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
