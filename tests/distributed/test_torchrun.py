"""Ranks that torchrun starts find each other, whatever a former attempt has left behind."""

import datetime
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist

import headrace
from headrace.distributed.ranks import RankInfo
from headrace.distributed.torchrun import joined, meet
from headrace.errors import RankError
from tests import python

SIZE = 3


@pytest.fixture
def stores():
    """A client of one store for each rank: `get` holds on to its own until it has an answer."""
    limit = datetime.timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    yield [
        dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit) for _ in range(SIZE)
    ]


def all_meet(stores, first, then, restarts):
    """What each rank finds; ranks `then` begin when the `first` have done all that they can."""

    def meet_as(rank):
        return meet(stores[rank], RankInfo(rank, SIZE, rank), restarts[rank])

    with ThreadPoolExecutor(SIZE) as pool:
        found = {rank: pool.submit(meet_as, rank) for rank in first}
        wait(found.values(), timeout=0.3)
        assert not any(future.done() for future in found.values())
        found |= {rank: pool.submit(meet_as, rank) for rank in then}
        return [found[rank].result(20) for rank in range(SIZE)]


def test_without_torchrun_there_is_no_attempt():
    assert joined({}) is None
    assert joined({"RANK": "0"}) is None


def test_messages_of_dead_ranks_are_ignored(stores):
    names = set()
    for first, then, restarts in (
        ((1, 2), (0,), (0, 0, 0)),
        ((0, 1), (2,), (0, 0, 1)),  # each node counts for itself
        ((0,), (1, 2), (2, 1, 1)),
    ):
        # One that was killed when it had said hello
        stores[0].queue_push("to rank 0", json.dumps({"hello": "rank/dead"}))
        # ... and one when it had signed
        stale = {"attempt": "attempt/dead", "rank": 1, "restarts": 9}
        stores[0].queue_push("to rank 0", json.dumps(stale))
        found = all_meet(stores, first, then, restarts)
        assert len(set(found)) == 1, found
        name, most = found[0]
        assert most == max(restarts)
        names.add(name)
    assert len(names) == 3


def run_again(stores, restarts, *command):
    """As torchrun would start the only rank of a job that it has begun again so often."""
    told = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    told |= {"MASTER_PORT": str(stores[0].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return python.run(
        [sys.executable, *map(str, command)], timeout=60,
        env=os.environ | told | {"TORCHELASTIC_RESTART_COUNT": str(restarts)},
    )  # fmt: skip


def test_store_of_an_attempt_is_separate_from_torchrun(stores):
    stores[0].set("0", "the address of a dead rank")
    code = """
import os
from headrace.distributed.torchrun import joined
attempt = joined(os.environ)
print(attempt.is_restart, attempt.store.check(["0"]))
"""
    for restarts, expected in ((0, "False False"), (2, "True False")):
        done = run_again(stores, restarts, "-c", code)
        assert done.stdout.strip() == expected, done.stderr


def test_a_restarted_attempt_continues_only_its_own_run(stores, tmp_path):
    run = headrace.train("CartPole-v1", total_env_steps=512, run_dir=tmp_path / "run", quiet=True)
    train = ["-m", "headrace", "train", "CartPole-v1", "--total-env-steps", 512]
    done = run_again(stores, 1, *train, "--run-dir", run.dir)
    assert done.returncode == 0 and "Nothing to do" in done.stdout, done.stderr
    done = run_again(stores, 1, *train, "--seed", 7, "--gamma", 0.5, "--run-dir", run.dir)
    assert done.returncode == 1
    assert "holds another run:\n  seed: 0 there, 7 here\n  gamma: 0.98 there" in done.stderr


def test_restarts_need_a_run_directory(stores, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    done = run_again(stores, 0, "-m", "headrace", "train", "CartPole-v1")
    assert done.returncode == 2
    assert "(--max-restarts)" in done.stderr and "--run-dir PATH" in done.stderr


def test_incomplete_torchrun_environment_is_refused():
    half = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    done = python.run(python.command("train", "CartPole-v1"), timeout=60, env=half)
    assert done.returncode == 2
    assert "MASTER_ADDR and MASTER_PORT are not" in done.stderr


def test_error_names_ranks_that_do_not_join(stores):
    stores[0].set_timeout(datetime.timedelta(seconds=0.2))
    stores[0].queue_push("to rank 0", json.dumps({"hello": "rank/dead"}))
    with pytest.raises(RankError, match=r"Of 3 ranks, these did not join: \[1, 2\]"):
        meet(stores[0], RankInfo(0, SIZE, 0), 0)
