"""Acting for workers in the learner's process: the same contract as a sampler that acts itself.

A batch of another shape rounds differently: log-probs and values are those of a sampler within
4e-6. So that actions agree, they do not depend on rounding here: environments are told apart by
noise that is not close to the boundary between two, and Gaussian actions change no observation.
"""

import itertools
import os
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.collect.inference import Inference
from headrace.collect.nonstop import NonstopCollector
from headrace.envs.api import Guards
from headrace.errors import ConfigError, EnvError, SamplerError
from headrace.models.policy import Network
from headrace.patience import LEAST_LIMIT_S
from headrace.run.config import resolve
from headrace.run.log import read_metrics
from tests.support import Counting, inline, never, plan_for, policy_for, short_cartpole, workers
from tests.test_lag import Slow
from tests.test_learning import FAST, SMALL, Identity
from tests.test_workers import Dying, Sleepy

CPU = torch.device("cpu")
ATOL = 4e-6


def learner_plan(env, **more):
    return plan_for(env, inference_device=CPU, **more)


class Vague(Counting):
    """Pendulum's action space, and observations that no action changes."""

    def __init__(self, num_actions=3):
        super().__init__(truncate_at=7)
        self.action_space = gym.spaces.Box(-2, 2, (num_actions,), np.float32)

    def _obs(self):
        return np.tanh(super()._obs() / 10)


class Named(Counting):
    """Observations with names, one of them an image."""

    def __init__(self):
        super().__init__(truncate_at=9)
        space = {"two": self.observation_space, "image": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)}
        self.observation_space = gym.spaces.Dict(space)

    def _obs(self):
        image = np.full((8, 8, 3), 20 * self.t, np.uint8)
        return {"two": np.tanh(super()._obs() / 10), "image": image}


