"""Plays kernel environments on any target, keeps all results as arrays, and compares two plays.

Without a GPU, Numba's simulator stands in. It is chosen when Numba is imported.
"""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.envs.api import Guards, VectorContext
from headrace.envs.kernels import compiler
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.spaces import specs
from headrace.errors import EnvError
from headrace.spec import Array, EnvSpec, Space

State = dict[str, Array]
"""As returned by `KernelVector.state`, with the observations (`obs.`)."""

Device = Literal["cpu", "gpu"]

TOLERANCE = 1e-5
"""The allowed difference of floats: absolute, and relative beyond 1."""

_NUM_NEARBY = 24  # states that `explained_by_rounding` tries


class Play(NamedTuple):
    """Input of a play.

    Attributes:
        action: `[T, n * agents, ...]`, as a policy emits them.
        start: the states to start from; {}: start with episode `first_episode`.
    """

    env: KernelEnv
    env_id: Array
    action: Array
    seed: int = 0
    start: State = {}  # noqa: RUF012
    first_episode: int = 0


class PlayResult(NamedTuple):
    """The result of a play.

    Attributes:
        seen: all that can be compared, name -> `[T + 1, n, ...]`, or `[T + 1, n, agents, ...]`
            with agents: after the first reset (0 for what only a step has), and after each step.
        state: name -> `[T + 1, n, ...]`: the world, with the observations as `obs.`. The field
            `step` is named `episode_step`.
        action: `[T, n, ...]`, or `[T, n, agents, ...]`: the environment's actions.
        length: `[T, n]`, steps of the episode that ended there; 0: none did.
    """

    seen: dict[str, Array]
    state: State
    action: Array
    length: Array

    @property
    def num_episodes(self) -> int:
        """Episodes that began."""
        return int(self.length.shape[1] + (self.length > 0).sum())

    @property
    def truncated(self) -> Array:
        """`[T, n]` bool: an agent's episode was truncated."""
        by_agent = self.seen["truncated"][1:].reshape(*self.length.shape, -1)
        return np.asarray(by_agent.any(-1))


def kernel_spec(env: KernelEnv) -> EnvSpec:
    """Return what the environment offers to an agent; UnsupportedSpaceError."""
    return specs.read_kernel(type(env).__name__, env)


def random_actions(spec: EnvSpec, shape: tuple[int, int], seed: int) -> Array:
    """Return `[T, rows, ...]`: choices, or Gaussian numbers, some of them out of bounds."""
    return _random(spec.action, shape, np.random.default_rng(seed))


