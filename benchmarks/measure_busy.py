"""Runs a program, and adds to its result what its environments say of their own time.

    python -m benchmarks.measure_busy --busy FOLDER -- PROGRAM ARGUMENTS ...

They are those of `peers/uneven.py` and `peers/real.py`, which write it down themselves, so that it
is measured in the same way whoever steps them: `mean_s` is the wall time of step and reset for each
env step, `mean_cpu_s` the CPU time.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import busy


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
        done = subprocess.run(args.program, env=surroundings, stdout=stdout)
    *before, last = said.read_text().strip().splitlines() or [""]
    print("\n".join(before))
    if done.returncode:
        print(last)
        sys.exit(done.returncode)
    result, sums = json.loads(last.removeprefix("RESULT ")), busy.totals(args.busy)
    if not sums["steps"]:
        sys.exit("No environment wrote down a step; expected those of benchmarks.peers.")
    result["mean_s"] = (sums["step_s"] + sums["reset_s"]) / sums["steps"]
    result["mean_cpu_s"] = sums["cpu_s"] / sums["steps"]
    print("RESULT " + json.dumps(result | {"in_environments": sums}))


if __name__ == "__main__":
    main()
