"""Seconds that the measurement before a run takes, and how often it chooses differently.

Each work of `topology.py` is measured 20 times, in turns, by a fresh process with an empty cache,
which then reads its cache. Choices that differ are counted against the most frequent one; what they
are worth is in the table of `topology.py`.
"""

import argparse
import collections
import json
import statistics
import sys

from benchmarks.harness import contestants
from benchmarks.harness.machine import RESULTS, machine
from benchmarks.harness.one_turn import Work, take_turn
from benchmarks.topology import TITLES

WORK = Work(None, "seconds", "s", lower_is_better=True)


def summary(results):
    """Return medians, and how often each choice was made, the most frequent one first."""
    choices = collections.Counter(json.dumps(result["choice"]) for result in results)
    return {
        "seconds": [result["seconds"] for result in results],
        "cached_s": [result["cached_s"] for result in results],
        "step_us": [result["step_us"] for result in results],
        "choices": [[json.loads(text), count] for text, count in choices.most_common()],
        "differently": len(results) - choices.most_common(1)[0][1],
    }


def line(title, found):
    """One line of the table at the terminal."""
    first, cached = (statistics.median(found[name]) for name in ("seconds", "cached_s"))
    chosen = found["choices"][0][0]
    return (
        f"{title:<36} {first:5.2f} s ({min(found['seconds']):.2f} to {max(found['seconds']):.2f}), "
        f"{1e3 * cached:.0f} ms with the cache; {found['differently']} differently; "
        f"{chosen['num_learners']} learners, {chosen['num_workers']} workers, "
        f"vectors of {chosen['envs_per_vector']}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--work", action="append", choices=list(TITLES), help="default: all")
    parser.add_argument("--output", default=RESULTS / "calibration.json", help="the JSON file")
    flags = parser.parse_args()
    works = flags.work or list(TITLES)
    about = machine()
    found = {work: [] for work in works}
    for turn in range(flags.turns):
        for work in works:
            one = contestants.headrace_driver(TITLES[work], "calibrate", ["--work", work])
            found[work].append(take_turn(one, WORK, turn=turn))
        print(f"turn {turn + 1}/{flags.turns}", flush=True)
    tables = {TITLES[work]: summary(results) for work, results in found.items()}
    result = {"benchmark": "calibration", "machine": about, "tables": tables}
    with open(flags.output, "w") as file:
        file.write(json.dumps(result, indent=2) + "\n")
    print("\n".join(line(*each) for each in tables.items()))


if __name__ == "__main__":
    sys.exit(main())
