"""F10: a learner of several is killed while it trains, and the others go on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headrace
from headrace.distributed import local_ranks
from headrace.storage.metrics import read_metrics
from tests.faults.support import start
from tests.support import children

PROMISED_S = 5.0


@pytest.mark.faults
@pytest.mark.parametrize("algo", ["ppo", "appo", "dqn"])
@pytest.mark.parametrize("learners", [2, 3, 4])
def test_learner_is_killed(tmp_path, measured, monkeypatch, learners, algo):
    """Seconds from the kill to the next update, in which its successor has taken part."""
    monkeypatch.setattr(local_ranks, "subprocess", subprocess)  # a fresh Python, with its imports
    before, updates = children(), []
    num_steps = 4 if algo == "dqn" else 64  # of dqn, a gradient step follows each env step
    batch = 24 * num_steps

    def note(update, metrics):
        updates.append(time.monotonic())
        if update == 20:
            os.kill(max(children() - before), signal.SIGKILL)

    run = headrace.train(
        "CartPole-v1", algo=algo, num_learners=learners, num_envs=24, num_steps=num_steps,
        num_workers=0, total_env_steps=30 * batch, check_ranks=1, on_update=note,
        run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    lost, ledger = run.summary["lost_env_steps"], run.summary["ledger"]
    measured(
        "F10", f"{algo}: one of {learners} learners is killed",
        recover_s=updates[20] - updates[19], recover_within_s=PROMISED_S, lost_env_steps=lost,
    )  # fmt: skip
    assert ledger["learned"] == 30 * batch
    assert ledger["collected"] == ledger["learned"] + lost + ledger["remade"]
    assert lost <= batch // learners  # at lag 0, of a share of a batch


def last_row(run_dir, iteration, process):
    """The last row of a run's metrics, once there is one of that iteration or a later one."""
    deadline = time.monotonic() + 100
    while True:
        rows = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        if rows and rows[-1]["iteration"] >= iteration:
            return rows[-1]
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)  # another process's file: nothing tells of its changes


def is_rank(pid, rank):
    """Whether a process is that rank of a job of torchrun."""
    with contextlib.suppress(OSError):  # gone meanwhile
        surroundings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"RANK={rank}".encode() in surroundings
    return False


@pytest.mark.faults
def test_learner_of_torchrun_is_killed(tmp_path, measured):
    """torchrun ends the other learner, which has saved what it learned, and starts both again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc-per-node", 2, "--max-restarts", 1, "-m", "headrace", "train", "CartPole-v1"]
    words += ["--num-envs", 16, "--num-steps", 32, "--num-minibatches", 4, "--num-epochs", 4]
    words += ["--total-env-steps", 10**8, "--checkpoint-every-s", 1000, "--json"]
    process = start([*torchrun, *map(str, words), "--run-dir", str(tmp_path / "run")], tmp_path)
    last_row(tmp_path / "run", 50, process)
    [rank_1] = [pid for pid in children() if is_rank(pid, 1)]
    os.kill(rank_1, signal.SIGKILL)
    killed = time.monotonic()
    while not (saved := list((tmp_path / "run/checkpoints").glob("step_*"))):
        assert time.monotonic() < killed + 30
        time.sleep(0.02)
    steps = int(saved[0].name.removeprefix("step_"))
    row = last_row(tmp_path / "run", steps // (16 * 32) + 1, process)
    recovered = time.monotonic() - killed
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert f"What was learned from {steps:,} env steps is saved." in err
    assert f"Resumed from {saved[0].name}" in err
    assert row["learner_steps"] >= row["iteration"] * 4 * 4  # no gradient step is lost
    measured(
        "F10", "torchrun: one of 2 learners is killed", recover_s=recovered, recover_within_s=15,
        lost_env_steps=16 * 32,
    )  # fmt: skip
