"""F10: a learner of several is killed while it trains, and the others go on."""

import os
import signal
import subprocess
import time

import pytest

import headrace
from headrace.distributed import local_ranks
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
