"""F20: workers, machines and learners of a cluster are lost, and the run goes on.

Left out: how it ends by errors and signals (`test_cluster_ends.py`), and networks that are
cut (`test_network.py`).
"""

import os
import signal
import time

import pytest

import headrace
from headrace.storage import checkpoint
from tests.faults.cluster_support import (
    APPO,
    GOAL,
    LEARNER,
    PPO,
    SHAPE,
    UPDATE,
    WORKER,
    Paced,
    Run,
    actors,
    joins,
    machines,
    paced,
    until,
)
from tests.faults.test_env import assert_balanced
from tests.support import still_alive

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]


def assert_as_undisturbed(run, **more):
    """I7: the same weights, to the bit, as on no cluster."""
    undisturbed = headrace.train(
        Paced, env_kwargs={"folder": str(run.dir.parent)}, **SHAPE | more, total_env_steps=GOAL,
        run_dir=run.dir.parent / "undisturbed", quiet=True,
        algo=headrace.PPO(num_minibatches=2, num_epochs=1),
    )  # fmt: skip
    a, b = (
        checkpoint.newest(path).tensors("policy_default") for path in (run.dir, undisturbed.dir)
    )
    assert all(a[name].equal(b[name]) for name in a)


def all_home(run, count, since):
    """Wait for an update after that one with each worker in its own process. Return when."""
    run.row(lambda row: row["iteration"] > since and row["workers_up"] == count)
    return time.monotonic()


@pytest.mark.parametrize("algo", [PPO, APPO], ids=["ppo", "appo"])
def test_killed_worker_is_replaced(tmp_path, measured, algo):
    with (
        machines({"CPU": 1} | LEARNER, {"CPU": 2} | WORKER) as cluster,
        Run(tmp_path, *paced(cluster, tmp_path, *algo)) as run,
    ):
        run.updates(3)
        before = run.workers(2)
        os.kill(before[0], signal.SIGKILL)
        killed = time.monotonic()
        seen = run.heard("^Worker . died")
        run.workers(2, but=before[:1])
        back = all_home(run, 2, run.iteration)
        summary = run.finished()
    assert_balanced(summary)
    ledger = summary["ledger"]
    assert summary["restarts"] == 1
    if algo is PPO:
        assert summary["lost_env_steps"] == 0 <= ledger["remade"] <= 2 * 16
        assert_as_undisturbed(run)
    else:  # and what was unfinished at the end
        assert ledger["remade"] == 0 <= summary["lost_env_steps"] <= 3 * UPDATE + 2 * 16
    measured(
        "F20", f"kill -9 of a worker on a cluster, {'lag 0' if algo is PPO else 'APPO'}",
        detect_s=seen - killed, recover_s=back - seen, recover_within_s=30,
        lost_env_steps=summary["lost_env_steps"],
    )  # fmt: skip


def test_killed_host_of_workers_is_replaced(tmp_path, measured):
    with (
        machines({"CPU": 1} | LEARNER, {"CPU": 2} | WORKER) as cluster,
        Run(tmp_path, *paced(cluster, tmp_path, *PPO)) as run,
    ):
        run.updates(3)
        before = run.workers(2)
        [host] = actors("HostActor")
        os.kill(host, signal.SIGKILL)
        killed = time.monotonic()
        seen = run.heard("^Worker . ran in a host that died")
        run.workers(2, but=before)
        back = all_home(run, 2, run.iteration)
        assert still_alive(before, 5) == []
        summary = run.finished()
    assert_balanced(summary)
    assert summary["restarts"] == 2
    assert summary["lost_env_steps"] == 0 <= summary["ledger"]["remade"] <= 4 * 16
    assert_as_undisturbed(run)
    measured(
        "F20", "kill -9 of the process that hosts two workers", detect_s=seen - killed,
        recover_s=back - seen, recover_within_s=30, lost_env_steps=0,
    )  # fmt: skip


@pytest.mark.parametrize("algo", [PPO, APPO], ids=["ppo", "appo"])
def test_lost_machine_of_workers_is_replaced_by_another(tmp_path, measured, algo):
    """Meanwhile workers share a host; a lost machine does not count for their restarts."""
    one = {"CPU": 1} | WORKER
    with (
        machines({"CPU": 1} | LEARNER, one, one) as cluster,
        Run(tmp_path, *paced(cluster, tmp_path, *algo, "--max-worker-restarts", 0)) as run,
    ):
        run.updates(3)
        first, _ = cluster.worker_nodes
        run.workers(2)
        lost_at, iteration = time.monotonic(), run.iteration
        cluster.remove_node(first, allow_graceful=False)
        seen = run.heard("^Worker . (was on a machine that is gone|cannot be reached)")
        run.row(lambda row: row["iteration"] > iteration + 1 and row["workers_up"] == 1)
        going_on = time.monotonic()
        joins(cluster, **one)
        joined = time.monotonic()
        home = all_home(run, 2, run.iteration)
        summary = run.finished()
    assert_balanced(summary)
    if algo is PPO:
        assert summary["lost_env_steps"] == 0
        assert_as_undisturbed(run)
    what = "lag 0" if algo is PPO else "APPO"
    measured(
        "F20", f"a machine of workers is lost, {what}", detect_s=seen - lost_at, within_s=30,
        recover_s=going_on - seen, recover_within_s=30, lost_env_steps=summary["lost_env_steps"],
    )  # fmt: skip
    measured(
        "F20", f"a machine comes, and workers move there, {what}", recover_s=home - joined,
        recover_within_s=30,
    )  # fmt: skip


def test_killed_learner_is_replaced(tmp_path, measured):
    """The first one, which writes, and the other one."""
    with (
        machines({"CPU": 2} | LEARNER, {"CPU": 2} | WORKER) as cluster,
        Run(tmp_path, *paced(cluster, tmp_path, *PPO), "--num-learners", 2) as run,
    ):
        for which in (0, 1):
            run.updates(8)
            pids = until(lambda: found if len(found := actors("LearnerActor")) == 2 else 0, 60, str)
            os.kill(pids[which], signal.SIGKILL)
            killed = time.monotonic()
            seen = run.heard("^Learner . was lost", since=killed)
            run.heard("^A new process has taken its place", since=seen)
            run.updates(1)
            measured(
                "F20", "kill -9 of one of two learners", detect_s=seen - killed, within_s=10,
                recover_s=time.monotonic() - seen, recover_within_s=15,
            )  # fmt: skip
        summary = run.finished()
    assert summary["env_steps"] == GOAL
    ledger = summary["ledger"]
    assert ledger["collected"] == ledger["learned"] + summary["lost_env_steps"] + ledger["remade"]
    assert summary["lost_env_steps"] <= UPDATE  # a share of a batch, twice
    assert "begin again" not in run.text
