"""What is left of a run's speed if machines are taken away: measured, and as the planner simulates.

    python -m benchmarks.losses      # results/losses.json; a quarter of an hour

Machines are nodes of a cluster on this machine. Each run is followed without a loss first, then
machines are lost at the times that the simulator (`tools/plan/losses.py`) draws, so both have the
same losses (`drivers/lose_machines.py`). The environment sleeps, and workers of a machine take
turns (`peers/one_core.py`), so that the machines' speed is their own.

- Workers: one learner, four machines with four workers each, which are lost.
- A learner: one learner, whose machine is lost; it goes on from its newest checkpoint.
- Two learners, whose machines are lost: the other one goes on.

Left out: GPUs, and machines of a cloud.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.drivers.lose_machines import plan_of
from benchmarks.harness.machine import RESULTS, ROOT, machine
from benchmarks.harness.result import read_result
from headrace.tools.plan.losses import simulate_losses

NAME = "losses"
CHECKPOINT_EVERY_S = 10
HEADRACE = (
    "headrace", "train", "benchmarks.peers.one_core:OneCore", "--env-kwargs", "step_ms=2",
    "--num-steps", "32", "--envs-per-vector", "1", "--num-epochs", "1", "--num-minibatches", "4",
    "--total-env-steps", "1000000000", "--checkpoint-every-s", str(CHECKPOINT_EVERY_S), "--quiet",
    "--max-worker-restarts", "100",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A run whose machines are lost.

    Attributes:
        learners, workers: their machines.
        per_machine: workers on each of theirs.
        lost: the kind of machine that is lost.
    """

    name: str
    learners: int
    workers: int
    per_machine: int
    lost: str
    hours_between_losses: float
    minutes_to_replace: float
    for_s: int

    @property
    def plan(self):
        """The plan that is simulated."""
        count = {"learner": self.learners, "worker": self.workers}
        times = self.hours_between_losses, self.minutes_to_replace
        return plan_of(count, self.per_machine, self.lost, *times)

    def measure(self):
        """What a real run is seen to do."""
        names = ("learners", "workers", "per_machine", "lost", "hours_between_losses")
        names = (*names, "minutes_to_replace", "for_s")
        flags = [(f"--{name.replace('_', '-')}", str(getattr(self, name))) for name in names]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [
                    sys.executable, "-m", "benchmarks.drivers.lose_machines",
                    *(word for pair in flags for word in pair), "--run-dir", f"{folder}/run",
                    "--", sys.executable, "-m", *HEADRACE,
                    "--num-envs", str(self.workers * self.per_machine),
                ],
                check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )  # fmt: skip
        return read_result(done.stdout.splitlines()[-1])

    def simulate(self):
        """The share of the speed that the simulator says is left."""
        # The run without losses saves as well, so saving takes no share of its speed.
        hours = self.for_s / 3600
        return simulate_losses(self.plan, None, CHECKPOINT_EVERY_S, 0.0, hours=hours).share


CASES = (
    Case("16 workers on four machines", 1, 4, 4, "worker", 0.03, 0.35, 300),
    Case("the machine of the only learner", 1, 2, 4, "learner", 0.02, 0.25, 400),
    Case("machines of two learners", 2, 2, 4, "learner", 0.03, 0.35, 300),
)


def tables(results):
    """For docs/plan.md."""
    lines = [
        "| machines that are lost | losses | speed that is left | simulated "
        "| simulated / measured |",
        "|---|---|---|---|---|",
    ]
    for name, of in results["cases"].items():
        losses = sum(not comes for _, _, comes, *_ in of["changes"])
        lines.append(
            f"| {name} | {losses} | {of['share']:.1%} | {of['simulated']:.1%} "
            f"| {of['simulated'] / of['share']:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json", metavar="PATH")
    args = parser.parse_args()
    results = {"benchmark": NAME, "machine": machine(), "cases": {}}
    for case in CASES:
        if args.only in case.name:
            seen = case.measure()
            share = seen["with_losses"] / seen["undisturbed"]
            of = dataclasses.asdict(case) | seen | {"share": share, "simulated": case.simulate()}
            results["cases"][case.name] = of
            print(f"{case.name}: {share:.1%} measured, {of['simulated']:.1%} simulated", flush=True)
    args.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{tables(results)}\n\nWritten: {args.output}")


if __name__ == "__main__":
    main()
