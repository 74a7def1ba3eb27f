"""Where two plays of a kernel environment differ, and whether rounding explains it.

Left out: playing (`plays.py`), and which plays are compared (`kernel_checks.py`).
"""

from typing import NamedTuple

import numpy as np

from headrace.envs.check.plays import Play, Played, play
from headrace.envs.kernels.env import KernelEnv
from headrace.spec import Array

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
