"""Compares a kernel environment on the CPU and on a GPU with its interpreted functions.

Each takes one step from many states. Only without floats are whole episodes compared as well.
"""

from collections.abc import Sequence

from headrace.envs.check import plays
from headrace.envs.check.access_trace import describe_failure
from headrace.envs.check.kernel_checks import KernelCase
from headrace.envs.check.plays import TOLERANCE, Device, Difference, compare, rows_of
from headrace.envs.check.report import Check
from headrace.envs.kernels import compiler
from headrace.spec import Array

_MAX_REPORTED = 3
_MAX_EXPLAINED = 40  # differences for which an explanation by rounding is looked for
_NUM_ENVS = 2  # that are compared over several steps in a row


def check_cpu(case: KernelCase) -> Check:
    """Compare the environment, compiled for the CPU, with the interpreted one."""
    return _check(case, "cpu", len(case.places), _num_steps(case))


def check_gpu(case: KernelCase) -> Check:
    """Compare the environment, on the GPU or on Numba's simulator, with the interpreted one."""
    agents, num_states, num_steps = case.env.num_agents, len(case.places), _num_steps(case)
    if compiler.has_gpu():
        return _check(case, "gpu", num_states, num_steps)
    num_states, num_steps = 4 if agents <= 8 else 2, min(num_steps, max(2, 12 // agents))
    missing = "there is no GPU that Numba can use: this is Numba's CUDA simulator"
    return _check(case, "gpu", num_states, num_steps, missing)


def _num_steps(case: KernelCase) -> int:
    return case.num_traced_steps if case.is_integer else 1


def _check(
    case: KernelCase, name: Device, num_states: int, num_steps: int, missing: str = ""
) -> Check:
    """Compare steps from `num_states` states, and `num_steps` steps in a row."""
    assert case.expected is not None
    places = case.places[:num_states]
    requests = case.one_step(places), case.first(_NUM_ENVS, num_steps)
    try:
        step_result, row_result = plays.play_all(requests, name, simulated=bool(missing))
    except Exception as error:
        return Check(name, wrong=(describe_failure(error),), missing=missing)

    def describe(difference: Difference) -> str:
        return difference.describe(case.env, "in plain Python", f"on the {name.upper()}")

    # With floats, only the reset of the steps in a row is compared
    rows = slice(None if case.is_integer else 1)
    expected_row = rows_of(plays.play(requests[1], "python").seen, rows)
    wrong = compare(expected_row, rows_of(row_result.seen, rows), TOLERANCE)
    expected = rows_of(case.expected.seen, slice(1, None), slice(num_states))
    result = rows_of(step_result.seen, slice(1, None))
    differences = compare(expected, result, TOLERANCE)
    unexplained, rounding = _split_differences(case, places, differences, result)
    wrong += unexplained
    done = f"compared with plain Python: a step from each of {len(places)} states"
    if num_steps > 1:
        done += f", {_NUM_ENVS} environments over {num_steps} steps"
    if rounding:
        done += f"; {len(differences)} steps differ, and rounding explains {len(rounding)}"
    notes = tuple(f"rounding decides: {describe(placed)}" for placed in rounding[:_MAX_REPORTED])
    wrong_texts = tuple(map(describe, wrong[:_MAX_REPORTED]))
    return Check(name, done, wrong_texts, notes=notes, missing=missing)


def _split_differences(
    case: KernelCase, places: Array, differences: Sequence[Difference], result: dict[str, Array]
) -> tuple[list[Difference], list[Difference]]:
    """Split differences, placed in the play on the CPU, into wrong ones and those of rounding."""
    wrong: list[Difference] = []
    rounding: list[Difference] = []
    for difference in differences[:_MAX_EXPLAINED]:
        row = slice(difference.env, difference.env + 1)
        outcome = rows_of(result, slice(None), row)
        explained = plays.explained_by_rounding(case.one_step(places[row]), outcome)
        ((t, e),) = places[row].tolist()
        (rounding if explained else wrong).append(difference._replace(step=t + 1, env=e))
        if len(wrong) == _MAX_REPORTED:
            break
    return wrong, rounding