def assert_alike(ours, theirs):
    """Fragments, the same but for rounding."""
    for name in ("reward", "terminated", "truncated", "valid", "policy_version", "env_id"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for a, b in zip(leaves(ours.obs), leaves(theirs.obs), strict=True):
        assert torch.equal(a, b)
    for (a, *at), (b, *there) in [(ours.finals(), theirs.finals())]:
        assert all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
        assert all(torch.equal(x, y) for x, y in zip(at, there, strict=True))
    close = {"rtol": 0, "atol": ATOL}
    torch.testing.assert_close(ours.action, theirs.action, **close)
    assert ours.policy_out.keys() == theirs.policy_out.keys()
    for name, column in ours.policy_out.items():
        torch.testing.assert_close(column, theirs.policy_out[name], **close)


def leaves(obs):
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def compare(make, theirs, ours, batches=3):
    """Collect from both, with weights that change in between; how many final observations."""
    finals = 0
    for version in range(batches):
        policy = policy_for(make, seed=version)
        for collector in (ours, theirs):
            collector.publish(policy, version)
        for a, b in zip(ours.collect().fragments, theirs.collect().fragments, strict=True):
            assert_alike(a, b)
            finals += int(a.num_final)
        for collector in (ours, theirs):
            collector.go_ahead(more=version + 1 < batches)
    assert ours.ledger == theirs.ledger
    ours.close()
    theirs.close()
    return finals


@pytest.mark.parametrize("arithmetic", ["plain", "auto"])
@pytest.mark.parametrize(
    ("env", "network"),
    [
        (short_cartpole, {}),
        (short_cartpole, {"normalize_obs": True, "shared_trunk": True}),
        (Vague, {}),
        (Named, {"image_net": "small"}),
    ],
    ids=["discrete", "normalized", "gaussian", "dict"],
)
def test_at_lag_0_it_makes_the_fragments_of_samplers_that_act_themselves(env, network, arithmetic):
    sizes = {"num_steps": 40, "num_envs": 8, "network": Network(arithmetic=arithmetic, **network)}
    plan = plan_for(env, **sizes)
    assert compare(plan, inline(plan), workers(learner_plan(env, **sizes))) > 10


def test_at_lag_0_any_number_of_workers_makes_the_same_batches():
    plan = learner_plan(short_cartpole, num_steps=40, num_envs=6)
    assert compare(plan, workers(plan, 1), workers(plan, 2)) > 10


def test_at_lag_1_it_acts_with_the_weights_of_the_update_before():
    sizes = {"num_steps": 20, "num_envs": 8, "lag": 1}
    theirs = inline(plan_for(short_cartpole, **sizes))
    ours = workers(learner_plan(short_cartpole, **sizes))
    compare(plan_for(short_cartpole, **sizes), theirs, ours, batches=4)


def test_each_step_is_stamped_with_the_weights_that_took_it():
    plan = learner_plan(Slow, num_envs=8, num_steps=48, lag=2, first_ready=True)
    collector, policies = NonstopCollector(plan, 2, never), {}
    mixed, last = 0, dict.fromkeys(range(0, 8, 2), 0)
    for version in itertools.count():
        policies[version] = policy_for(plan, seed=version)
        collector.publish(policies[version], version)
        if version % 10:
            looks = [[], [0]]  # one: 0.1 s, or until a fragment is there
            collector._crew.serve(looks.pop)
            continue
        for fragment in collector.collect().fragments:
            stamps, env = fragment.policy_version, int(fragment.env_id[0])
            assert torch.equal(stamps, stamps.sort(0).values)  # it never goes back
            assert (stamps == stamps[:, :1]).all() and last[env] <= int(stamps[0, 0])
            last[env] = int(stamps[-1, 0])
            versions = stamps[:, 0].unique().tolist()
            mixed += len(versions) > 1
            for of in versions:
                rows = stamps[:, 0] == of
                at = fragment.obs[:-1][rows], fragment.action[rows]
                log_prob, _, value = policies[of].evaluate(*at)
                out = fragment.policy_out
                torch.testing.assert_close(log_prob, out["log_prob"][rows], rtol=0, atol=ATOL)
                torch.testing.assert_close(value, out["value"][rows], rtol=0, atol=ATOL)
        if mixed >= 3:
            break
    collector.close()


class Meeting(nn.Module):
    """A network that begins its k-th call for worker's vectors only when it is let."""

    gate = threading.Event()
    calls = 0
    fail_at = None

    def __init__(self, spec):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, obs):
        if threading.current_thread().name == "headrace inference":
            Meeting.calls += 1
            Meeting.gate.wait(60)
            if Meeting.calls == Meeting.fail_at:
                raise ZeroDivisionError("the user's own message")
        out = self.linear(obs)
        return out[..., :2], out[..., 2]


@pytest.fixture
def gate():
    """Closed until it is set."""
    Meeting.gate, Meeting.calls, Meeting.fail_at = threading.Event(), 0, None
    yield Meeting.gate
    Meeting.gate.set()


def begun(collector):
    """Order a batch, and wait until somebody waits for the network."""
    collector.publish(policy_for(collector._plan), 0)
    collector._order()
    collector._crew.serve(lambda: [] if Meeting.calls else collector._crew.owing)


def test_a_worker_steps_one_vector_while_another_one_waits(gate):
    """Nobody acts yet, but for one batch: the first vector that asked; all others have asked, too."""
    plan = learner_plan(Counting, num_envs=8, num_steps=8, model=Meeting)
    collector = workers(plan, 1)
    begun(collector)
    worker = collector._crew._inference._workers[0]
    until = time.monotonic() + 30
    size = 40  # of a request
    while len(worker.socket.recv(1 << 16, 0x2)) < 3 * size and time.monotonic() < until:  # a peek
        collector._crew.look(0.05)
    asked = worker.socket.recv(1 << 16, 0x2)
    assert len(asked) == 3 * size
    gate.set()
    assert collector.collect().metrics["inference_batch"] > 1
    collector.close()


