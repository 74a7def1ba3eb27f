"""Compares a kernel environment on the CPU and on a GPU with its interpreted functions.

Each target takes one step from many states, among them states before an end. Environments whose
state has no floats are compared over whole episodes as well; with floats, differences grow.
"""

from collections.abc import Callable, Sequence

from headrace.envs.check.access_trace import describe_failure
from headrace.envs.check.kernel_checks import KernelCase
from headrace.envs.check.plays import (
    TOLERANCE,
    Difference,
    Play,
    PlayResult,
    compare,
    explained_by_rounding,
    observables,
    play,
    play_on_gpu,
)
from headrace.envs.check.report import Check
from headrace.envs.kernels import compiler
from headrace.spec import Array

_MAX_REPORTED = 3
_MAX_EXPLAINED = 40
"""Differences for which an explanation by rounding is looked for."""
_NUM_ENVS = 2
"""Environments that are compared over several steps in a row."""


def check_cpu(case: KernelCase) -> Check:
    """Compare the environment, compiled for the CPU, with the interpreted one."""

    def run(requests: Sequence[Play]) -> list[PlayResult]:
        return [play(request, "cpu") for request in requests]

    return _check(case, "cpu", len(case.places), _num_steps(case), run, "")


def check_gpu(case: KernelCase) -> Check:
    """Compare the environment, on the GPU or on Numba's simulator, with the interpreted one."""
    agents, num_states, num_steps, missing = (
        case.env.num_agents,
        len(case.places),
        _num_steps(case),
        "",
    )
    if not compiler.has_gpu():
        num_states, num_steps = 4 if agents <= 8 else 2, min(num_steps, max(2, 12 // agents))
        missing = "there is no GPU that Numba can use: this is Numba's CUDA simulator"

    def run(requests: Sequence[Play]) -> list[PlayResult]:
        return play_on_gpu(requests, simulated=bool(missing))

    return _check(case, "gpu", num_states, num_steps, run, missing)


def _num_steps(case: KernelCase) -> int:
    """Return the number of steps to compare in a row."""
    return case.num_traced_steps if case.is_integer else 1


def _check(
    case: KernelCase,
    name: str,
    num_states: int,
    num_steps: int,
    run: Callable[[Sequence[Play]], list[PlayResult]],
    missing: str,
) -> Check:
    """Compare steps from `num_states` states, and `num_steps` steps in a row."""
    assert case.expected is not None
    places = case.places[:num_states]
    one_step, in_a_row = case.one_step(places), case.first(_NUM_ENVS, num_steps)
    try:
        step_result, row_result = run([one_step, in_a_row])
    except Exception as error:
        return Check(name, wrong=(describe_failure(error),), missing=missing)

    def describe(difference: Difference) -> str:
        return difference.describe(case.env, "in plain Python", f"on the {name.upper()}")

    # With floats, only the reset of the steps in a row is compared
    rows = slice(None if case.is_integer else 1)
    one, two = (
        {field: array[rows] for field, array in observables(result).items()}
        for result in (play(in_a_row, "python"), row_result)
    )
    wrong = [describe(difference) for difference in compare(one, two, TOLERANCE)]
    expected = observables(case.expected, with_reset=False)
    expected = {field: array[:, :num_states] for field, array in expected.items()}
    result = observables(step_result, with_reset=False)
    differences = compare(expected, result, TOLERANCE)
    unexplained, rounding = _split_differences(case, one_step, differences, result)
    wrong += [describe(_place(difference, places)) for difference in unexplained]
    done = f"compared with plain Python: a step from each of {len(places)} states"
    if num_steps > 1:
        done += f", {_NUM_ENVS} environments over {num_steps} steps"
    notes = [f"rounding decides: {describe(_place(of, places))}" for of in rounding[:_MAX_REPORTED]]
    if rounding:
        done += f"; {len(differences)} steps differ, and rounding explains {len(rounding)}"
    return Check(
        name, done, wrong=tuple(wrong[:_MAX_REPORTED]), notes=tuple(notes), missing=missing
    )


def _split_differences(
    case: KernelCase, request: Play, differences: Sequence[Difference], result: dict[str, Array]
) -> tuple[list[Difference], list[Difference]]:
    """Split differences into wrong ones and those that rounding explains, up to a number."""
    wrong: list[Difference] = []
    rounding: list[Difference] = []
    agents = case.env.num_agents
    for difference in differences[:_MAX_EXPLAINED]:
        row = slice(difference.env, difference.env + 1)
        start = {name: array[row] for name, array in request.start.items()}
        action = request.action[:, row.start * agents : row.stop * agents]
        step = request._replace(env_id=request.env_id[row], action=action, start=start)
        outcome = {name: array[:, row] for name, array in result.items()}
        (rounding if explained_by_rounding(step, outcome) else wrong).append(difference)
        if len(wrong) == _MAX_REPORTED:
            break
    return wrong, rounding


def _place(difference: Difference, places: Array) -> Difference:
    """Return the difference at its step and environment of the play on the CPU."""
    t, e = places[difference.env].tolist()
    return difference._replace(step=t + 1, env=e)
