"""Whether a kernel environment is the same whatever runs it: interpreted, on the CPU, on a GPU.

From many states, among them those before an end, one step is made by each, and compared. Games
whose state is of whole numbers are compared over whole episodes as well; where there are floats,
differences grow. Left out: what a difference is (`plays.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.envs.check.access_trace import failure
from headrace.envs.check.kernel_checks import Case
from headrace.envs.check.plays import (
    TOLERANCE,
    Difference,
    Play,
    Played,
    differences,
    is_rounding,
    outcomes,
    play,
    play_all,
)
from headrace.envs.check.report import Check
from headrace.envs.kernels import compiler
from headrace.spec import Array

_MOST_TOLD = 3
_MOST_TRIED = 40
"""So many different steps are looked at to see whether rounding explains them."""


class _Size(NamedTuple):
    """How much is compared: states from which a step is made, and steps of envs in a row."""

    states: int
    num_envs: int
    num_steps: int


def check_cpu(case: Case) -> Check:
    """Interpreted = compiled for the CPU."""
    size = _Size(len(case.places), *_in_a_row(case))
    return _check(case, "cpu", size, lambda plays: [play(what, "cpu") for what in plays], "")


def check_gpu(case: Case) -> Check:
    """Interpreted = on the GPU, or on Numba's simulator of one."""
    agents = case.env.num_agents
    if compiler.has_gpu():
        size, missing = _Size(len(case.places), *_in_a_row(case)), ""
    else:
        n, num_steps = _in_a_row(case)
        size = _Size(4 if agents <= 8 else 2, n, min(num_steps, max(2, 12 // agents)))
        missing = "there is no GPU that Numba can use: this is Numba's CUDA simulator"

    def run(plays: Sequence[Play]) -> list[Played]:
        return play_all(plays, simulated=bool(missing))

    return _check(case, "gpu", size, run, missing)


def _check(
    case: Case,
    name: str,
    size: _Size,
    run: Callable[[Sequence[Play]], list[Played]],
    missing: str,
) -> Check:
    """Compare it with plain Python."""
    assert case.expected is not None
    places = case.places[: size.states]
    what = case.one_step(places)
    in_a_row = case.first(size.num_envs, size.num_steps)
    try:
        step, row = run([what, in_a_row])
    except Exception as error:
        return Check(name, wrong=(failure(error),), missing=missing)

    def told(difference: Difference) -> str:
        return difference.text(case.env, "in plain Python", f"on the {name.upper()}")

    # Where there are floats, of these only the reset is compared
    rows = slice(None if case.is_whole else 1)
    one, two = (
        {field: of[rows] for field, of in outcomes(played).items()}
        for played in (play(in_a_row, "python"), row)
    )
    wrong = [told(difference) for difference in differences(one, two, TOLERANCE)]
    expected, found = (outcomes(of, begin=False) for of in (case.expected, step))
    expected = {field: of[:, : size.states] for field, of in expected.items()}
    all_apart = differences(expected, found, TOLERANCE)
    apart, rounded = _sort_out(case, what, all_apart, found)
    wrong += [told(_placed(of, places)) for of in apart]
    done = f"held against plain Python: a step from each of {len(places)} states"
    if size.num_steps > 1:
        done += f", {size.num_envs} environments over {size.num_steps} steps"
    notes = [f"rounding decides: {told(_placed(of, places))}" for of in rounded[:_MOST_TOLD]]
    if rounded:
        done += f"; {len(all_apart)} steps differ, and rounding explains {len(rounded)}"
    return Check(name, done, wrong=tuple(wrong[:_MOST_TOLD]), notes=tuple(notes), missing=missing)


def _sort_out(
    case: Case, what: Play, found: Sequence[Difference], other: dict[str, Array]
) -> tuple[list[Difference], list[Difference]]:
    """Differences that are wrong, and those that rounding explains; not all, if they are many."""
    wrong: list[Difference] = []
    rounded: list[Difference] = []
    agents = case.env.num_agents
    for difference in found[:_MOST_TRIED]:
        row = slice(difference.env, difference.env + 1)
        start = {name: of[row] for name, of in what.start.items()}
        action = what.action[:, row.start * agents : row.stop * agents]
        one = what._replace(env_id=what.env_id[row], action=action, start=start)
        near = is_rounding(one, {name: of[:, row] for name, of in other.items()})
        (rounded if near else wrong).append(difference)
        if len(wrong) == _MOST_TOLD:
            break
    return wrong, rounded


def _placed(difference: Difference, places: Array) -> Difference:
    """Where it is in the play on the CPU, from which the states are."""
    t, e = places[difference.env].tolist()
    return difference._replace(step=t + 1, env=e)


def _in_a_row(case: Case) -> tuple[int, int]:
    """Environments and steps that are compared without a copy of the state in between."""
    return 2, case.num_watched if case.is_whole else 1
