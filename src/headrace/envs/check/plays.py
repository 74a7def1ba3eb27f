"""Playing a kernel environment, whatever runs it, with all that happens kept as arrays.

Where there is no GPU, Numba's simulator of one stands in, which is chosen as Numba is imported: so
it runs in a process of its own (`_serve`), unless this one has it already.

Left out: what is made of it (`plays.py`, `kernel_checks.py`).
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
"""As `KernelVector.state` gives it, with the observations (`obs.`)."""


class Play(NamedTuple):
    """What to play.

    Attributes:
        env: the environment.
        env_id: `[n]`, which of a run's.
        action: `[T, n * agents, ...]`, as a policy emits them.
        seed: of the run.
        start: where each begins; {}: with an episode.
        first_episode: then, the index of that episode.
    """

    env: KernelEnv
    env_id: Array
    action: Array
    seed: int = 0
    start: State = {}  # noqa: RUF012
    first_episode: int = 0


class Played(NamedTuple):
    """What happened: `rows` are `[T, n, ...]`, or `[T, n, agents, ...]` if there are several.

    Attributes:
        state: name -> `[T + 1, n, ...]`: the world before each step, and after the last. `step` is
            `episode_step` here.
        obs: `[T + 1, n, agents, size]`, as `state`.
        rows: `action` (the environment's), `reward`, `terminated`, `truncated`, `valid`, and
            `final_obs`, which is 0 where none was kept.
        length: `[T, n]`, steps of an episode that ended there; 0: none did.
    """

    state: dict[str, Array]
    obs: Array
    rows: dict[str, Array]
    length: Array

    @property
    def num_begun(self) -> int:
        """Episodes, the unfinished ones included."""
        return int(self.length.shape[1] + (self.length > 0).sum())

    def at(self, t: Array, e: Array) -> State:
        """Rows of states from which to play: `t` and `e` are `[rows]`."""
        obs = self.obs[t, e].reshape(len(t), -1)
        return {name: of[t, e] for name, of in self.state.items()} | {"obs.": obs}


def spec_of(env: KernelEnv) -> EnvSpec:
    """What the environment offers to an agent; UnsupportedSpaceError."""
    return spaces.of_kernel(type(env).__name__, env)


def random_actions(spec: EnvSpec, shape: tuple[int, int], seed: int) -> Array:
    """`[T, rows, ...]`: choices, or Gaussian numbers, of which some are out of bounds."""
    rng = np.random.default_rng(seed)
    if spec.action.kind == "box":
        return (2 * rng.standard_normal((*shape, spec.action.size))).astype(np.float32)
    nvec = spec.action.nvec[0] if spec.action.kind == "discrete" else spec.action.nvec
    return rng.integers(0, nvec, (*shape, *spec.action.shape))


def play(what: Play, target: Target, *, quiet: bool = True) -> Played:
    """Play it, here.

    Args:
        what: what to play.
        target: what runs it.
        quiet: say nothing of overflows and divisions by zero, where it is interpreted.

    Raises:
        Exception: whatever the environment's functions raise, or their compiler.
    """
    env, spec, num_agents = what.env, spec_of(what.env), what.env.num_agents
    num_steps, n = len(what.action), len(what.env_id)
    guards = Guards(enabled=False)
    context = VectorContext(spec, what.env_id, what.seed, worker="", guards=guards)
    vector = KernelVector(env, context, target=target)
    try:
        if what.start:
            vector.restore(what.start)
        elif what.first_episode:
            vector.start_after(what.first_episode)
        columns = batch.columns(spec, {}, num_steps, n * num_agents)
        fragment = batch.allocate(columns, device=vector.device)
        fragment.action.copy_(torch.from_numpy(what.action))
        with np.errstate(all="ignore" if quiet else "warn"):
            vector.bind(fragment)
        states, actions = [vector.state()], []
        for t in range(num_steps):
            with np.errstate(all="ignore" if quiet else "warn"):
                vector.step(t)
            states.append(vector.state())
            actions.append(vector.world["action"].cpu().numpy().copy())
        length = vector.books["ended_length"].cpu().numpy().copy()
    finally:
        vector.close()
    agents = (num_agents,) if env.agents else ()
    rows = {
        name: getattr(fragment, name).cpu().numpy().reshape(num_steps, n, *agents)
        for name in ("reward", "terminated", "truncated", "valid")
    }
    return Played(
        {name: np.stack([state[name] for state in states]) for name in states[0]},
        _of(fragment.obs).reshape(num_steps + 1, n, *agents, -1),
        {"action": np.stack(actions), **rows, "final_obs": _finals(fragment, (n, *agents))},
        length,
    )


def _finals(fragment: Fragment, rows: tuple[int, ...]) -> Array:
    """`[T, *rows, size]`."""
    num_steps, (obs, step, row) = fragment.num_steps, fragment.finals()
    found = np.zeros((num_steps, fragment.num_envs, _of(obs).shape[-1]), _of(obs).dtype)
    used = (step < num_steps).cpu().numpy()
    found[step.cpu().numpy()[used], row.cpu().numpy()[used]] = _of(obs)[used]
    return found.reshape(num_steps, *rows, -1)


def _of(obs: batch.Obs) -> Array:
    assert isinstance(obs, torch.Tensor)
    array: Array = obs.cpu().numpy()
    return array


def play_all(plays: Sequence[Play], *, simulated: bool) -> list[Played]:
    """Play them on a GPU.

    Args:
        plays: what to play.
        simulated: on Numba's simulator, and not on this machine's GPU.

    Raises:
        EnvError: the process of the simulator failed.
        Exception: see `play`.
    """
    if not simulated or compiler.is_simulated():
        return [play(what, "cuda") for what in plays]
    # A GPU that is there must not be taken for the simulator's
    more = {"NUMBA_ENABLE_CUDASIM": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.envs.check.plays import _serve; _serve()"],
        input=cloudpickle.dumps(list(plays)),
        capture_output=True,
        env=os.environ | more | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise EnvError(f"{said}\nThe process of Numba's CUDA simulator ended with an error.")
    played: list[Played] = cloudpickle.loads(done.stdout)
    return played


def _serve() -> None:
    """Plays come from standard input, what happened goes to standard output."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an environment's functions print
    plays: Any = cloudpickle.load(sys.stdin.buffer)
    with output:
        cloudpickle.dump([play(what, "cuda") for what in plays], output)


# Where two plays of a kernel environment differ, and whether rounding explains it.


TOLERANCE = 1e-5
"""How far floats may be apart, absolutely or, beyond 1, relatively."""

_NUM_NEAR = 24
"""So many states are tried near one, to see what rounding can make of it."""


class Difference(NamedTuple):
    """Where two plays differ.

    Attributes:
        step: 0: after the reset with which they begin.
        env: row of the environment.
        field: `w.` and a name of the state, or what `outcomes` has besides.
        at: within the environment: the agent, if there are several, and what is inside of it.
        one, other: the two values.
    """

    step: int
    env: int
    field: str
    at: tuple[int, ...]
    one: object
    other: object

    def text(self, env: KernelEnv, one: str, other: str) -> str:
        """For people; `one` and `other` say what ran the plays."""
        inside, where = list(self.at), ""
        whole = {f"w.{name}" for name in (*env.state, "step")}
        if env.agents and self.field not in whole:
            where = f", agent {inside.pop(0)}"
        part = f"[{', '.join(map(str, inside))}]" if inside else ""
        when = f"step {self.step}" if self.step else "the first reset"
        return (
            f"{self.field}{part} after {when}, env {self.env}{where}: {self.one} {one}, "
            f"{self.other} {other}"
        )


def outcomes(played: Played, *, begin: bool = True) -> dict[str, Array]:
    """Name -> `[T + 1, n, ...]`, all that can be seen: row 0 is after the reset at the beginning.

    Args:
        played: what happened.
        begin: False: without row 0, where the plays begin with given states.
    """
    first = 0 if begin else 1
    rows = {
        name: np.concatenate([np.zeros_like(of[:1]) if begin else of[:0], of])
        for name, of in played.rows.items()
    }
    kept = ("episode", "so_far", "episode_step")
    states = {f"w.{name}": of[first:] for name, of in played.state.items() if name not in kept}
    # In this order differences are told: where an episode ends, all else follows from that
    return {
        "terminated": rows["terminated"],
        "truncated": rows["truncated"],
        **states,
        "reward": rows["reward"],
        "observation": played.obs[first:],
        "final observation": rows["final_obs"],
        "valid": rows["valid"],
        "w.step": played.state["episode_step"][first:],
    }


def far(one: Array, other: Array, tolerance: float) -> Array:
    """Where arrays differ: integers and flags at all, floats by more than the tolerance."""
    differ: Array = one != other
    if not np.issubdtype(one.dtype, np.floating):
        return differ
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(one - other) <= tolerance * np.maximum(1, np.abs(one))
    apart: Array = differ & ~near & ~(np.isnan(one) & np.isnan(other))
    return apart


def differences(
    one: dict[str, Array], other: dict[str, Array], tolerance: float = 0.0
) -> list[Difference]:
    """The first difference of each environment that has some, in the order of steps.

    Args:
        one: from `outcomes`.
        other: of another play of the same.
        tolerance: for floats.
    """
    found: dict[int, Difference] = {}
    for name, of in one.items():
        places = np.argwhere(far(of, other[name], tolerance))
        _, first = np.unique(places[:, 1], return_index=True)
        for step, env, *rest in places[first].tolist():
            if env not in found or step < found[env].step:
                place = (step, env, *rest)
                values = of[place].item(), other[name][place].item()
                found[env] = Difference(step, env, name, tuple(rest), *values)
    return sorted(found.values(), key=lambda difference: difference[:2])


def is_rounding(what: Play, other: dict[str, Array]) -> bool:
    """Whether one step, interpreted, can come out like another if its floats are off by 1e-5.

    Args:
        what: the step, of one environment.
        other: `[1, 1, ...]`, what came out elsewhere (`outcomes`).
    """
    floats = [name for name, of in what.start.items() if np.issubdtype(of.dtype, np.floating)]
    rng = np.random.default_rng(0)
    near: list[dict[str, Array]] = []
    for attempt in range(_NUM_NEAR):
        moved = dict(what.start)
        for name in floats:
            of = what.start[name]
            by = rng.choice((-1, 1), of.shape) if attempt > 2 else (0, 1, -1)[attempt]
            moved[name] = (of + by * TOLERANCE * np.maximum(1, np.abs(of))).astype(of.dtype)
        action = what.action
        if np.issubdtype(action.dtype, np.floating):
            action = action + (rng.choice((-1, 1), action.shape) * TOLERANCE).astype(action.dtype)
        try:
            played = play(what._replace(action=action, start=moved), "python")
        except (ArithmeticError, IndexError, ValueError):
            continue  # a state that is near one that was met need not be one that can be met
        near.append(outcomes(played, begin=False))
    return bool(near) and all(
        _is_among(np.stack([of[name] for of in near]), value) for name, value in other.items()
    )


def _is_among(near: Array, value: Array) -> bool:
    """Whether each number is between those of `near`, `[k, ...]`; a whole one: is one of them."""
    if not np.issubdtype(value.dtype, np.floating):
        return bool((near == value).any(0).all())
    room = TOLERANCE * np.maximum(1, np.abs(value))
    between = (near.min(0) - room <= value) & (value <= near.max(0) + room)
    return bool((between | np.isnan(value) & np.isnan(near).any(0)).all())
