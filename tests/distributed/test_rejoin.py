"""A learner that is killed: the others keep what they learned, and a new process joins them."""

import os
import signal

import gymnasium as gym
import pytest
import torch

import headrace
from headrace.collectors.api import Ledger
from headrace.distributed import child_process
from headrace.errors import RankError
from headrace.training.counters import Counters
from headrace.training.rejoin import Iteration
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
    """CartPole of which step 70 of one environment ends its process, unless that is `first`."""

    def __init__(self, first, mark):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=30))
        self.first, self.mark, self.steps = first, mark, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 70 and os.getpid() != self.first:
            die_once(self.mark)
        return self.env.step(action)


class DeadlyNetwork(torch.nn.Module):
    """A network of which the 19th gradient step ends its process, unless that is `first`."""

    def __init__(self, spec, first, mark):
        super().__init__()
        self.body = torch.nn.Linear(spec.seen.size, 32)
        self.params, self.value = torch.nn.Linear(32, 2), torch.nn.Linear(32, 1)
        self.first, self.mark, self.gradients = first, mark, 0

    def forward(self, obs):
        hidden = torch.tanh(self.body(obs))
        self.gradients += torch.is_grad_enabled()
        if self.gradients == 19 and os.getpid() != self.first:
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


@pytest.mark.parametrize(
    ("learners", "backend"),
    [
        (2, "auto"),
        pytest.param(3, "auto", marks=pytest.mark.more),
        pytest.param(4, "auto", marks=pytest.mark.slow),
        pytest.param(3, "gloo", marks=pytest.mark.more),
    ],
)
@repeats("where", ["gradient", "collect", "between"])
def test_learner_that_is_killed_is_replaced(tmp_path, capfd, where, learners, backend):
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
    out = capfd.readouterr().out
    assert f" of {learners} died (SIGKILL)" in out
    assert "the others go on with all that they have learned" in out
    assert children() == before


@pytest.mark.more
@repeats("algo", ["appo", "ppo"])
def test_learner_with_workers_is_replaced_with_its_workers(tmp_path, algo):
    child_process.warm_up()  # the server of processes stays
    first, mark, before = os.getpid(), tmp_path / "died", children()
    run = headrace.train(
        "CartPole-v1", algo=algo, num_learners=2, num_workers=2, lag=int(algo == "appo"),
        model=lambda spec: DeadlyNetwork(spec, first, mark), run_dir=tmp_path / "run", **SETTINGS,
    )  # fmt: skip
    check(run, left_at_end=2 * UPDATE if algo == "appo" else 0)
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
    """Worked out by hand: two ranks of which the second is lost."""
    iteration = Iteration()
    iteration.begin(3, Counters(env_steps=300))
    iteration.ledgers = [Ledger(collected=150), Ledger(collected=150)]
    iteration.begin(4, Counters(env_steps=300))
    assert iteration.lost(1) == Ledger()  # nothing is reported yet
    iteration.ledgers = [Ledger(collected=210), Ledger(collected=215, lost=3, remade=5)]
    assert iteration.lost(1) == Ledger(collected=65, lost=60, remade=5)

    iteration.rejoin(0, Counters(env_steps=300), is_learned=False)
    assert iteration.since == Ledger(collected=150)  # the 60 since then will be reported again
    iteration.ledgers = [Ledger(collected=60), Ledger(collected=50)]
    iteration.rejoin(0, Counters(env_steps=410), is_learned=True)
    assert iteration.since == Ledger(collected=210)
