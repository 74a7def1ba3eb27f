"""A run on a cluster of this machine whose machines are lost and come back, as the simulator draws.

    python -m benchmarks.drivers.lose_machines --lost worker --hours-between-losses 0.02 \\
        --minutes-to-replace 0.3 --for-s 300 --run-dir PATH -- PROGRAM ARGUMENTS ...

The program is `headrace train` without `--cluster` and resources, which are added here. Its
learners and its workers are on nodes of their own (`ray.cluster_utils.Cluster`). First it runs
undisturbed. Then nodes of the kind `--lost` are lost (their processes are killed), at the times
that `tools/plan/losses.py` draws for the same machines.

The result has the env steps per second of both times, and of each loss and return when it was over
(s), the kind of machine, whether one came, and the env steps before it.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.harness.machine import ROOT
from headrace.storage.metrics import read_last_metrics
from headrace.tools.plan.losses import draw_losses
from headrace.tools.plan.machines import MachineKind, SpotTerms
from headrace.tools.plan.result import MachinePlan

LOOK_EVERY_S = 0.05
STORE_BYTES = 100 << 20
KINDS = ("learner", "worker")
SURROUNDINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on the loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as `--cluster local` has it
    # As docs/cluster.md has them.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "PYTHONPATH": str(ROOT),  # environments are there
}


def plan_of(machines, per_machine, lost, hours_between_losses, minutes_to_replace):
    """The plan of such machines, for the simulator.

    Args:
        machines: their numbers, by kind: one learner on each, or `per_machine` workers.
        lost: the kind that is lost.
    """
    spot = SpotTerms(lost, 0.0, hours_between_losses, minutes_to_replace)
    cpus = {"learner": 1, "worker": per_machine}
    kinds = (MachineKind(name, 0.0, cpus[name], spot=spot, is_spot=name == lost) for name in KINDS)
    return MachinePlan(
        tuple(kinds), machines, {"learner": machines["learner"]},
        {"learner": 0, "worker": machines["worker"] * per_machine}, cost_per_h=0.0,
    )  # fmt: skip


class Machines:
    """The nodes of a cluster, by kind: the command's own is apart."""

    def __init__(self, count, per_machine):
        from ray.cluster_utils import Cluster

        self._made = Cluster(shutdown_at_exit=False)
        self._made.add_node(num_cpus=0, include_dashboard=False, object_store_memory=STORE_BYTES)
        self.address, self._nodes = self._made.address, {name: [] for name in KINDS}
        self._places = {"learner": 1, "worker": per_machine}
        for name in KINDS:
            for _ in range(count[name]):
                self.comes(name)

    def comes(self, name):
        node = self._made.add_node(
            num_cpus=self._places[name], resources={name: self._places[name]},
            include_dashboard=False, object_store_memory=STORE_BYTES,
        )  # fmt: skip
        self._nodes[name].append(node)

    def is_lost(self, name):
        self._made.remove_node(self._nodes[name].pop(0), allow_graceful=False)

    def close(self):
        self._made.shutdown()


class Followed:
    """A run, by its metrics."""

    def __init__(self, program, run_dir):
        self._run_dir = run_dir
        self.process = subprocess.Popen(program, stdout=subprocess.DEVNULL)

    def last(self):
        """The last row; None without one. The whole file would take longer with each look."""
        return (read_last_metrics(self._run_dir) or [None])[-1]

    def until(self, what, then=float("inf")):
        """Wait until the last row is so, or that time has come (monotonic)."""
        while not ((row := self.last()) and what(row)) and time.monotonic() < then:
            if self.process.poll() is not None:
                raise RuntimeError(f"The run has ended with {self.process.returncode}.")
            time.sleep(LOOK_EVERY_S)  # another process's file: nothing tells of its changes

    def env_steps_at(self, at):
        """Wait for that time (monotonic); the env steps then."""
        self.until(lambda row: False, at)
        return self.last()["env_steps"]


def follow(run, machines, plan, undisturbed_s, for_s):
    """Have machines come and go; what was seen."""
    of_first = sum(plan.worker_cores.values()) // sum(plan.learners.values())
    run.until(lambda row: row["workers_up"] == of_first)
    began = time.monotonic()
    first = run.last()["env_steps"]
    second = run.env_steps_at(began + undisturbed_s)
    begun, changes = time.monotonic(), []
    for change in draw_losses(plan):
        if change.at > for_s:
            break
        env_steps = run.env_steps_at(begun + change.at) - second
        (machines.comes if change.comes else machines.is_lost)(change.kind)
        changes.append([time.monotonic() - begun, change.kind, change.comes, env_steps])
    last = run.env_steps_at(begun + for_s)
    passed = time.monotonic() - begun
    return {
        "undisturbed": (second - first) / (begun - began),
        "with_losses": (last - second) / passed,
        "changes": changes,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in KINDS:
        parser.add_argument(f"--{name}s", type=int, required=True)
    parser.add_argument("--per-machine", type=int, required=True, help="workers on each")
    parser.add_argument("--lost", choices=KINDS, required=True)
    parser.add_argument("--hours-between-losses", type=float, required=True)
    parser.add_argument("--minutes-to-replace", type=float, required=True)
    parser.add_argument("--undisturbed-s", type=float, default=60.0)
    parser.add_argument("--for-s", type=float, default=300.0)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    os.environ |= SURROUNDINGS  # before Ray is imported
    count = {name: getattr(args, f"{name}s") for name in KINDS}
    plan = plan_of(
        count, args.per_machine, args.lost, args.hours_between_losses, args.minutes_to_replace
    )
    machines = Machines(count, args.per_machine)
    try:
        more = ["--cluster", machines.address, "--run-dir", str(args.run_dir)]
        more += ["--num-learners", str(count["learner"]), "--num-workers"]
        more += [str(count["worker"] * args.per_machine)]
        more += ["--learner-resources", "learner=1", "--worker-resources", "worker=1"]
        run = Followed([*args.program, *more], args.run_dir)
        try:
            seen = follow(run, machines, plan, args.undisturbed_s, args.for_s)
        finally:
            run.process.send_signal(signal.SIGTERM)
            run.process.wait()
    finally:
        machines.close()
    print("RESULT " + json.dumps(seen))


if __name__ == "__main__":
    main()
