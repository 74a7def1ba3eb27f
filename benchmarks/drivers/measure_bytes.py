"""A cluster of three nodes on this machine, and who holds and moves how many bytes during a run.

    python -m benchmarks.drivers.measure_bytes --workers 4 --run-dir PATH -- PROGRAM ARGUMENTS ...

Starts a head and two further nodes (`ray.cluster_utils.Cluster`, an object store each): learners
fit on the head only (resource `learn`), workers on the two others (`slot`). The program is
`headrace train` without `--cluster` and resources, which are added here. Meanwhile, twice a second,
it is asked of others than Headrace:

- Ray, for each process: how many objects it owns, and the bytes of those that it knows, in all and
  without the words that a learner has for the terminal (an object is known by the line of code that
  made it); for each node: what its object store holds, and has taken in so far.
- Linux (`ss`): the bytes that each process has received over each TCP connection, from whom. All
  that passes between nodes is in it, and between processes without the object store. Fragments
  smaller than Ray's 100 kB go that way, from the worker to who called it; larger ones from object
  store to object store (a thread of the daemon `raylet`).

The result has `processes`, `nodes`, `tcp` (from, to, bytes), and `counted`: what Headrace itself
counted of its first learner (`metrics.jsonl`).
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.harness import processes
from benchmarks.harness.machine import ROOT

LOOK_EVERY_S = 0.5
STORE_BYTES = 200 << 20
CLOSED = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listens on the loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_record_ref_creation_sites": "1",  # so that it says where an object was made
    "PYTHONPATH": str(ROOT),  # of the nodes' workers: environments are there
}
WORDS = "headrace/training/ray/driver.py"
"""It calls learners for what is to be shown; all other objects are experience, weights, plans."""
HOLDING = ("driver", "learner", "host")
"""Who could hold experience and weights; Ray's own processes are told together."""
NODES = ("head", "node 1", "node 2")
COUNTED = ("fragments_bytes", "fragments_remote_bytes", "weights_bytes")
_CONNECTION = re.compile(r"\S+\s+\d+\s+\d+\s+\S*:(\d+)\s+\S*:(\d+)\s.*?pid=(\d+)")
"""A line of `ss`: its state, two queues, where from, where to, and whose it is."""


