"""A learner of a cluster that is killed: the others go on with all they learned, and a new one."""

import os
import signal
import socket

import pytest
import torch

import headrace
from headrace.config.run_config import RunConfig
from headrace.errors import RankError
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from headrace.training.ray import connect
from headrace.training.ray.learner_actor import _end_connections
from tests.distributed import test_rejoin_replay as of_replay
from tests.distributed.test_rejoin import SETTINGS, UPDATE, check, die_once
from tests.faults.cluster_support import actors
from tests.marks import repeats
from tests.support import children, saved_rows, still_alive


@pytest.fixture(scope="module")
def cluster():
    before = children()
    with connect.connected(RunConfig(cluster="local", num_workers=3)):
        ours = children() - before
        yield
    assert still_alive(ours, within_s=10) == []


class DeadlyRank(torch.nn.Module):
    """A network of which gradient step 43, in update 6, ends one rank's process."""

    def __init__(self, spec, rank, mark):
        super().__init__()
        self.body = torch.nn.Linear(spec.seen.size, 32)
        self.params, self.value = torch.nn.Linear(32, 2), torch.nn.Linear(32, 1)
        self.rank, self.mark, self.gradients = rank, mark, 0

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        self.gradients += torch.is_grad_enabled()
        if self.gradients == 43 and torch.distributed.get_rank() == self.rank:
            die_once(self.mark)
        return self.params(hidden), self.value(hidden).squeeze(-1)


@repeats("rank", [1, 0])
def test_learner_of_a_cluster_is_replaced(cluster, tmp_path, capfd, rank):
    mark, seen = tmp_path / "died", []
    run = headrace.train(
        "CartPole-v1", model=lambda spec: DeadlyRank(spec, rank, mark), num_learners=2,
        num_workers=0, cluster="local", eval_every=4 * UPDATE, eval_episodes=2,
        on_update=lambda number, metrics: seen.append(number), run_dir=tmp_path / "run",
        **SETTINGS | {"quiet": False},
    )  # fmt: skip
    assert mark.exists()
    check(run)
    assert sorted(set(seen)) == list(range(1, 13))
    rows = read_metrics(run.dir)
    updates = [row["iteration"] for row in rows]
    if rank == 0:  # it had not written the rows of its last second
        assert updates == sorted(set(updates)) and updates[-7:] == list(range(6, 13))
    else:
        assert updates == list(range(1, 13))
    evaluated = [row["eval_env_steps"] for row in rows if row.get("eval_return") is not None]
    # With rank 0 the evaluation after update 4 is lost, whose result was not taken yet.
    assert evaluated == [(4 if rank else 6) * UPDATE, 8 * UPDATE, 12 * UPDATE]
    out = capfd.readouterr().out
    assert f"Learner {rank + 1} was lost" in out
    assert "the others go on with all that they have learned" in out
    assert "begin again" not in out


@pytest.mark.more
def test_learner_that_is_lost_too_often_ends_the_run(cluster, tmp_path):
    with pytest.raises(RankError, match=r"Learner \d was lost(.|\n)*--max-worker-restarts"):
        headrace.train(
            "CartPole-v1", num_learners=2, num_workers=0, cluster="local", run_dir=tmp_path / "run",
            max_worker_restarts=1, on_update=kill_each_time, **SETTINGS,
        )  # fmt: skip


@pytest.mark.more
def test_lost_learner_ends_a_run_that_is_to_fail(cluster, tmp_path):
    with pytest.raises(RankError, match=r"Learner \d was lost(.|\n)*--on-worker-loss fail"):
        headrace.train(
            "CartPole-v1", num_learners=2, num_workers=0, cluster="local", run_dir=tmp_path / "run",
            on_worker_loss="fail", on_update=kill_each_time, **SETTINGS,
        )  # fmt: skip


def kill_each_time(number, metrics):
    """Kill a learner after each update."""
    os.kill(actors("LearnerActor")[-1], signal.SIGKILL)


@pytest.mark.more
@repeats("at", [3, 6])
def test_run_that_lost_a_learner_is_stopped_and_saved(cluster, tmp_path, at):
    """By a signal that comes right after the loss, or once the new learner is there."""

    def kill_then_stop(number, metrics):
        if number == 3:
            os.kill(actors("LearnerActor")[-1], signal.SIGKILL)
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        headrace.train(
            "CartPole-v1", num_learners=2, num_workers=0, cluster="local", run_dir=tmp_path / "run",
            on_update=kill_then_stop, **SETTINGS | {"total_env_steps": 10_000 * UPDATE},
        )  # fmt: skip
    counters = checkpoint.newest(tmp_path / "run").manifest["counters"]
    assert counters["ledger"]["restarts"] == 1
    assert at * UPDATE <= counters["env_steps"] < 10_000 * UPDATE


@pytest.mark.more
def test_first_learner_with_a_replay_is_replaced_and_the_run_is_resumed(cluster, tmp_path):
    """The new one goes on with the files of rows, which only the first learner writes."""

    def kill(number, metrics):
        if number == 12:
            os.kill(min(actors("LearnerActor")), signal.SIGKILL)

    run = headrace.train(
        "CartPole-v1", algo=of_replay.PRIORITIZED, num_learners=2, num_workers=0, cluster="local",
        run_dir=tmp_path / "run", on_update=kill, checkpoint_every_s=0, **of_replay.SETTINGS,
    )  # fmt: skip
    of_replay.check(run)
    assert set(saved_rows(run.dir)["env"].tolist()) == set(range(12))  # fails if a row is missing
    resumed = headrace.resume(
        run.dir, cluster="", total_env_steps=24 * of_replay.UPDATE, quiet=True
    )
    of_replay.check(resumed, updates=24)
    rows = {row["iteration"]: row["replay_rows"] for row in read_metrics(run.dir)}
    assert rows[20] < 20 * of_replay.UPDATE
    assert rows[20] < rows[21] <= rows[20] + of_replay.UPDATE


def test_connections_to_a_lost_machine_end_and_no_others():
    ends = {}
    for address in ("127.0.0.1", "127.0.0.2"):
        with socket.create_server((address, 0)) as server:
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
        here.settimeout(10)
        ends[address] = here, there
    _end_connections({"127.0.0.2", "127.0.0.3"})
    (lost, _), (kept, other) = ends["127.0.0.2"], ends["127.0.0.1"]
    assert lost.recv(1) == b""  # what waited for the lost machine ends
    other.sendall(b"x")
    assert kept.recv(1) == b"x"
    for each in ends.values():
        for end in each:
            end.close()
