"""A learner with a replay that is killed: its rows are lost, and the others learn from theirs."""

import itertools
import os
import signal

import pytest

import headrace
from headrace.storage.metrics import read_metrics
from tests.algos.reach import Reach
from tests.distributed.test_rejoin import Deadly, DeadlyNetwork
from tests.marks import repeats
from tests.support import children

UPDATE, UPDATES, RATIO, STARTS = 12 * 8, 20, 0.2, 200
SETTINGS = {
    "num_envs": 12, "num_steps": 8, "envs_per_vector": 1, "check_ranks": 1, "rank_timeout_s": 30,
    "total_env_steps": UPDATES * UPDATE, "quiet": True,
}  # fmt: skip
REPLAY = {
    "learning_starts": STARTS, "batch_size": 24, "replay_size": 4800, "replay_ratio": RATIO,
}  # fmt: skip
DQN = headrace.DQN(**REPLAY)
PRIORITIZED = headrace.DQN(priority_alpha=0.6, n_step=3, **REPLAY)
SAC = headrace.SAC(priority_alpha=0.6, **REPLAY)


def check(run, updates=UPDATES):
    """No gradient step is lost or made twice, and all env steps are counted."""
    summary, ledger = run.summary, run.summary["ledger"]
    assert summary["env_steps"] == ledger["learned"] == updates * UPDATE
    assert summary["learner_steps"] == int(RATIO * (updates * UPDATE - STARTS))
    assert summary["restarts"] == 1
    lost = summary["lost_env_steps"]
    assert ledger["collected"] == ledger["learned"] + lost + ledger["remade"]
    assert lost <= UPDATE // 2


@pytest.mark.parametrize(("learners", "backend"), [(2, "auto"), (3, "gloo")])
@repeats(
    ("algo", "where"),
    [
        (DQN, "gradient"),
        (SAC, "between"),
        (PRIORITIZED, "collect"),
        (DQN, "collect"),
        (PRIORITIZED, "gradient"),
        (PRIORITIZED, "between"),
    ],
)
def test_learner_with_a_replay_is_replaced(tmp_path, algo, where, learners, backend):
    first, mark, before = os.getpid(), tmp_path / "died", children()
    made = {"env": Reach if algo is SAC else "CartPole-v1"}
    if where == "gradient":
        made["model"] = lambda spec: DeadlyNetwork(spec, first, mark, at=100)
    if where == "collect":
        made["env"] = lambda: Deadly(first, mark)

    def kill_between(update, metrics):
        if where == "between" and update == 12:
            os.kill(max(children() - before), signal.SIGKILL)

    run = headrace.train(
        **made, algo=algo, num_learners=learners, backend=backend, on_update=kill_between,
        run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    check(run)
    rows = [row["replay_rows"] for row in read_metrics(run.dir)]
    assert sum(b < a for a, b in itertools.pairwise(rows)) == 1
    if where == "gradient":  # in update 8, in which the new one stores its first batch
        of_lost = 12 // learners * 8
        assert rows[6] == 7 * UPDATE
        assert rows[-1] == UPDATES * UPDATE - 7 * of_lost  # and the others no batch twice
    assert children() == before


def test_learner_that_is_lost_while_a_resumed_run_refills_its_replay(tmp_path):
    """All ranks, the new one too, must know how many env steps are only stored."""
    before = children()

    def kill(update, metrics):
        if update == 6:  # of 5, 6 and 7 nothing is learned, as they replace lost rows
            os.kill(max(children() - before), signal.SIGKILL)

    summaries = []
    for name, on_update in (("whole", None), ("killed", kill)):
        headrace.train(
            "CartPole-v1", algo=headrace.DQN(save_replay=False, **REPLAY), num_learners=2,
            run_dir=tmp_path / name, **SETTINGS | {"total_env_steps": 4 * UPDATE},
        )  # fmt: skip
        run = headrace.resume(
            tmp_path / name, total_env_steps=12 * UPDATE, on_update=on_update, quiet=True
        )
        summaries.append(run.summary)
    whole, killed = summaries
    assert killed["restarts"] == 1 + whole["restarts"] == 1
    due = int(RATIO * (9 * UPDATE - STARTS))
    assert killed["learner_steps"] == whole["learner_steps"] == due


def test_run_that_lost_rows_of_a_replay_is_resumed(tmp_path):
    """The files have rows of the lost learner, which nothing is learned from any more."""
    before = children()

    def kill(update, metrics):
        if update == 12:
            os.kill(max(children() - before), signal.SIGKILL)

    run = headrace.train(
        "CartPole-v1", algo=PRIORITIZED, num_learners=2, on_update=kill, checkpoint_every_s=0,
        run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    check(run)
    whole = headrace.resume(tmp_path / "run", total_env_steps=24 * UPDATE, quiet=True)
    check(whole, updates=24)
    rows = {row["iteration"]: row["replay_rows"] for row in read_metrics(run.dir)}
    assert rows[12] - UPDATE < 12 * UPDATE
    assert rows[20] < rows[21] <= rows[20] + UPDATE  # all were there
