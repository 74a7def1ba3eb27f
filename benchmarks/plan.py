"""The published cost case: which machines have 8 GPUs, and 64 CPUs for workers, at the least cost?

    python -m benchmarks.plan      # results/plan.json; a second, on any machine

`plan_published.toml` has the machines, and says what of their prices is assumed. Left out: timings
(there are none in it).
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.machine import RESULTS, ROOT, machine
from headrace.tools.plan.goals import Need
from headrace.tools.plan.machines import read_catalogue
from headrace.tools.plan.planner import Planner

CATALOGUE = ROOT / "benchmarks" / "plan_published.toml"
NEED = Need(gpus=8, cpus=64)
ONE_MACHINE = "large"


def result():
    """The plan, those without one of its kinds, and how much more the one machine costs."""
    catalogue = read_catalogue(CATALOGUE)
    answer = Planner(catalogue).plan(NEED)
    (large,) = (kind for kind in catalogue.kinds if kind.name == ONE_MACHINE)
    return answer.to_json() | {
        "machines": {kind.name: vars(kind) for kind in catalogue.kinds},
        "one_machine_cost_per_h": large.price_per_h,
        "ratio": large.price_per_h / answer.plan.cost_per_h,
    }, answer


def shown(found, answer):
    """What is printed, and stands in docs/plan.md."""
    return (
        f"{answer.describe()}\n\nOne machine with all of it costs {found['ratio']:.2f} x as much."
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "plan.json", metavar="PATH")
    output = parser.parse_args().output
    found, answer = result()
    versions = {name: version(name) for name in ("headrace", "numpy", "scipy")}
    whole = {"benchmark": "plan", "machine": machine(), "versions": versions} | found
    output.write_text(json.dumps(whole, indent=2) + "\n")
    print(f"{shown(found, answer)}\n\nWritten: {output}")


if __name__ == "__main__":
    main()
