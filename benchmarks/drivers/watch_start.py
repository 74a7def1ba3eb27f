"""Starts a program, and says when all of its workers were up, and how much memory each has.

    python -m benchmarks.drivers.watch_start --workers 24 --reports FOLDER -- PROGRAM ARGUMENTS ...

Their environments are `peers/reporting.py`, which write that down themselves, so that it is
measured in the same way whoever starts them. `start_s` is from starting the program to the first
step of the last worker; memory is the median over workers; `first_update_s` is by the program's own
clock, if it wrote a run of Headrace's into the folder that this is run in.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--reports", type=Path, required=True, help="a folder, made anew")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    args.reports.mkdir()
    began = time.time()
    done = subprocess.run(
        args.program, env=os.environ | {"BENCH_REPORTS": str(args.reports)}, stdout=sys.stderr
    )
    if done.returncode:
        sys.exit(done.returncode)
    found = [json.loads(path.read_text()) for path in args.reports.glob("*.json")]
    if len(found) != args.workers:
        sys.exit(f"{len(found)} workers reported; expected {args.workers}")
    result = {"start_s": max(each["at"] for each in found) - began}
    for name in ("pss_mib", "uss_mib"):
        result[name] = statistics.median(each[name] for each in found)
    for rows in Path.cwd().glob("run/metrics.jsonl"):  # Headrace's
        result["first_update_s"] = json.loads(rows.read_text().splitlines()[0])["wall_s"]
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
