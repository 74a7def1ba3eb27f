"""F18: the network between a learner's host and a sampler's is cut.

Hosts are two network namespaces with a wire between them; each runs `ray start`, as one would
there. Left out: losses of processes and machines (`test_faults_cluster.py`).
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster_faults_support import (
    APPO,
    GOAL,
    LEARNER,
    PPO,
    ROOT,
    SAMPLER,
    UPDATE,
    Run,
    actors,
    paced,
    until,
)
from tests.fault_support import with_path
from tests.support import children
from tests.test_faults_cluster import all_home, assert_as_undisturbed
from tests.test_faults_env import assert_balanced

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

PORT = 6379


class Host:
    """A network namespace, in which a machine of a cluster can be started."""

    def __init__(self, name, address, folder, env):
        self.name, self.address = name, address
        self._folder, self._env, self._ray = folder, env, None

    def runs(self, *words):
        """A command there."""
        return ["ip", "netns", "exec", self.name, *map(str, words)]

    def ray(self, *words, amounts):
        """Start a machine of the cluster here; nothing waits for it."""
        self._ray = subprocess.Popen(
            self.runs(
                "ray", "start", *words, "--block", "--node-ip-address", self.address,
                "--num-cpus", amounts["CPU"], "--object-store-memory", 100 << 20,
                "--resources", str({k: v for k, v in amounts.items() if k != "CPU"}).replace("'", '"'),
            ),
            env=self._env, start_new_session=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def down(self):
        """As if its plug were pulled."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._ray is not None:
            self._ray.wait()

    def pids(self):
        """Of all that runs here."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path):
    """Two, on one wire; skips where namespaces cannot be made."""
    mark = f"hr{secrets.token_hex(2)}"
    names = [f"{mark}a", f"{mark}b"]
    if ip("netns", "add", names[0]).returncode:
        pytest.skip("needs root, to make network namespaces (ip netns)")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = with_path(ROOT) | token | {"RAY_USAGE_STATS_ENABLED": "0"}
    made = [Host(name, f"10.77.0.{i + 1}", tmp_path, env) for i, name in enumerate(names)]
    try:
        ip("netns", "add", names[1])
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1],
           "netns", names[1])  # fmt: skip
        for host in made:
            for words in (
                ("addr", "add", f"{host.address}/24", "dev", host.name),
                ("link", "set", host.name, "up"), ("link", "set", "lo", "up"),
            ):  # fmt: skip
                assert ip("-n", host.name, *words).returncode == 0
        yield made, env
    finally:
        for host in made:
            host.down()
            ip("netns", "del", host.name)


def cut(host, *, whole):
    assert ip("-n", host.name, "link", "set", host.name, "up" if whole else "down").returncode == 0