def test_an_error_of_the_network_reaches_the_user_as_itself(gate):
    gate.set()
    Meeting.fail_at = 5
    plan = learner_plan(Counting, model=Meeting)
    collector = workers(plan)
    collector.publish(policy_for(plan), 0)
    for _ in range(2):  # however often it is asked
        with pytest.raises(ZeroDivisionError, match="the user's own message"):
            collector.collect()
    collector.close()


def test_a_network_that_hangs_ends_the_run_in_words(gate, monkeypatch):
    plan = learner_plan(Counting, model=Meeting)
    collector = workers(plan)
    begun(collector)
    monkeypatch.setattr("headrace.collect.inference.LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr("headrace.patience.LEAST_LIMIT_S", 1.0)
    with pytest.raises(SamplerError, match=r"(?s)in forward.*has not given actions for 1 s"):
        collector.collect()
    gate.set()
    collector.close()
    assert LEAST_LIMIT_S == 60


def test_a_worker_that_waits_long_for_the_network_is_not_taken_for_stuck(gate):
    said = []
    plan = learner_plan(Counting, model=Meeting, guards=Guards(env_timeout_s=0.5))
    collector = workers(plan, say=said.append)
    begun(collector)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        collector._crew.look(0.1)
    gate.set()
    assert collector.collect() is not None
    assert (said, collector.ledger.restarts) == ([], 0)
    collector.close()


def test_a_worker_that_is_killed_while_it_waits_is_replaced(gate):
    """What it had asked for is not written into the fragments of the next one."""
    plan, said = learner_plan(Counting, model=Meeting), []
    collector = workers(plan, say=said.append)
    begun(collector)
    os.kill(collector._crew._seats[0].handle.process.pid, signal.SIGKILL)
    threading.Timer(1.0, gate.set).start()  # it is buried, or at the lock, by then
    expected = inline(plan_for(Counting, model=Meeting))
    expected.publish(policy_for(plan), 0)
    for a, b in zip(collector.collect().fragments, expected.collect().fragments, strict=True):
        assert_alike(a, b)
    assert "Worker 0 died (SIGKILL), while waiting for actions" in said[0]
    assert collector.ledger.restarts == 1
    collector.close()
    expected.close()


@pytest.mark.parametrize("lag", [0, 2])
def test_workers_that_are_killed_at_any_time_are_replaced(lag):
    plan = learner_plan(short_cartpole, num_envs=8, num_steps=32, lag=lag, first_ready=lag > 0)
    same = plan_for(short_cartpole, num_envs=8, num_steps=32)
    collector = NonstopCollector(plan, 2, never) if lag else workers(plan)
    expected = inline(same)
    for each in (collector, expected):
        each.publish(policy_for(plan), 0)
    number, made = dict.fromkeys(range(0, 8, 2), 0), []
    for k in range(6):
        made.append({int(f.env_id[0]): copied(f) for f in expected.collect().fragments})
        if k in (1, 3):
            pid = collector._crew._seats[k // 2].handle.process.pid
            killer = threading.Timer(0.01 * k, os.kill, (pid, signal.SIGKILL))
            killer.start()
        for fragment in collector.collect().fragments:
            env = int(fragment.env_id[0])
            if number[env] < len(made):  # of a vector that is ahead, it is not made yet
                assert_alike(fragment, made[number[env]][env])
            number[env] += 1
        collector.go_ahead(more=k < 5)
        killer = locals().get("killer")
        if killer:
            killer.join()
    collector.halt()
    ledger = collector.ledger
    assert ledger.restarts >= 1
    assert ledger.collected - ledger.lost - ledger.remade == 6 * 8 * 32
    collector.close()
    expected.close()


def copied(fragment):
    return type(fragment)(**torch.utils._pytree.tree_map(torch.clone, vars(fragment)))


def test_one_that_dies_in_a_step_is_told_of_with_the_vector_whose_turn_it was():
    pass
