"""Who held and moved how many bytes, in runs on a cluster of three nodes on this machine.

    python -m benchmarks.cluster_bytes      # results/cluster_bytes.json; two minutes

One head, on which the command runs and where there is room for two learners, and two further nodes
for workers. Each run is watched by others than Headrace (`measure_bytes.py` says how): Ray's
statistics of each process and node, and Linux' counts of what each TCP connection has brought.

- CartPole-v1, PPO at lag 0: 4 workers with 8 environments each and 1,024 steps of each, so that a
  fragment is 300 kB and lies in the object stores.
- The uneven environment, APPO: 8 workers with one environment each and 128 steps, so that a
  fragment is 5 kB, and comes with the answer to the call.

Left out: speed (`cluster.py`).
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.harness import contestants
from benchmarks.harness.contestants import SCRATCH
from benchmarks.harness.machine import RESULTS, machine
from benchmarks.harness.one_turn import TurnError, Work, take_turn
from benchmarks.peers.works import Settings

NAME = "cluster_bytes"
ROLES = ("driver", "learner", "host", "raylet", "the rest of Ray")


def watched(name, settings, updates, workers, *flags):
    """A run of `headrace train` on the cluster that is made for it."""
    given = [*settings.headrace_flags(updates * settings.batch), *flags]
    given += ["--envs-per-vector", str(settings.num_envs // workers)]
    run = contestants.headrace(name, given)
    watch = [sys.executable, "-m", "benchmarks.drivers.measure_bytes", "--workers", str(workers)]
    command = [*watch, "--run-dir", f"{SCRATCH}/run", "--", *run.command]
    return contestants.Contestant(name, command, 1, (*run.packages, "ray"))


def runs():
    cartpole = Settings("CartPole-v1", 32, num_steps=1024)
    uneven = Settings("benchmarks.peers.uneven:Uneven", 8)
    return [
        watched("CartPole-v1, PPO at lag 0, 4 workers and 2 learners", cartpole, 20, 4),
        watched(
            "The uneven environment, APPO, 8 workers and 2 learners",
            uneven, 16, 8, "--algo", "appo", "--lag", "2",
        ),
    ]  # fmt: skip


def in_words(size):
    return f"{size:,}"


def by_process(found):
    """What Ray knows of each process, and what reached it."""
    lines = [
        "| process | node | owned objects, at most | bytes of objects it knew, at most "
        "| of experience and weights, at most | bytes received by TCP |",
        "|---|---|---|---|---|---|",
    ]
    for of in found["processes"]:
        numbers = ("num_owned_objects", "object_bytes", "data_bytes", "tcp_received")
        cells = " | ".join(in_words(of[name]) for name in numbers)
        lines.append(f"| {of['name']} | {of['node']} | {cells} |")
    return lines


def by_node(found):
    """What each node's object store has taken in, and held."""
    lines = ["| object store of | bytes taken in, in all | bytes held, at most |", "|---|---|---|"]
    for node, of in found["nodes"].items():
        numbers = (of["cumulative_created_bytes"], of["object_store_bytes_used"])
        lines.append(f"| {node} | {' | '.join(map(in_words, numbers))} |")
    return lines


def by_way(found):
    """Bytes from each to each."""
    moved = {(sender, to): size for sender, to, size in found["tcp"]}
    lines = [f"| bytes by TCP, from | to {' | to '.join(ROLES)} |", "|---" * (1 + len(ROLES)) + "|"]
    for sender in ROLES:
        cells = " | ".join(in_words(moved.get((sender, to), 0)) for to in ROLES)
        lines.append(f"| {sender} | {cells} |")
    return lines


def tables(results):
    """Of each run: by process, by node, and by who sent to whom."""
    lines = []
    for name, found in results["runs"].items():
        lines += ["", f"**Who held how many bytes: {name}**", "", *by_process(found), ""]
        lines += [*by_node(found), "", *by_way(found), ""]
        counted = found["counted"]
        lines.append(
            f"{found['env_steps']:,} env steps. Headrace itself counted, of its first learner: "
            f"{counted['fragments_bytes']:,} bytes of fragments received "
            f"({counted['fragments_remote_bytes']:,} of them from other nodes), "
            f"{counted['weights_bytes']:,} of weights sent."
        )
    return "\n".join(lines[1:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="runs with this in their name")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json", metavar="PATH")
    args = parser.parse_args()
    results, failed = {"benchmark": NAME, "machine": machine(), "runs": {}}, False
    for contestant in runs():
        if args.only in contestant.name:
            try:
                found = take_turn(contestant, Work(None))
            except TurnError as error:
                failed = True
                print(f"{contestant.name}: failed: {error}", flush=True)
                continue
            results["runs"][contestant.name] = contestant.describe() | found
            print(f"{contestant.name}: {found['turn_s']:.0f} s", flush=True)
    args.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{tables(results)}\n\nWritten: {args.output}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