def _random(action: Space, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    if action.parts:
        columns = [_random(part, shape, rng).reshape(*shape, -1) for _, part in action.parts]
        return np.concatenate(columns, -1, dtype=np.float32)
    if action.kind == "box":
        return (2 * rng.standard_normal((*shape, action.size))).astype(np.float32)
    if action.kind == "discrete":
        return rng.integers(0, action.nvec[0], shape)
    return rng.integers(0, action.nvec, (*shape, action.size))


def play(request: Play, target: Target, *, quiet: bool = True) -> PlayResult:
    """Play in this process; `quiet` hides NumPy's warnings in interpreted code."""
    env, spec, num_steps = request.env, kernel_spec(request.env), len(request.action)
    rows = (len(request.env_id), env.num_agents)
    guards = Guards(enabled=False)
    context = VectorContext(spec, request.env_id, request.seed, worker="", guards=guards)
    vector = KernelVector(env, context, target=target)
    columns = batch.columns(spec, {}, num_steps, math.prod(rows))
    fragment = batch.allocate(columns, device=vector.device)
    fragment.action.copy_(torch.from_numpy(request.action))
    try:
        with np.errstate(all="ignore" if quiet else "warn"):
            if request.start:
                vector.restore(request.start)
            elif request.first_episode:
                vector.start_after(request.first_episode)
            vector.bind(fragment)
            states, actions = [vector.state()], []
            for t in range(num_steps):
                vector.step(t)
                states.append(vector.state())
                actions.append(vector.world["action"].cpu().numpy().copy())
        length = vector.ended_length.cpu().numpy().copy()
    finally:
        vector.close()
    arrays = {name: tensor.cpu().numpy() for name, tensor in batch.named_tensors(fragment).items()}
    state = {name: np.stack([state[name] for state in states]) for name in states[0]}
    state["obs."] = arrays["obs"].reshape(num_steps + 1, rows[0], -1)
    shape = (num_steps + 1, *(rows if env.agents else rows[:1]))
    by_step = {
        name: np.concatenate([np.zeros_like(arrays[name][:1]), arrays[name]]).reshape(shape)
        for name in ("terminated", "truncated", "reward", "valid")
    }
    omitted = ("episode", "so_far", "episode_step", "obs.")
    # Differences are reported in this order: where an episode ends, all else follows from that
    seen = {
        "terminated": by_step["terminated"],
        "truncated": by_step["truncated"],
        **{f"w.{name}": array for name, array in state.items() if name not in omitted},
        "reward": by_step["reward"],
        "observation": arrays["obs"].reshape(*shape, -1),
        "final observation": _final_obs(fragment).reshape(*shape, -1),
        "valid": by_step["valid"],
        "w.step": state["episode_step"],
    }
    return PlayResult(seen, state, np.stack(actions), length)


def _final_obs(fragment: Fragment) -> Array:
    """Return the final observations as `[T + 1, rows, size]`, that of step t in row t + 1."""
    source, step, row = (tensor.cpu().numpy() for tensor in fragment.finals())  # type: ignore[union-attr]
    used = step < fragment.num_steps
    result = np.zeros((fragment.num_steps + 1, fragment.num_envs, source.shape[-1]), source.dtype)
    result[step[used] + 1, row[used]] = source[used]
    return result


def play_all(
    requests: Sequence[Play], device: Device, *, simulated: bool = False
) -> list[PlayResult]:
    """Play compiled; `simulated`: on Numba's simulator, in a process of its own if need be.

    Raises:
        EnvError: the simulator's process failed.
    """
    if not simulated or compiler.is_simulated():
        return [play(request, "cuda" if device == "gpu" else "cpu") for request in requests]
    # Hide a real GPU from the simulator
    variables = {"NUMBA_ENABLE_CUDASIM": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import _play_from_stdin as f; f()"],
        input=cloudpickle.dumps(list(requests)),
        capture_output=True,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        output = done.stderr.decode(errors="replace").strip()
        raise EnvError(f"{output}\nThe process of Numba's CUDA simulator ended with an error.")
    results: list[PlayResult] = cloudpickle.loads(done.stdout)
    return results


def _play_from_stdin() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the environment's functions print goes to stderr
    requests: Any = cloudpickle.load(sys.stdin.buffer)
    with output:
        cloudpickle.dump(play_all(requests, "gpu"), output)


def describe_place(env: KernelEnv, field: str, step: int, e: int, *rest: int) -> str:
    """Describe a place of `PlayResult.seen`; `rest` is the agent, if there are agents, and more."""
    agent, position = "", [*rest]
    if env.agents and field not in {f"w.{name}" for name in (*env.state, "step")}:
        agent = f", agent {position.pop(0)}"
    index = f"[{', '.join(map(str, position))}]" if position else ""
    moment = f"step {step}" if step else "the first reset"
    return f"{field}{index} after {moment}, env {e}{agent}"


class Difference(NamedTuple):
    """A difference of two plays: the place, as for `describe_place`, and the two values."""

    step: int
    env: int
    field: str
    position: tuple[int, ...]
    one: object
    other: object

    def describe(self, env: KernelEnv, one: str, other: str) -> str:
        """Describe it for people; `one` and `other` name the two plays."""
        place = describe_place(env, self.field, self.step, self.env, *self.position)
        return f"{place}: {self.one} {one}, {self.other} {other}"


def rows_of(seen: dict[str, Array], steps: slice, envs: slice = slice(None)) -> dict[str, Array]:
    """Return these rows and environments of `PlayResult.seen`."""
    return {name: array[steps, envs] for name, array in seen.items()}


def _differ(one: Array, other: Array, tolerance: float) -> Array:
    differ: Array = one != other
    if not _is_float(one):
        return differ
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(one - other) <= tolerance * np.maximum(1, np.abs(one))
    apart: Array = differ & ~near & ~(np.isnan(one) & np.isnan(other))
    return apart


def compare(
    one: dict[str, Array], other: dict[str, Array], tolerance: float = 0.0
) -> list[Difference]:
    """Return the first difference of each environment, in the order of steps."""
    first_of: dict[int, Difference] = {}
    for name, array in one.items():
        places = np.argwhere(_differ(array, other[name], tolerance))
        _, first = np.unique(places[:, 1], return_index=True)
        for step, env, *rest in places[first].tolist():
            if env not in first_of or step < first_of[env].step:
                place = (step, env, *rest)
                values = array[place].item(), other[name][place].item()
                first_of[env] = Difference(step, env, name, tuple(rest), *values)
    return sorted(first_of.values(), key=lambda difference: difference[:2])


def explained_by_rounding(step: Play, result: dict[str, Array]) -> bool:
    """Return whether one step of one environment has this result if its floats change by 1e-5.

    The step is interpreted. `result` is what another target's step gave, `[1, 1, ...]`.
    """
    rng = np.random.default_rng(0)
    nearby: list[dict[str, Array]] = []

    def move(array: Array, sign: int) -> Array:
        if not _is_float(array):
            return array
        signs = sign if sign < 2 else rng.choice((-1, 1), array.shape)
        moved: Array = array + signs * TOLERANCE * np.maximum(1, np.abs(array))
        return moved.astype(array.dtype)

    for sign in (0, 1, -1, *[2] * (_NUM_NEARBY - 3)):  # 2: random signs
        start = {name: move(array, sign) for name, array in step.start.items()}
        try:
            played = play(step._replace(action=move(step.action, 2), start=start), "python")
        except (ArithmeticError, IndexError, ValueError):
            continue  # a state near a possible one need not be possible
        nearby.append(rows_of(played.seen, slice(1, None)))
    return bool(nearby) and all(
        _is_among(np.stack([other[name] for other in nearby]), value)
        for name, value in result.items()
    )


def _is_among(near: Array, value: Array) -> bool:
    """Return whether each float is within the range of `near`, `[k, ...]`, or is one of them."""
    if not _is_float(value):
        return bool((near == value).any(0).all())
    margin = TOLERANCE * np.maximum(1, np.abs(value))
    between = (near.min(0) - margin <= value) & (value <= near.max(0) + margin)
    return bool((between | np.isnan(value) & np.isnan(near).any(0)).all())


def _is_float(array: Array) -> bool:
    return np.issubdtype(array.dtype, np.floating)
