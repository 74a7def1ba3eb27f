"""F18: the network between a learner's host and a worker's is cut.

Hosts are two network namespaces with a wire between them; each runs `ray start`, as one would
there. Left out: losses of processes and machines (`test_cluster.py`).
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import time
from unittest import mock

import pytest

from tests.faults.cluster_support import (
    APPO,
    HEALTH_CHECKS,
    LEARNER,
    PPO,
    RAY,
    ROOT,
    UPDATE,
    WORKER,
    Run,
    actors,
    paced,
    until,
    workers,
)
from tests.faults.support import with_path
from tests.faults.test_cluster import all_home, assert_as_undisturbed
from tests.faults.test_env import assert_balanced

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

PORT = 6379


class Host:
    """A network namespace, in which a machine of a cluster can be started."""

    def __init__(self, name, address, folder, env):
        self.name, self.address = name, address
        self._folder, self._env, self._ray = folder, env, []

    def runs(self, *words):
        """A command there."""
        return ["ip", "netns", "exec", self.name, *map(str, words)]

    def ray(self, *words, amounts):
        """Start a machine of the cluster here; nothing waits for it."""
        self._ray.append(
            subprocess.Popen(
                self.runs(
                    RAY, "start", *words, "--block", "--node-ip-address", self.address,
                    "--num-cpus", amounts["CPU"], "--object-store-memory", 100 << 20,
                    "--resources", json.dumps({k: v for k, v in amounts.items() if k != "CPU"}),
                ),
                env=self._env, start_new_session=True, stdout=subprocess.DEVNULL,
            )
        )  # fmt: skip

    def down(self):
        """As if its plug were pulled."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for started in self._ray:
            started.wait()

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
    env = with_path(ROOT) | token | HEALTH_CHECKS | {"RAY_USAGE_STATS_ENABLED": "0"}
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
        with mock.patch.dict(os.environ, env):
            yield made
    finally:
        for host in made:
            host.down()
            ip("netns", "del", host.name)


def cut(host, *, whole):
    assert ip("-n", host.name, "link", "set", host.name, "up" if whole else "down").returncode == 0


LOST = "^Worker . (has given no sign of life|cannot be reached|was on a machine that is gone|died)"


def begin(hosts, folder, *words, here, there):
    """A cluster of two hosts, and a run on it; the run's learner and driver are on the first."""
    first, second = hosts
    first.ray("--head", "--port", PORT, "--include-dashboard", "false", amounts=here)
    address = f"{first.address}:{PORT}"
    joined = [*first.runs(), RAY, "health-check", "--address", address]
    until(lambda: subprocess.run(joined, capture_output=True).returncode == 0, 120, str)
    second.ray("--address", address, amounts=there)
    return Run(folder, *paced(address, folder, *words), within=first.runs())


@pytest.mark.parametrize("algo", [PPO, APPO], ids=["ppo", "appo"])
def test_f18_a_short_cut_is_a_pause(tmp_path, hosts, measured, algo):
    _, second = hosts
    here, there = {"CPU": 1} | LEARNER, {"CPU": 2} | WORKER
    with begin(hosts, tmp_path, *algo, here=here, there=there) as run:
        run.updates(3)
        run.workers(2)
        cut(second, whole=False)
        time.sleep(4)
        cut(second, whole=True)
        again = time.monotonic()
        run.updates(2)
        going_on = time.monotonic() - again
        summary = run.finished()
    assert_balanced(summary)
    if algo is PPO:
        assert summary["lost_env_steps"] == 0
        assert_as_undisturbed(run)
    measured(
        "F18", f"network cut for 4 s, {'lag 0' if algo is PPO else 'APPO'}: two updates more",
        recover_s=going_on, recover_within_s=30, lost_env_steps=summary["lost_env_steps"],
    )  # fmt: skip


@pytest.mark.parametrize("algo", [PPO, APPO], ids=["ppo", "appo"])
def test_f18_machine_is_used_again_after_a_long_cut(tmp_path, hosts, measured, algo):
    _, second = hosts
    here, there = {"CPU": 2, "worker": 1} | LEARNER, {"CPU": 1, "worker": 1}
    with begin(hosts, tmp_path, *algo, here=here, there=there) as run:
        run.updates(3)
        run.row(lambda row: row["workers_up"] == 2)
        cut(second, whole=False)
        cut_at = time.monotonic()
        seen = run.heard(LOST, since=cut_at) - cut_at
        run.updates(3)
        going_on = time.monotonic() - cut_at - seen
        time.sleep(max(0.0, 60 - (time.monotonic() - cut_at)))
        cut(second, whole=True)
        run.updates(1)
        second.down()  # it was given up: who looks after it starts it again
        second.ray("--address", f"{hosts[0].address}:{PORT}", amounts=there)
        started = time.monotonic()
        home = all_home(run, 2, run.iteration) - started
        until(lambda: set(workers()) & set(second.pids()), 5, workers)
        summary = run.finished()
    assert_balanced(summary)
    if algo is PPO:
        assert summary["lost_env_steps"] == 0
        assert_as_undisturbed(run)
    what = "lag 0" if algo is PPO else "APPO"
    measured(
        "F18", f"network cut for 60 s, {what}: the worker there is dropped", detect_s=seen,
        within_s=30, recover_s=going_on, recover_within_s=30,
        lost_env_steps=summary["lost_env_steps"],
    )  # fmt: skip
    measured(
        "F18", f"the machine is started again, {what}: its worker is back there", recover_s=home,
        recover_within_s=30,
    )  # fmt: skip


def test_f18_learner_behind_a_cut_is_replaced_and_does_not_come_back(tmp_path, hosts, measured):
    """Its connections do not end by themselves; and it lives on, to try again once there is one."""
    _, second = hosts
    here, there = {"CPU": 3, "learner": 1} | WORKER, {"CPU": 1, "learner": 1}
    with begin(hosts, tmp_path, *PPO, "--num-learners", 2, here=here, there=there) as run:
        run.updates(3)
        [cut_off] = set(actors("LearnerActor")) & set(second.pids())
        cut(second, whole=False)
        cut_at = time.monotonic()
        seen = run.heard("^Learner 2 was lost", since=cut_at) - cut_at
        run.heard("the others go on with all that they have learned")
        run.updates(1)
        going_on = time.monotonic() - cut_at - seen
        assert cut_off in second.pids()
        cut(second, whole=True)
        run.updates(20)
        until(lambda: cut_off not in second.pids(), 120, str)
        run.updates(1)
        summary = run.finished()
    assert "begin again" not in run.text
    assert_balanced(summary)
    assert summary["lost_env_steps"] <= UPDATE
    measured(
        "F18", "network cut to one of two learners: another has its place", detect_s=seen,
        within_s=30, recover_s=going_on, recover_within_s=30,
        lost_env_steps=summary["lost_env_steps"],
    )  # fmt: skip
