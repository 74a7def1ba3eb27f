"""Runs of `headrace train` beside each other that share nothing: what learners could reach at best.

Each does its share of the work, by itself. Prints the sum of their rates, as one contestant.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    own, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "headrace", "train", *flags),
                    *("--json", "--seed", str(i), "--run-dir", str(Path(folder, str(i)))),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(own.count)
        ]
        said = [run.communicate()[0] for run in runs]
    if any(run.returncode for run in runs):
        sys.exit("A run failed.")
    results = [json.loads(text.splitlines()[-1]) for text in said]
    total = {key: sum(r[key] for r in results) for key in ("env_steps", "env_steps_per_s")}
    print(json.dumps(total | {"meter": results[0]["meter"]}))


if __name__ == "__main__":
    main()
