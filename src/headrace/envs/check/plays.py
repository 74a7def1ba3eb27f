"""Plays kernel environments on any target, keeps all results as arrays, and compares two plays.

Without a GPU, Numba's simulator stands in. It is chosen when Numba is imported, so it runs in a
process of its own, unless this process has it already.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from headrace import batch
from headrace.batch import Fragment
from headrace.envs import spaces
from headrace.envs.api import Guards, VectorContext
from headrace.envs.kernels import compiler
from headrace.envs.kernels.compiler import Target
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.vector import KernelVector
from headrace.errors import EnvError
from headrace.spec import Array, EnvSpec

State = dict[str, Array]
"""As returned by `KernelVector.state`, with the observations (`obs.`)."""

TOLERANCE = 1e-5
"""The allowed difference of floats: absolute, and relative beyond 1."""

_NUM_NEARBY = 24
"""How many nearby states `explained_by_rounding` tries."""


class Play(NamedTuple):
    """Input of a play.

    Attributes:
        action: `[T, n * agents, ...]`, as a policy emits them.
        start: the states to start from; {}: start with an episode.
        first_episode: the index of that episode.
    """

    env: KernelEnv
    env_id: Array
    action: Array
    seed: int = 0
    start: State = {}  # noqa: RUF012
    first_episode: int = 0


class PlayResult(NamedTuple):
    """The result of a play: `rows` are `[T, n, ...]`, or `[T, n, agents, ...]` with agents.

    Attributes:
        state: name -> `[T + 1, n, ...]`: the world before each step, and after the last. The field
            `step` is named `episode_step`.
        obs: `[T + 1, n, agents, size]`.
        rows: `action` (the environment's), `reward`, `terminated`, `truncated`, `valid`, and
            `final_obs`, which is 0 where none was kept.
        length: `[T, n]`, steps of the episode that ended there; 0: none did.
    """

    state: dict[str, Array]
    obs: Array
    rows: dict[str, Array]
    length: Array

    @property
    def num_episodes(self) -> int:
        """Episodes that began."""
        return int(self.length.shape[1] + (self.length > 0).sum())

    @property
    def truncated(self) -> Array:
        """`[T, n]` bool: an agent's episode was truncated."""
        by_agent = self.rows["truncated"].reshape(*self.length.shape, -1)
        return np.asarray(by_agent.any(-1))

    def at(self, t: Array, e: Array) -> State:
        """Return the states at steps `t` of environments `e`, both `[rows]`, to start from."""
        obs = self.obs[t, e].reshape(len(t), -1)
        return {name: array[t, e] for name, array in self.state.items()} | {"obs.": obs}


def kernel_spec(env: KernelEnv) -> EnvSpec:
    """Return what the environment offers to an agent; UnsupportedSpaceError."""
    return spaces.read_kernel(type(env).__name__, env)


def random_actions(spec: EnvSpec, shape: tuple[int, int], seed: int) -> Array:
    """Return `[T, rows, ...]`: choices, or Gaussian numbers, some of them out of bounds."""
    rng = np.random.default_rng(seed)
    if spec.action.kind == "box":
        return (2 * rng.standard_normal((*shape, spec.action.size))).astype(np.float32)
    nvec = spec.action.nvec[0] if spec.action.kind == "discrete" else spec.action.nvec
    return rng.integers(0, nvec, (*shape, *spec.action.shape))


def play(request: Play, target: Target, *, quiet: bool = True) -> PlayResult:
    """Play in this process; `quiet` hides NumPy's warnings in interpreted code.

    Raises:
        Exception: anything that the environment's functions or their compiler raise.
    """
    env, spec, num_agents = request.env, kernel_spec(request.env), request.env.num_agents
    num_steps, n = len(request.action), len(request.env_id)
    guards = Guards(enabled=False)
    context = VectorContext(spec, request.env_id, request.seed, worker="", guards=guards)
    vector = KernelVector(env, context, target=target)
    try:
        if request.start:
            vector.restore(request.start)
        elif request.first_episode:
            vector.start_after(request.first_episode)
        columns = batch.columns(spec, {}, num_steps, n * num_agents)
        fragment = batch.allocate(columns, device=vector.device)
        fragment.action.copy_(torch.from_numpy(request.action))
        with np.errstate(all="ignore" if quiet else "warn"):
            vector.bind(fragment)
        states, actions = [vector.state()], []
        for t in range(num_steps):
            with np.errstate(all="ignore" if quiet else "warn"):
                vector.step(t)
            states.append(vector.state())
            actions.append(vector.world["action"].cpu().numpy().copy())
        length = vector.ended_length.cpu().numpy().copy()
    finally:
        vector.close()
    agents = (num_agents,) if env.agents else ()
    rows = {
        name: getattr(fragment, name).cpu().numpy().reshape(num_steps, n, *agents)
        for name in ("reward", "terminated", "truncated", "valid")
    }
    return PlayResult(
        {name: np.stack([state[name] for state in states]) for name in states[0]},
        _to_numpy(fragment.obs).reshape(num_steps + 1, n, *agents, -1),
        {"action": np.stack(actions), **rows, "final_obs": _final_obs(fragment, (n, *agents))},
        length,
    )


def _final_obs(fragment: Fragment, rows: tuple[int, ...]) -> Array:
    """Return the final observations as `[T, *rows, size]`."""
    num_steps, (obs, step, row) = fragment.num_steps, fragment.finals()
    source = _to_numpy(obs)
    result = np.zeros((num_steps, fragment.num_envs, source.shape[-1]), source.dtype)
    used = (step < num_steps).cpu().numpy()
    result[step.cpu().numpy()[used], row.cpu().numpy()[used]] = source[used]
    return result.reshape(num_steps, *rows, -1)


def _to_numpy(obs: batch.Obs) -> Array:
    assert isinstance(obs, torch.Tensor)
    array: Array = obs.cpu().numpy()
    return array


def play_on_gpu(requests: Sequence[Play], *, simulated: bool) -> list[PlayResult]:
    """Play on this machine's GPU, or on Numba's simulator.

    Raises:
        EnvError: the simulator's process failed.
        Exception: see `play`.
    """
    if not simulated or compiler.is_simulated():
        return [play(request, "cuda") for request in requests]
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
    """Read requests from standard input, and write the results to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the environment's functions print goes to stderr
    requests: Any = cloudpickle.load(sys.stdin.buffer)
    with output:
        cloudpickle.dump([play(request, "cuda") for request in requests], output)


class Difference(NamedTuple):
    """A difference of two plays.

    Attributes:
        step: 0: after the reset at the beginning.
        field: `w.` and a name of the state, or another name of `observables`.
        position: within the environment: the agent, if there are agents, then the rest.
    """

    step: int
    env: int
    field: str
    position: tuple[int, ...]
    one: object
    other: object

    def describe(self, env: KernelEnv, one: str, other: str) -> str:
        """Describe it for people; `one` and `other` name the two plays."""
        rest, agent = list(self.position), ""
        env_fields = {f"w.{name}" for name in (*env.state, "step")}
        if env.agents and self.field not in env_fields:
            agent = f", agent {rest.pop(0)}"
        part = f"[{', '.join(map(str, rest))}]" if rest else ""
        moment = f"step {self.step}" if self.step else "the first reset"
        return (
            f"{self.field}{part} after {moment}, env {self.env}{agent}: {self.one} {one}, "
            f"{self.other} {other}"
        )


def observables(result: PlayResult, *, with_reset: bool = True) -> dict[str, Array]:
    """Return all that can be compared, name -> `[T + 1, n, ...]`; row 0 is after the reset.

    Plays that start with states have no reset: leave out row 0.
    """
    first = 0 if with_reset else 1
    rows = {
        name: np.concatenate([np.zeros_like(column[: 1 - first]), column])
        for name, column in result.rows.items()
    }
    omitted = ("episode", "so_far", "episode_step")
    states = {f"w.{k}": array[first:] for k, array in result.state.items() if k not in omitted}
    # Differences are reported in this order: where an episode ends, all else follows from that
    return {
        "terminated": rows["terminated"],
        "truncated": rows["truncated"],
        **states,
        "reward": rows["reward"],
        "observation": result.obs[first:],
        "final observation": rows["final_obs"],
        "valid": rows["valid"],
        "w.step": result.state["episode_step"][first:],
    }


def _differ(one: Array, other: Array, tolerance: float) -> Array:
    """Return where arrays differ; floats, by more than the tolerance."""
    differ: Array = one != other
    if not np.issubdtype(one.dtype, np.floating):
        return differ
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(one - other) <= tolerance * np.maximum(1, np.abs(one))
    apart: Array = differ & ~near & ~(np.isnan(one) & np.isnan(other))
    return apart


def compare(
    one: dict[str, Array], other: dict[str, Array], tolerance: float = 0.0
) -> list[Difference]:
    """Return the first difference of each environment's `observables`, in the order of steps."""
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

    The step is interpreted. `result` has the `observables` of another target, `[1, 1, ...]`.
    """
    floats = [name for name, array in step.start.items() if _is_float(array)]
    rng = np.random.default_rng(0)
    nearby: list[dict[str, Array]] = []
    for attempt in range(_NUM_NEARBY):
        start = dict(step.start)
        for name in floats:
            array = step.start[name]
            sign = rng.choice((-1, 1), array.shape) if attempt > 2 else (0, 1, -1)[attempt]
            moved = array + sign * TOLERANCE * np.maximum(1, np.abs(array))
            start[name] = moved.astype(array.dtype)
        action = step.action
        if _is_float(action):
            action = action + (rng.choice((-1, 1), action.shape) * TOLERANCE).astype(action.dtype)
        try:
            played = play(step._replace(action=action, start=start), "python")
        except (ArithmeticError, IndexError, ValueError):
            continue  # a state near a possible one need not be possible
        nearby.append(observables(played, with_reset=False))
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
