"""Compiles kernel environments: Numba for the CPU and for CUDA, or no compiler at all.

    python   interpreted, as written: for debugging, and the reference for the others
    cpu      Numba's njit, without the interpreter's lock: threads share the environments
    cuda     Numba's CUDA target, on torch's current stream (simulated with NUMBA_ENABLE_CUDASIM=1)

Compiled code is cached on disk for each user, by a hash of its inputs; one process compiles.
"""

import fcntl
import hashlib
import importlib
import itertools
import linecache
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headrace.envs.kernels import codegen
from headrace.envs.kernels.codegen import THREADS, ProgramSpec
from headrace.envs.kernels.env import KernelEnv
from headrace.errors import MissingExtraError, install_command

Target = Literal["python", "cpu", "cuda"]

_CACHE_VERSION = "2"
"""To be changed together with how functions are compiled: then older cached code is not used."""

# As on a GPU and in NumPy, a division by zero gives infinity. Nothing is allocated, so references
# need no counting: of a world's arrays it can take ten times as long as the functions themselves.
_COMMON_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False}
_PROGRAM_OPTIONS = {**_COMMON_OPTIONS, "cache": True}
# A world is passed as hundreds of numbers, which can take longer than a function: functions are
# inlined. Python never calls them, so they need no wrappers, a third of the compile time.
_FUNCTION_OPTIONS = {
    **_COMMON_OPTIONS, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip

Calls = dict[FunctionType, dict[str, Any]]
"""Functions to compile, each with the module's names that it uses."""


def is_simulated() -> bool:
    """Return whether `cuda` is Numba's simulator in this process: fixed when Numba is imported."""
    return bool(_import_numba().config.ENABLE_CUDASIM)


def has_gpu() -> bool:
    """Return whether torch and Numba can both use a GPU."""
    if is_simulated() or not torch.cuda.is_available():
        return False
    return bool(importlib.import_module("numba.cuda").is_available())


def find_float64(env: KernelEnv, w: Any) -> list[str] | None:
    """Find where a compiler makes float64 of narrower types: a float32 times `0.5`, or `2`.

    Args:
        w: the world of an interpreted `KernelVector`.

    Returns:
        "FILE:LINE: FUNCTION: NAME is float64: the line itself", in the order of lines. None if the
        environment declares float64 itself.

    Raises:
        MissingExtraError: Numba is not installed.
        numba.NumbaError: a function does not compile; a note names it.
    """
    numba: Any = _import_numba()
    if any(np.asarray(value).dtype == np.float64 for value in w):
        return None
    world = numba.typeof(w)
    out = numba.typeof(np.empty(env.observation_space.shape, np.float32))
    functions = env.functions()
    calls = _reachable_functions(functions)
    all_compiled = _compile_functions(calls, numba.njit(**_FUNCTION_OPTIONS), __name__)
    for name, function in functions.items():
        types = [world, *[numba.int64] * (1 + env.per_agent(name))]
        try:
            all_compiled[function].compile((*types, out) if name == "observe" else tuple(types))
        except Exception as error:
            error.add_note(function.__qualname__)
            raise
    findings = []
    for function, compiled in all_compiled.items():
        path = function.__code__.co_filename
        lines: dict[int, dict[str, str]] = {}
        for overload in compiled.overloads.values():
            for line, name, kind in _float64_values(overload.type_annotation, numba.core.ir):
                lines.setdefault(line, {})[name] = kind
        for line, kinds in lines.items():
            named = {name: kind for name, kind in kinds.items() if name} or {"a value": kinds[""]}
            values = ", ".join(f"{name} is {kind}" for name, kind in sorted(named.items()))
            source = linecache.getline(path, line).strip()
            findings.append((path, line, f"{function.__qualname__}: {values}: {source}"))
    return [f"{path}:{line}: {text}" for path, line, text in sorted(findings)]


def compiled_functions(env: KernelEnv) -> list[FunctionType]:
    """Return all Python functions of the author's that are compiled."""
    return list(_reachable_functions(env.functions()))


class Program:
    """A kernel environment's program. Its first call compiles it, one process at a time.

    `module` is what `codegen.generate` describes; without a `lock`, nothing is compiled.
    """

    def __init__(self, module: ModuleType, lock: Path | None, num_threads: int = 1) -> None:
        self.types, self._lock, self._num_threads = module, lock, num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None
        self._called: set[str] = set()

    def view(self, tensor: Tensor) -> Any:
        """Return a tensor's memory in the form that the program takes, without a copy."""
        return tensor.numpy()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def call(self, name: str, num_envs: int, *args: Any) -> None:
        """Call `begin` or `step` of the program for all environments; see `codegen.generate`."""
        if self._lock is None or name in self._called:
            self._run(getattr(self.types, name), num_envs, args)
            return
        with self._lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or the process ends
            self._run(getattr(self.types, name), num_envs, args)
        self._called.add(name)

    def _run(self, function: Any, num_envs: int, args: tuple[Any, ...]) -> None:
        if self._pool is None:
            function(*args, 0, num_envs)
            return
        ends = [num_envs * i // self._num_threads for i in range(self._num_threads + 1)]
        first, *others = itertools.pairwise(ends)
        futures = [self._pool.submit(function, *args, *share) for share in others]
        function(*args, *first)
        for future in futures:
            future.result()


class _GpuProgram(Program):
    def __init__(self, module: ModuleType, lock: Path, lanes: int, cuda: Any) -> None:
        super().__init__(module, lock)
        self._lanes, self._cuda = lanes, cuda
        self._launches: dict[Any, Any] = {}

    def view(self, tensor: Tensor) -> Any:
        # The simulator takes tensors of the CPU
        return self._cuda.as_cuda_array(tensor) if tensor.is_cuda else tensor.numpy()

    def _run(self, function: Any, num_envs: int, args: tuple[Any, ...]) -> None:
        envs_per_block = min(THREADS // self._lanes, num_envs)
        size: tuple[Any, ...] = (-(-num_envs // envs_per_block), envs_per_block * self._lanes)
        if not torch.cuda.is_available():  # the simulator
            function[size](*args, num_envs)
            return
        stream = torch.cuda.current_stream().cuda_stream
        if (key := (function, num_envs, stream)) not in self._launches:
            with warnings.catch_warnings():
                # Numba warns of few blocks; so many environments were asked for.
                warnings.filterwarnings("ignore", ".*Grid size")
                self._launches[key] = function[*size, self._cuda.external_stream(stream)]
        self._launches[key](*args, num_envs)


def make_program(
    env: KernelEnv, spec: ProgramSpec, target: Target, num_threads: int = 1
) -> Program:
    """Make the program of an environment; MissingExtraError without Numba or its CUDA target."""
    functions = {f"env_{name}": function for name, function in env.functions().items()}
    text = codegen.generate(spec, "cuda" if target == "cuda" else "cpu")
    name = type(env).__name__
    if target == "python":
        return Program(_load_module(f"<{name}>", text, functions), None)
    numba: Any = _import_numba()
    calls = _reachable_functions(functions)
    options = f"{_FUNCTION_OPTIONS}{_PROGRAM_OPTIONS}"
    name = f"headrace_{name}_{_cache_key(text, calls, numba.__version__, target, options)}"
    if target == "cuda":
        cuda: Any = importlib.import_module("numba.cuda")
        compile_function, compile_program = cuda.jit(device=True), cuda.jit(cache=True)
        names = {"cuda": cuda}
    else:
        compile_function, names = numba.njit(**_FUNCTION_OPTIONS), {}
        compile_program = numba.njit(**_PROGRAM_OPTIONS)
    if name not in sys.modules:
        compiled = _compile_functions(calls, compile_function, name)
        names |= {name: compiled[function] for name, function in functions.items()}
        module = _load_module(_write_program(name, text), text, names)
        for function in ("begin", "step"):
            setattr(module, function, compile_program(getattr(module, function)))
        sys.modules[name] = module  # Numba's cache looks up the types of arguments here, by name
    module, lock = sys.modules[name], cache_dir() / f"{name}.lock"
    if target == "cuda":
        return _GpuProgram(module, lock, spec.lanes, cuda)
    return Program(module, lock, num_threads)


def _import_numba() -> Any:
    try:
        import numba
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"A kernel environment needs a package that is not installed ({error}).\n"
            f"To install it: {install_command('kernels')}"
        ) from None
    return numba


def _reachable_functions(functions: Mapping[str, Callable[..., Any]]) -> Calls:
    """Find all Python functions that these call, directly or not, and the globals of each."""
    calls: Calls = {}
    pending: list[Any] = list(functions.values())
    while pending:
        function = pending.pop()
        if function not in calls:
            names = function.__globals__
            calls[function] = {k: names[k] for k in function.__code__.co_names if k in names}
            pending += [value for value in calls[function].values() if _is_compiled(value)]
    return calls


def _is_compiled(value: Any) -> bool:
    libraries = ("numba", "numpy", "math")
    return isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in libraries


def _compile_functions(calls: Calls, jit: Callable[[Any], Any], module: str) -> dict[Any, Any]:
    """Return compiled copies, which call compiled copies. The originals stay as they are.

    Numba's cache knows them by `module`: the author's module may have another name the next time.
    """
    names = {function: {**function.__globals__, "__name__": module} for function in calls}
    compiled = {
        f: jit(FunctionType(f.__code__, names[f], f.__name__, f.__defaults__)) for f in calls
    }
    for function, used in calls.items():
        names[function] |= {k: compiled[v] for k, v in used.items() if _is_compiled(v)}
    return compiled


def _float64_values(typed: Any, ir: Any) -> Iterator[tuple[int, str, str]]:
    """Yield line, name ("" if none) and type of each float64 or complex in a compiled function."""
    for block in typed.blocks.values():
        for assign in block.find_insts(ir.Assign):
            value, names = assign.value, {assign.target.name}
            if isinstance(value, ir.Expr) and value.op in ("binop", "inplace_binop"):
                names |= {operand.name for operand in value.list_vars()}
            elif not isinstance(value, ir.Expr):
                # A constant without a name does no harm until something is computed with it
                names = {name for name in names if not name.startswith("$")}
            for name in names:
                kind = str(typed.typemap[name])
                if kind in ("float64", "complex64", "complex128"):
                    # Numba calls the second value of x `x.1`, and a value without a name `$...`
                    yield assign.loc.line, name.partition(".")[0] if name[0] != "$" else "", kind


def _cache_key(text: str, calls: Calls, *more: str) -> str:
    """Hash everything that compiled code depends on (Numba adds the processor)."""
    parts = [_CACHE_VERSION, text, sys.version, platform.machine(), *more]
    for function, used in sorted(calls.items(), key=lambda item: item[0].__qualname__):
        parts += [function.__qualname__, *_describe_code(function.__code__)]
        parts += [
            f"{name}={value!r}:{getattr(value, 'dtype', '')}"
            for name, value in sorted(used.items())
            if not callable(value) and not isinstance(value, ModuleType)
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _describe_code(code: CodeType) -> list[str]:
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    inner = [part for c in code.co_consts if isinstance(c, CodeType) for part in _describe_code(c)]
    names = repr(code.co_names), repr(code.co_varnames)
    return [code.co_code.hex(), repr(constants), *names, *inner]


def _load_module(path: str, text: str, names: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(Path(path).stem)
    module.__dict__.update(names)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def _write_program(name: str, text: str) -> str:
    """Write the program's file, beside which Numba caches compiled code."""
    path = cache_dir() / f"{name}.py"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.rename(path)
    return str(path)


def cache_dir() -> Path:
    """Return the directory of compiled code. It is executed, so only the user may write to it."""
    folder = Path.home() / ".cache" / "headrace" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
