"""Shared by the fault tests of clusters: machines made of processes, and runs that are watched.

A machine is a Ray node with an object store of its own; all listen on the loopback, and ask for a
token. A run is the command itself, in a process; its actors are found among the processes that its
machines have started. Left out: the faults (`test_faults_cluster*.py`).
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from ray.cluster_utils import Cluster

from headrace.envs.faulty import Faulty
from headrace.storage.metrics import read_metrics
from headrace.training.ray.connect import _closed_to_others
from tests.faults.support import start, with_path
from tests.python import command
from tests.support import children

ROOT = str(Path(__file__).parents[2])  # for environments of tests
RAY = str(Path(sys.executable).with_name("ray"))  # the command, wherever tests are run from
STORE_BYTES = 100 << 20
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Of the head, as docs/cluster.md and deploy/ have them."""
FORKS = "multiprocessing.forkserver"
START_WITHIN_S = 150  # of a machine that is busy


@contextlib.contextmanager
def machines(*each):
    """A cluster; of each machine its resources, as in `{"CPU": 2, "worker": 2}`."""
    with _closed_to_others(), mock.patch.dict(os.environ, with_path(ROOT) | HEALTH_CHECKS):
        cluster = Cluster(shutdown_at_exit=False)
        try:
            for amounts in each:
                joins(cluster, **amounts)
            yield cluster
        finally:
            cluster.shutdown()


def joins(cluster, CPU=1, **amounts):  # noqa: N803
    """Another machine joins; it."""
    return cluster.add_node(
        num_cpus=CPU, resources=amounts, object_store_memory=STORE_BYTES, include_dashboard=False
    )


def raylet_of(node):
    """The process that starts a machine's others."""
    [info] = node.all_processes["raylet"]
    return info.process.pid


def until(true, within_s, what):
    """Look often whether something has come true, and return it; AssertionError if it does not."""
    deadline = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what()}"
        time.sleep(0.05)
    return found


def actors(kind, below=None):
    """Process ids of actors ("HostActor", "LearnerActor"), of a machine or of all."""
    known = _processes()
    return sorted(
        pid
        for pid, (words, parent) in known.items()
        if words.startswith(f"ray::{kind}") and below in (None, parent)
    )


def workers(below=None):
    """Process ids of workers, of a machine or of all: a host's server has forked them."""
    known, hosts = _processes(), actors("HostActor", below)
    servers = {pid for pid, (words, parent) in known.items() if parent in hosts and FORKS in words}
    return sorted(pid for pid, (_, parent) in known.items() if parent in servers)


def _processes():
    """Command line and parent of each process that this one has started, and theirs."""
    known = {}
    for pid in children():
        with contextlib.suppress(OSError, IndexError):  # gone meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            known[pid] = words, parent
    return known


class Run:
    """`headrace train`, or another verb, in a process (a session of its own), and what it says.

    Args:
        folder: where it runs; its run directory is `folder/run`.
        words: of the command, after the verb.
        within: what the command is run by.
    """

    def __init__(self, folder, *words, verb="train", within=()):
        self.dir = Path(folder) / "run"
        flags = {"resume": [], "tune": ["--study"]}.get(verb, ["--run-dir"])
        self.began = time.monotonic()
        self.process = start([*within, *command(verb, *flags, self.dir, "--json", *words)], folder)
        self.said, self.err = [], []  # (when, line)
        self._readers = [
            threading.Thread(target=self._read, args=[self.process.stdout]),
            threading.Thread(target=self._read, args=[self.process.stderr, self.err]),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe, *also):
        with pipe:
            for line in pipe:
                for said in (self.said, *also):
                    said.append((time.monotonic(), line.rstrip("\n")))

    @property
    def text(self):
        """All that was said."""
        return "\n".join(line for _, line in self.said)

    def heard(self, pattern, within_s=START_WITHIN_S, since=0.0):
        """When it said something for the first time (since then)."""

        def found():
            at = [when for when, line in list(self.said) if re.search(pattern, line)]
            return next((when for when in at if when >= since), None)

        return self._until(found, within_s, pattern)

    def rows(self):
        """Of metrics.jsonl."""
        return read_metrics(self.dir) if (self.dir / "metrics.jsonl").exists() else []

    def row(self, true, within_s=START_WITHIN_S):
        """The first of metrics.jsonl's that is so (a second after it was made, at the latest)."""
        return self._until(lambda: next(filter(true, self.rows()), None), within_s, "a row")

    def updates(self, more, within_s=START_WITHIN_S):
        """Until so many updates more are made."""
        now = self.iteration
        self.row(lambda row: row["iteration"] >= now + more, within_s)

    @property
    def iteration(self):
        """Of the last update that was written."""
        rows = self.rows()
        return rows[-1]["iteration"] if rows else 0

    def workers(self, count, within_s=START_WITHIN_S, *, but=()):
        """Their processes, once there are so many, and none of these."""

        def found():
            pids = workers()
            return pids if len(pids) == count and not set(pids) & set(but) else None

        return self._until(found, within_s, f"{count} workers")

    def _until(self, true, within_s, what):
        def alive():
            found = true()
            assert found or self.process.poll() is None, f"it ended, without {what}: {self.text}"
            return found

        return until(alive, within_s, lambda: f"{what}: {self.text}")

    def signal(self, number, times=1, *, group=False):
        """To it, or as a terminal sends it: to all of its process group."""
        for _ in range(times):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def ended(self, within_s=120, code=0):
        """Its summary, once it has ended."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {within_s} s: {self.text}") from None
        finally:
            self.kill()
        assert self.process.returncode == code, self.text
        out = [line for _, line in self.said if line.startswith("{")]
        return json.loads(out[-1]) if out else None

    def finished(self):
        """Its summary, once it has come to its end, with nothing slow any more."""
        (self.dir.parent / "hurry").touch()
        return self.ended()

    def kill(self):
        """End it, if it is there still, as nothing can be caught."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for reader in self._readers:
            reader.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        print(*(f"{when - self.began:6.1f} s  {line}" for when, line in self.said), sep="\n")


class Paced(Faulty):
    """Steps take 10 ms, until there is no need to wait any more.

    Args:
        folder: `hurry` is put there then, and `KIND@WHEN` of what has happened (once).
        faults: see `Faulty`.
    """

    def __init__(self, folder, faults=""):
        self._hurry = Path(folder, "hurry")
        super().__init__(faults, folder)

    def step(self, action):
        self._slow_step = 0.0 if self._hurry.exists() else 0.01
        return super().step(action)


SHAPE = {"num_envs": 4, "envs_per_vector": 2, "num_steps": 16, "num_workers": 2}
UPDATE = 4 * 16
"""Env steps of one: 0.3 s."""
GOAL = 500 * UPDATE
PPO = ["--num-minibatches", 2, "--num-epochs", 1]
APPO = ["--algo", "appo", "--lag", 2]
LEARNER, WORKER = {"learner": 8}, {"worker": 8}
"""What machines have, so that each is used as it is to be."""


def paced(cluster, folder, *words, faults=""):
    """Words of a run that has time enough until it is told to hurry."""
    shape = [word for name, n in SHAPE.items() for word in (f"--{name.replace('_', '-')}", n)]
    return [
        "tests.faults.cluster_support:Paced", "--env-kwargs", f"folder={folder}",
        f"faults={faults}", "--cluster", cluster if isinstance(cluster, str) else cluster.address,
        "--learner-resources", "learner=1", "--worker-resources", "worker=1", *shape,
        "--total-env-steps", GOAL, *words,
    ]  # fmt: skip
