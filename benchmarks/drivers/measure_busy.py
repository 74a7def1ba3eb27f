"""Runs a program, and adds to its result what its environments say of their own time.

    python -m benchmarks.drivers.measure_busy --busy FOLDER -- PROGRAM ARGUMENTS ...

They are those of `peers/uneven.py` and `peers/real.py`, which write it down themselves, so that it
is measured in the same way whoever steps them: `mean_s` is the wall time of step and reset for each
env step, `mean_cpu_s` the CPU time; `busy` is how many of them step or reset at a time, and
`busy_cpu` how many compute. All are of the steady state: not of the first fifth of the steps, in
which processes still start, nor of the last twentieth.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.result import read_result
from benchmarks.peers import busy

LOOK_EVERY_S = 0.2
FROM, TO = 0.2, 0.95
"""Of all steps, as shares: what is the steady state."""


def watch(process, folder):
    """Until it ends: [(seconds, the sums then), ...]."""
    seen = []
    while True:
        seen.append((time.perf_counter(), busy.totals(folder)))
        if process.poll() is not None:
            return [*seen, (time.perf_counter(), busy.totals(folder))]
        try:
            process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            continue


def steady(seen):
    """What environments did in the steady state of what `watch` has seen."""
    steps = seen[-1][1]["steps"]
    began, first = [point for point in seen if point[1]["steps"] <= FROM * steps][-1]
    ended, last = next(point for point in seen if point[1]["steps"] >= TO * steps)
    done = {name: last[name] - first[name] for name in busy.SUMS}
    busy_s = done["step_s"] + done["reset_s"]
    return {
        "mean_s": busy_s / done["steps"],
        "mean_cpu_s": done["cpu_s"] / done["steps"],
        "busy": busy_s / (ended - began),
        "busy_cpu": done["cpu_s"] / (ended - began),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=Path, required=True, metavar="FOLDER", help="made anew")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    args.busy.mkdir()
    said = args.busy.with_suffix(".stdout")
    # To a file: a pipe would not end before the last process that a peer leaves behind.
    with said.open("w") as stdout:
        surroundings = os.environ | {busy.FOLDER: str(args.busy.resolve())}
        done = subprocess.Popen(args.program, env=surroundings, stdout=stdout)
        seen = watch(done, args.busy)
    output = said.read_text()
    print(output)
    if done.returncode:
        sys.exit(done.returncode)
    # Not always the last line: Ray goes on talking.
    lines = [line for line in output.splitlines() if line.startswith(("RESULT ", "{"))]
    if not lines:
        sys.exit("It printed no result; expected a line with a JSON object.")
    result, sums = read_result(lines[-1]), seen[-1][1]
    if not sums["steps"]:
        sys.exit("No environment wrote down a step; expected those of benchmarks.peers.")
    print("RESULT " + json.dumps(result | steady(seen) | {"in_environments": sums}))


if __name__ == "__main__":
    main()
