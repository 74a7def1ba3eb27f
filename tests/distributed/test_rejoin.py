"""A learner that is killed: the others keep what they learned, and a new process joins them."""

import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
import pytest
import torch

import headrace
from headrace.collectors.api import Ledger
from headrace.distributed import child_process
from headrace.distributed.process import SAME_WITHIN_S
from headrace.distributed.ranks import JoinedRanks
from headrace.errors import RankError, RankLostError
from headrace.training.counters import Counters
from headrace.training.rejoin import Iteration
from tests.distributed.ranks_support import on_ranks
from tests.marks import repeats
from tests.support import children

UPDATE = 12 * 32
SETTINGS = {
    "num_envs": 12, "num_steps": 32, "envs_per_vector": 1, "num_minibatches": 4, "num_epochs": 2,
    "total_env_steps": 12 * UPDATE, "check_ranks": 1, "rank_timeout_s": 30, "quiet": True,
}  # fmt: skip
STEPS_OF_UPDATE = 2 * 4


def die_once(mark):
    """Kill this process, unless another one was killed here before."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(gym.Wrapper):
    """CartPole of which step 70 of one environment ends its process, unless that is `first`.

    All processes but that one write the seeds of their episodes to a file.
    """

    def __init__(self, first, mark):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=30))
        self.first, self.mark, self.steps = first, mark, 0

    def reset(self, *, seed=None, options=None):
        if os.getpid() != self.first:
            with self.mark.with_name("seeds").open("a") as file:
                file.write(f"{seed}\n")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        if self.steps == 70 and os.getpid() != self.first:
            die_once(self.mark)
        return self.env.step(action)


class DeadlyNetwork(torch.nn.Module):
    """A network of which gradient step `at` ends its process, unless that is `first`."""

    def __init__(self, spec, first, mark, at=19):
        super().__init__()
        self.body = torch.nn.Linear(spec.seen.size, 32)
        self.params, self.value = torch.nn.Linear(32, 2), torch.nn.Linear(32, 1)
        self.first, self.mark, self.at, self.gradients = first, mark, at, 0

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        self.gradients += torch.is_grad_enabled()
        if self.gradients == self.at and os.getpid() != self.first:
            die_once(self.mark)
        return self.params(hidden), self.value(hidden).squeeze(-1)


def check(run, *, killed=1, updates=12, left_at_end=0):
    """Nothing that was learned is lost, and nothing counted twice.

    `left_at_end`: env steps at most that workers which never stop have taken when the run ends.
    """
    ledger, summary = run.summary["ledger"], run.summary
    assert summary["env_steps"] == ledger["learned"] == updates * UPDATE
    assert summary["learner_steps"] == updates * STEPS_OF_UPDATE
    assert summary["restarts"] == killed
    lost = summary["lost_env_steps"]
    assert ledger["collected"] == ledger["learned"] + lost + ledger["remade"]
    assert lost <= killed * UPDATE // 2 + left_at_end  # a learner's share of a batch


@pytest.fixture
def left_open(monkeypatch):
    """Threads of connections that rank 0 has left open, each time that it has left a group."""
    close, threads = JoinedRanks.close, []

    def close_and_look(ranks):
        close(ranks)
        names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
        threads.append([name for name in names if "gloo" in name])

    monkeypatch.setattr(JoinedRanks, "close", close_and_look)
    return threads


@pytest.mark.parametrize(
    ("learners", "backend"),
    [
        (2, "auto"),
        pytest.param(3, "auto", marks=pytest.mark.more),
        pytest.param(4, "auto", marks=pytest.mark.slow),
        (3, "gloo"),
    ],
)
@repeats("where", ["gradient", "collect", "between"])
def test_learner_that_is_killed_is_replaced(tmp_path, capfd, left_open, where, learners, backend):
    first, mark, before = os.getpid(), tmp_path / "died", children()
    made = {"env": "CartPole-v1"}
    if where == "gradient":
        made["model"] = lambda spec: DeadlyNetwork(spec, first, mark)
    if where == "collect":
        made["env"] = lambda: Deadly(first, mark)

    def kill_between(update, metrics):
        if where == "between" and update == 5:
            os.kill(max(children() - before), signal.SIGKILL)

    run = headrace.train(
        **made, num_learners=learners, backend=backend, on_update=kill_between,
        run_dir=tmp_path / "run", **SETTINGS | {"quiet": False},
    )  # fmt: skip
    check(run)
    if where == "collect":
        seeds = (tmp_path / "seeds").read_text().split()
        assert len(set(seeds)) == len(seeds) > 30  # no episode is played again
    out = capfd.readouterr().out
    assert f" of {learners} died (SIGKILL)" in out
    assert "the others go on with all that they have learned" in out
    assert children() == before
    assert left_open == [[], []]  # others would wait for this rank, and not see the loss


@pytest.mark.more
@repeats("algo", ["appo", "ppo"])
def test_learner_with_workers_is_replaced_with_its_workers(tmp_path, algo):
    child_process.warm_up()  # the server of processes stays
    first, mark, before = os.getpid(), tmp_path / "died", children()
    run = headrace.train(
        "CartPole-v1", algo=algo, num_learners=2, num_workers=2, lag=int(algo == "appo"),
        model=lambda spec: DeadlyNetwork(spec, first, mark), run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    # At lag 1 a learner also has a share in its queue, and at the end both have.
    check(run, left_at_end=5 * UPDATE // 2 if algo == "appo" else 0)
    assert children() == before


@pytest.mark.more
def test_run_that_lost_a_learner_is_resumed(tmp_path):
    """Its last checkpoint is whole, also if the one before was of the weights at the loss."""
    before = children()

    def kill(update, metrics):
        if update in (5, 9):
            os.kill(max(children() - before), signal.SIGKILL)

    network = headrace.Network(normalize_obs=True, normalize_reward=True)
    headrace.train(
        "CartPole-v1", num_learners=2, on_update=kill, run_dir=tmp_path / "run", network=network,
        checkpoint_every_s=0, **SETTINGS,
    )  # fmt: skip
    resumed = headrace.resume(tmp_path / "run", total_env_steps=14 * UPDATE, quiet=True)
    check(resumed, killed=2, updates=14)


@pytest.mark.more
def test_learner_that_is_lost_at_the_very_end_is_replaced_for_it(tmp_path):
    before = children()

    def kill(update, metrics):
        if update == 12:  # the last one
            os.kill(max(children() - before), signal.SIGKILL)

    run = headrace.train(
        "CartPole-v1", num_learners=2, on_update=kill, run_dir=tmp_path / "run", **SETTINGS
    )
    check(run)


class Levelled(Deadly):
    """Writes the level that `on_update` has set with each episode."""

    level = 1

    def reset(self, *, seed=None, options=None):
        if os.getpid() != self.first:
            with self.mark.with_name("levels").open("a") as file:
                file.write(f"{self.level}\n")
        return super().reset(seed=seed, options=options)


@pytest.mark.more
def test_change_of_environments_outlives_a_loss_before_all_know_of_it(tmp_path):
    first, mark, before = os.getpid(), tmp_path / "died", children()
    mark.touch()  # no environment ends its process

    def kill(update, metrics):
        if update == 5:
            os.kill(max(children() - before), signal.SIGKILL)
            return headrace.set_envs(level=7)
        return None

    run = headrace.train(
        lambda: Levelled(first, mark), num_learners=2, num_workers=0, on_update=kill,
        run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    check(run)
    levels = (tmp_path / "levels").read_text().split()
    assert levels == sorted(levels)
    assert set(levels) == {"1", "7"}


@pytest.mark.more
def test_loss_in_the_last_update_before_the_time_is_over(tmp_path):
    """All ranks, the successor too, must make this update, and then end."""
    first, mark = os.getpid(), tmp_path / "died"
    run = headrace.train(
        "CartPole-v1", num_learners=3, stop_after_s=1e-3, run_dir=tmp_path / "run",
        model=lambda spec: DeadlyNetwork(spec, first, mark, at=3), **SETTINGS,
    )  # fmt: skip
    assert mark.exists()
    check(run, updates=1)


def test_cause_of_a_loss_at_the_start_is_shown(tmp_path):
    first, before = os.getpid(), children()

    class DiesAtStart(gym.Wrapper):
        def __init__(self):
            super().__init__(gym.make("CartPole-v1"))
            if os.getpid() != first:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match=r"Rank 1 of 2 died \(SIGKILL\)"):
        headrace.train(DiesAtStart, num_learners=2, run_dir=tmp_path / "run", **SETTINGS)
    assert children() == before


def test_learner_that_always_dies_ends_the_run(tmp_path):
    first, before = os.getpid(), children()

    class Always(gym.Wrapper):
        def step(self, action):
            if os.getpid() != first:
                os._exit(7)
            return self.env.step(action)

    words = r"Rank 1 of 2 died \(exit code 7\)\.\nThat was more than 1 times in 10 minutes"
    with pytest.raises(RankError, match=words):
        headrace.train(
            lambda: Always(gym.make("CartPole-v1")), num_learners=2, max_worker_restarts=1,
            run_dir=tmp_path / "run", **SETTINGS,
        )  # fmt: skip
    assert children() == before


def test_steps_of_an_iteration_are_counted_once():
    """Worked out by hand: two ranks, of which the second is lost twice."""

    def reports(*ranks):
        return [{"ledger": asdict(ledger), "env_steps": steps} for ledger, steps in ranks]

    iteration, total = Iteration(ledger_before=Ledger(collected=9, lost=9)), Counters()
    iteration.begin(3, total)
    ledger = iteration.count(reports((Ledger(collected=150), 150), (Ledger(collected=170), 150)))
    assert ledger == Ledger(collected=329, lost=9)  # 20 are in a queue
    iteration.begin(4, total)
    found = iteration.without([1], 2, is_over=False)
    assert found["lost"] == 20 and found["learned"] == [150, 0]
    iteration.count(reports((Ledger(collected=200), 50), (Ledger(275, lost=3, remade=5), 100)))
    found = iteration.without([1], 2, is_over=False)
    assert found["lost"] == 275 - 3 - 5 - 150 and found["learned"] == [150, 0]
    found = iteration.without([1], 2, is_over=True)
    assert found["lost"] == 275 - 3 - 5 - 250 and found["learned"] == [200, 0]
    assert found["ledger_before"] == asdict(Ledger(284, lost=9 + 3 + 17, remade=5, restarts=1))

    iteration.read(found | {"saved_version": 3}, total)
    iteration.begin(5, total)
    ledger = iteration.count(reports((Ledger(collected=260), 60), (Ledger(collected=40), 40)))
    assert ledger == Ledger(584, lost=29, remade=5, restarts=1)
    found = iteration.without([1], 2, is_over=False)
    assert found["lost"] == 40 and found["ledger_before"]["restarts"] == 2


def leave(ranks):
    """Rank 0 leaves after a loss that rank 1 has not seen, and finds no successor."""

    def no_group():
        ranks.waiting_for.get("seen by rank 1")
        raise RankError("no successor")

    ranks.waiting_for = torch.distributed.distributed_c10d._get_default_store()
    if ranks.rank == 0:
        ranks._next_group = no_group
        with pytest.raises(RankError, match="no successor"):
            ranks.rejoin(RankLostError("seen"))
    else:
        with pytest.raises(RankLostError):
            ranks.gather_bytes(b"for rank 0, which does not come")
        ranks.waiting_for.set("seen by rank 1", "")


@pytest.mark.parametrize("backend", ["auto", pytest.param("gloo", marks=pytest.mark.more)])
def test_rank_that_has_seen_a_loss_does_not_let_others_wait(backend):
    on_ranks(2, leave, backend=backend, limit_s=20.0)


@pytest.mark.more
def test_run_that_is_stopped_while_a_learner_is_replaced_is_saved_once(tmp_path):
    """All ranks must know alike that the last weights are saved: the checkpoint is of before."""
    first, mark, dead = os.getpid(), tmp_path / "died", tmp_path / "pipe"
    os.mkfifo(dead)

    class Stopped(Deadly):
        def step(self, action):
            if self.steps == 69 and not mark.exists():
                if os.getpid() == first:
                    dead.read_bytes()  # until the other learner has died
                    os.kill(first, signal.SIGINT)
                else:
                    self.pipe = dead.open("wb")
            return super().step(action)

    with pytest.raises(KeyboardInterrupt):
        headrace.train(
            lambda: Stopped(first, mark), num_learners=2, checkpoint_every_s=0,
            num_workers=0, run_dir=tmp_path / "run", **SETTINGS,
        )  # fmt: skip
    assert mark.exists()
    run = headrace.resume(tmp_path / "run", env=lambda: Deadly(first, mark), quiet=True)
    check(run, killed=0, left_at_end=UPDATE)


class StopsTheRun:
    """An environment that sends SIGINT to the run when the successor of a learner gets it."""

    def __init__(self, first, mark):
        self.first, self.mark = first, mark

    def __call__(self):
        return Deadly(self.first, self.mark)

    def __setstate__(self, state):
        self.__dict__.update(state)
        told = self.mark.with_name("told")
        if self.mark.exists() and not told.exists():
            told.touch()
            os.kill(self.first, signal.SIGINT)
            deadline = time.monotonic() + 10
            while not signal.sigpending() and time.monotonic() < deadline:
                os.sched_yield()


@pytest.mark.more
def test_signal_does_not_end_a_successor_that_starts(tmp_path, capfd):
    """It is passed on to it, and waits until its handlers are there."""
    env = StopsTheRun(os.getpid(), tmp_path / "died")
    with pytest.raises(KeyboardInterrupt):
        headrace.train(
            env, num_learners=2, num_workers=0, run_dir=tmp_path / "run",
            **SETTINGS | {"quiet": False},
        )  # fmt: skip
    out = capfd.readouterr().out
    assert "A new process has taken its place" in out
    assert out.count("died") == 1


class DiesAgain(StopsTheRun):
    """An environment that ends the first successor that gets it."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.mark.exists():
            die_once(self.mark.with_name("again"))


@pytest.mark.more
def test_successor_that_dies_is_replaced_as_well(tmp_path):
    env = DiesAgain(os.getpid(), tmp_path / "died")
    run = headrace.train(env, num_learners=3, num_workers=0, run_dir=tmp_path / "run", **SETTINGS)
    check(run)
    assert (tmp_path / "again").exists()


class NeverReady(StopsTheRun):
    """An environment that keeps a successor from starting, and interrupts the run twice."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.mark.exists():
            os.kill(self.first, signal.SIGINT)
            while not signal.sigpending():  # until the run has passed it on
                os.sched_yield()
            time.sleep(SAME_WITHIN_S)
            os.kill(self.first, signal.SIGINT)
            threading.Event().wait()


@pytest.mark.more
def test_second_signal_ends_a_run_that_waits_for_a_successor(tmp_path):
    env, before, began = NeverReady(os.getpid(), tmp_path / "died"), children(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        headrace.train(env, num_learners=2, num_workers=0, run_dir=tmp_path / "run", **SETTINGS)
    assert time.monotonic() - began < 5 * 10
    assert children() == before
