"""One turn of a contestant: a process of its own, and what it printed in its last line.

That line is JSON (`RESULT {...}` or only the object). Left out: who takes part (`contestants.py`),
and taking turns (`turns.py`).
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.contestants import SCRATCH, TURN, Contestant
from benchmarks.harness.machine import ROOT
from benchmarks.harness.result import read_result

MOST_EXTRA_WORK = 1.1  # asynchronous trainers end a little after the goal


class TurnError(Exception):
    """A turn gave no figure; the message says why."""


@dataclass(frozen=True)
class Work:
    """What each contestant has to do in a turn, and which figure of its result counts.

    Attributes:
        env_steps: as many, and at most a tenth more; None: as many as it takes.
        figure: its name in the result; `turn_s` is the turn's wall time in seconds, from starting
            the process to its end, which is measured here, outside of it.
        unit: of the figure.
        lower_is_better: of the figure.
        least_return: mean return of the last 100 episodes that it has to end with.
        limit_s: seconds that a turn may take.
    """

    env_steps: int | None
    figure: str = "env_steps_per_s"
    unit: str = "env steps/s"
    lower_is_better: bool = False
    least_return: float | None = None
    limit_s: float = 300.0

    def check(self, result: dict[str, Any]) -> None:
        """Raise ValueError, TypeError or KeyError if `result` has no figure, or TurnError if it
        is of other work."""
        float(result[self.figure])
        if self.env_steps is not None:
            done = int(result["env_steps"])
            if not self.env_steps <= done <= MOST_EXTRA_WORK * self.env_steps:
                raise TurnError(
                    f"did other work: {done:,} env steps; expected {self.env_steps:,} and at most "
                    f"{MOST_EXTRA_WORK - 1:.0%} more"
                )
        if self.least_return is not None:
            reached = result["mean_return"]
            if reached is None or reached < self.least_return:
                raise TurnError(
                    f"not solved: mean return {reached} after {result.get('env_steps')} env "
                    f"steps; expected {self.least_return:g}"
                )


def take_turn(contestant: Contestant, work: Work, *, turn: int = 0) -> dict[str, Any]:
    """Run a contestant once; what it printed, and `turn_s`.

    Args:
        contestant: who.
        work: what it has to do. A limit only has to give the figure.
        turn: its number, from 0.

    Raises:
        TurnError: it failed, printed no result, did other work, or took longer than its `limit_s`.
    """
    # What a peer's daemons write there while they end must not end the benchmark.
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        out, err, scratch = Path(folder, "stdout"), Path(folder, "stderr"), Path(folder, "scratch")
        scratch.mkdir()
        given = {SCRATCH: str(scratch), TURN: str(turn)}
        command = [_filled_in(word, given) for word in contestant.command]
        with out.open("w") as stdout, err.open("w") as stderr, _cores(contestant.cores):
            began = time.perf_counter()
            # A session of its own: whatever it starts can be ended with it.
            process = subprocess.Popen(
                command,
                cwd=scratch,
                env=_surroundings(scratch, contestant.threads),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            late = False
            try:
                process.wait(work.limit_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                if process.returncode is None:  # too late, or Ctrl-C here
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            turn_s = time.perf_counter() - began
        said, complained = out.read_text().strip(), err.read_text().strip()
    tail = "\n".join(said.splitlines()[-5:] + complained.splitlines()[-15:])
    if late:
        raise TurnError(f"took longer than {work.limit_s:g} s, and was ended\n{tail}")
    if process.returncode:
        raise TurnError(f"ended with {process.returncode}\n{tail}")
    if contestant.must_say not in said + complained:
        raise TurnError(f"did other work: expected {contestant.must_say!r} in its output\n{tail}")
    result = _result(said.rpartition("\n")[2], tail) | {"turn_s": turn_s}
    try:
        (Work(None, work.figure) if contestant.is_limit else work).check(result)
    except TurnError as error:
        raise TurnError(f"{error}\n{tail}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise _no_result(f"{work.figure} and env_steps", error, tail) from error
    return result


def _result(last_line: str, tail: str) -> dict[str, Any]:
    """The object in a contestant's last line."""
    try:
        return read_result(last_line)
    except (ValueError, TypeError) as error:
        raise _no_result("an object", error, tail) from error


def _no_result(expected: str, error: Exception, tail: str) -> TurnError:
    return TurnError(
        f"printed no result: expected, as the last line, JSON with {expected} "
        f"({type(error).__name__}: {error})\n{tail}"
    )


def _filled_in(word: str, given: dict[str, str]) -> str:
    for name, value in given.items():
        word = word.replace(name, value)
    return word


_LEFT_OUT = "PYTHONDONTWRITEBYTECODE", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


def _surroundings(scratch: Path, threads: int) -> dict[str, str]:
    """Environment variables: `benchmarks` is found, and what libraries leave behind is removed.

    How threads wait is for each contestant to say: `import headrace` here has set it for Headrace.
    Python may keep what it compiles, as it does by default: what pip installed is compiled already,
    and Headrace, where it is installed from its source, would be compiled with each start.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    more = {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    return kept | more | dict.fromkeys(names, str(threads))


@contextlib.contextmanager
def _cores(count: int | None) -> Iterator[None]:
    """What is started here may use so many of this process's cores (None: all)."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(mine)[-count:] if count else mine)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