@contextlib.contextmanager
def cluster(workers, learners):
    """A cluster of three nodes: its address, and (name, address, port) of each node."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        size = {"object_store_memory": STORE_BYTES}
        head = {"resources": {"learn": learners}, "include_dashboard": False}
        nodes = [made.add_node(num_cpus=learners + 1, **head, **size)]
        each = -(-workers // 2)
        nodes += [made.add_node(num_cpus=each, resources={"slot": each}, **size) for _ in NODES[1:]]
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        ids = {each["NodeID"]: each for each in ray.nodes()}
        found = [ids[node.node_id] for node in nodes]
        where = [(each["NodeManagerAddress"], each["NodeManagerPort"]) for each in found]
        yield made.address, dict(zip(NODES, where, strict=True))
        ray.shutdown()
    finally:
        made.shutdown()


def fields(message, *names):
    return {name: int(getattr(message, name)) for name in names}


class Watch:
    """What was seen of processes, nodes and connections: the most of each."""

    def __init__(self, nodes, driver):
        self._nodes, self._driver = nodes, driver
        self._processes, self._node_of = {}, {}
        self._seen = {name: defaultdict(int) for name in nodes}
        self._tcp = {}  # (port here, port there): whose, bytes received
        self._roles = {}

    def look(self):
        """Once."""
        from ray._private.internal_api import node_stats

        for name, of in self._nodes.items():
            stats = node_stats(*of)
            for worker in stats.core_workers_stats:
                self._add(worker, name)
            known = ("object_store_bytes_used", "cumulative_created_bytes")
            for key, value in fields(stats.store_stats, *known).items():
                self._seen[name][key] = max(self._seen[name][key], value)
        self._connections()

    def _add(self, worker, node):
        pid = int(worker.pid)
        self._node_of[pid] = node
        known = fields(worker, "num_owned_objects")
        sizes = [(ref.call_site, max(0, ref.object_size)) for ref in worker.object_refs]
        known["object_bytes"] = sum(size for _, size in sizes)
        known["data_bytes"] = sum(size for made_by, size in sizes if WORDS not in made_by)
        before = self._processes.setdefault(pid, dict.fromkeys(known, 0))
        self._processes[pid] = {key: max(before[key], value) for key, value in known.items()}

    def _connections(self):
        listed = subprocess.check_output(
            ["ss", "--tcp", "--info", "--numeric", "--processes", "--no-header", "--oneline"],
            text=True,
        )
        ours = processes.descendants(os.getpid())
        for line in listed.splitlines():
            if found := _CONNECTION.match(line):
                here, there, pid = map(int, found.groups())
                received = re.search(r"bytes_received:(\d+)", line)
                if pid in ours:
                    self._tcp[here, there] = pid, int(received[1]) if received else 0
                    self._name(pid, ours[pid].words)

    def _name(self, pid, words):
        """What a process is: a worker of Ray is known by what it ran last."""
        program = Path(words[0]).name
        if pid == self._driver:
            role = "driver"
        elif program.startswith("ray::LearnerActor"):
            role = "learner"
        elif program.startswith("ray::HostActor"):
            role = "host"
        elif program == "raylet":
            role = "raylet"
        else:
            role = "the rest of Ray"
        if self._roles.get(pid) not in HOLDING:
            self._roles[pid] = role

    def _named(self):
        """By process: its role, numbered where there are several that hold objects."""
        count, found = defaultdict(int), {}
        for pid, role in sorted(self._roles.items()):
            if role in HOLDING[1:]:
                count[role] += 1
                found[pid] = f"{role} {count[role]}"
            else:
                found[pid] = role
        return found

    def result(self):
        """Plain data, see above."""
        named, moved, received = self._named(), defaultdict(int), defaultdict(int)
        for (here, there), (pid, size) in self._tcp.items():
            sender, _ = self._tcp.get((there, here), (None, 0))
            received[pid] += size
            if pid in named and sender in named and size:
                moved[self._roles[sender], self._roles[pid]] += size
        holding = {named[pid]: pid for pid in self._processes if self._roles.get(pid) in HOLDING}
        return {
            "processes": [
                {"name": name, "node": self._node_of[pid], "tcp_received": received[pid]}
                | self._processes[pid]
                for name, pid in sorted(holding.items())
            ],
            "nodes": {name: dict(seen) for name, seen in self._seen.items()},
            "tcp": [[sender, to, size] for (sender, to), size in sorted(moved.items())],
        }


def run(program, nodes):
    """To its end, watched: (its result, what was seen)."""
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as done:
        watch = Watch(nodes, done.pid)
        while done.poll() is None:
            watch.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                done.wait(LOOK_EVERY_S)
        said = done.stdout.read()
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(said.splitlines()[-1]), watch.result()


def counted(run_dir):
    """What Headrace counted, added up over updates."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {name: int(sum(row[name] for row in rows)) for name in COUNTED}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    os.environ |= CLOSED  # before Ray is imported
    began = time.perf_counter()
    with cluster(args.workers, args.learners) as (address, nodes):
        more = ["--cluster", address, "--num-workers", str(args.workers)]
        more += ["--num-learners", str(args.learners)]
        more += ["--worker-resources", "slot=1", "--learner-resources", "learn=1"]
        result, seen = run([*args.program, *more], nodes)
    names = ("env_steps", "env_steps_per_s", "mean_return")
    kept = {name: result[name] for name in names} | {"total_s": time.perf_counter() - began}
    print("RESULT " + json.dumps(kept | seen | {"counted": counted(args.run_dir)}))


if __name__ == "__main__":
    main()
