"""The published cost case: which machines have 8 GPUs, and 64 CPUs for workers, at the least cost?

    python -m benchmarks.plan      # results/plan.json; a second, on any machine

`plan_published.toml` has the machines, and says what of their prices is assumed. Left out: timings
(there are none in it).
"""

import argparse
import json
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.machine import RESULTS, ROOT, machine
from headrace.tools.plan.goals import Need
from headrace.tools.plan.losses import (
    ROLLBACK,
    Recovery,
    checkpoint_interval_s,
    simulate_losses,
)
from headrace.tools.plan.machines import SpotTerms, read_catalogue
from headrace.tools.plan.planner import Planner

CATALOGUE = ROOT / "benchmarks" / "plan_published.toml"
NEED = Need(gpus=8, cpus=64)
ONE_MACHINE = "large"
HOURS_BETWEEN_LOSSES, MINUTES_TO_REPLACE = 2.0, 5.0
OTHERS_GO_ON = Recovery(0.0, 4.0, keeps_work=True, waits=False)
"""If learners went on without a lost machine, as they do without a lost process (docs/cluster.md,
F20, has the seconds)."""


def with_losses(answer):
    """What losses of any of the plan's machines leave of it: today, and if the others went on."""
    kinds = tuple(
        replace(
            kind,
            is_spot=True,
            spot=SpotTerms(kind.name, kind.price_per_h, HOURS_BETWEEN_LOSSES, MINUTES_TO_REPLACE),
        )
        for kind in answer.plan.kinds
    )
    plan, checkpoint_s = replace(answer.plan, kinds=kinds), answer.catalogue.checkpoint_s
    every_s = checkpoint_interval_s(plan, checkpoint_s)
    return [
        simulate_losses(plan, None, every_s, checkpoint_s, recovery)
        for recovery in (ROLLBACK, OTHERS_GO_ON)
    ]


def result():
    """The plan, those without one of its kinds, and how much more the one machine costs."""
    catalogue = read_catalogue(CATALOGUE)
    answer = Planner(catalogue).plan(NEED)
    (large,) = (kind for kind in catalogue.kinds if kind.name == ONE_MACHINE)
    return answer.to_json() | {
        "machines": {kind.name: vars(kind) for kind in catalogue.kinds},
        "one_machine_cost_per_h": large.price_per_h,
        "ratio": large.price_per_h / answer.plan.cost_per_h,
        "with_losses": [asdict(left) for left in with_losses(answer)],
    }, answer


def shown(found, answer):
    """What is printed, and stands in docs/plan.md."""
    today, then = (left["share"] for left in found["with_losses"])
    return (
        f"{answer.describe()}\n\nOne machine with all of it costs {found['ratio']:.2f} x as much.\n"
        f"If each machine is lost every {HOURS_BETWEEN_LOSSES:g} h on average, and replaced after "
        f"{MINUTES_TO_REPLACE:g} min, {today:.0%} of the speed is\nleft: all learners begin again "
        f"from the newest checkpoint. If those that are left went on, {then:.0%} would be."
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
