"""All benchmarks that need nothing but this machine, one after the other, and their tables.

    python -m benchmarks.all              # less than 40 minutes on two cores
    python -m benchmarks.all --turns 1    # a look; results and tables are written all the same

Each is a program of its own, so that one that fails stops none of the others; the exit code is 1 if
any failed. Left out: `uneven.py`, `lag.py`, `kernels.py`, `cluster.py`, `dqn.py`,
`replay_ratio.py`, `replay.py`, `continuous.py`, `waiting.py` and `parallel.py`, which take four
hours more (their tables are made anew from their last results), and `offline.py`,
`cluster_bytes.py`, `learners.py`, `inference.py`, `tag.py`, `presets/` and `gpu*.py`, which answer
questions of their own.
"""

import argparse
import subprocess
import sys
import time

from benchmarks.harness.machine import ROOT
from benchmarks.table import FILES

APART = {"uneven", "lag", "kernels", "cluster", "dqn", "replay_ratio", "replay"}
"""They have tables, and run alone."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, help="of each, in place of its own number")
    turns = parser.parse_args().turns
    more = [] if turns is None else ["--turns", str(turns)]
    failed = []
    for name in (name for name in FILES if name not in APART):
        print(f"\n=== {name}", flush=True)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *more], cwd=ROOT)
        print(f"=== {name}: {time.perf_counter() - began:.0f} s", flush=True)
        failed += [name] if done.returncode else []
    subprocess.run([sys.executable, "-m", "benchmarks.table"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"Failed, at least in part: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
