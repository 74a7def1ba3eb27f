"""Acting for workers in the learner's process: the same contract as a worker that acts itself.

A batch of another shape rounds differently: log-probs and values are those of a worker within
4e-6, and so are Gaussian actions. A discrete action differs only where its noise is as close as
that to the boundary between two, and no such noise is among these.
"""

import gc
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
from headrace import batch
from headrace.collectors.asynchronous import AsynchronousCollector
from headrace.collectors.backends.inference_server import InferenceServer
from headrace.collectors.backends.worker_main import ANSWER, NEWEST, REQUEST
from headrace.config.resolve import resolve
from headrace.envs.api import Guards
from headrace.errors import ConfigError, EnvError, WorkerError
from headrace.models.policy import Network
from headrace.seeding import derive
from headrace.storage.metrics import read_metrics
from headrace.weights import Published
from tests.collectors.test_lag import slow
from tests.collectors.test_worker_pool import Sleepy, StopLater
from tests.envs.test_factory import Broken
from tests.faults.test_env import assert_balanced
from tests.ladder.test_collect import finals
from tests.marks import repeats
from tests.support import (
    Counting,
    children,
    inline,
    never,
    plan_for,
    policies_for,
    policy_for,
    short_cartpole,
    workers,
)
from tests.test_learning import FAST, SMALL, Identity

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
        space = {
            "two": self.observation_space,
            "image": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        }
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
    for a, b in zip(finals(ours), finals(theirs), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))
    close = {"rtol": 0, "atol": ATOL}
    torch.testing.assert_close(ours.action, theirs.action, **close)
    torch.testing.assert_close(ours.recurrent_state, theirs.recurrent_state, **close)
    assert ours.stored_outputs.keys() == theirs.stored_outputs.keys()
    for name, column in ours.stored_outputs.items():
        torch.testing.assert_close(column, theirs.stored_outputs[name], **close)


def leaves(obs):
    return list(obs.values()) if isinstance(obs, dict) else [obs]


def compare(plan, theirs, ours, batches=3):
    """Collect from both, with weights that change in between; how many final observations."""
    num_finals = 0
    for version in range(batches):
        policies = policies_for(plan, seed=version)
        for collector in (ours, theirs):
            collector.publish(policies, version)
        for a, b in zip(ours.collect().fragments, theirs.collect().fragments, strict=True):
            assert_alike(a, b)
            num_finals += len(finals(a)[1])
        for collector in (ours, theirs):
            collector.release_batch(more=version + 1 < batches)
    assert ours.ledger == theirs.ledger
    ours.close()
    theirs.close()
    return num_finals


@repeats("arithmetic", ["plain", "auto"])
@repeats(
    ("env", "network"),
    [
        (short_cartpole, {}),
        (short_cartpole, {"normalize_obs": True, "shared_trunk": True}),
        (Vague, {}),
        (Named, {"image_net": "small"}),
        (short_cartpole, {"core": "lstm", "core_size": 8}),
    ],
    ids=["discrete", "normalized", "gaussian", "dict", "lstm"],
)
def test_server_at_lag_0_makes_the_fragments_of_acting_workers(env, network, arithmetic):
    sizes = {"num_steps": 40, "num_envs": 8, "network": Network(arithmetic=arithmetic, **network)}
    plan = plan_for(env, **sizes)
    assert compare(plan, inline(plan), workers(learner_plan(env, **sizes))) > 10


def test_server_makes_the_same_batches_with_any_number_of_workers():
    plan = learner_plan(short_cartpole, num_steps=40, num_envs=6)
    assert compare(plan, workers(plan, 1), workers(plan, 2)) > 10


def test_server_at_lag_1_acts_with_the_weights_of_the_update_before():
    sizes = {"num_steps": 20, "num_envs": 8, "lag": 1}
    theirs = inline(plan_for(short_cartpole, **sizes))
    ours = workers(learner_plan(short_cartpole, **sizes))
    compare(plan_for(short_cartpole, **sizes), theirs, ours, batches=4)


def test_each_step_has_the_version_of_its_weights():
    plan = learner_plan(slow, num_envs=8, num_steps=48, lag=2, asynchronous=True)
    collector, policies = AsynchronousCollector(plan, 2, never), {}
    mixed, last = 0, dict.fromkeys(range(0, 8, 2), 0)
    for version in itertools.count():
        policies[version] = policy_for(plan, seed=version)
        collector.publish({"default": policies[version]}, version)
        if version % 10:
            looks = [True, False]  # one: 0.1 s, or until a fragment is there
            collector.run_until(looks.pop)
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
                out = fragment.stored_outputs
                torch.testing.assert_close(log_prob, out["log_prob"][rows], rtol=0, atol=ATOL)
                torch.testing.assert_close(value, out["value"][rows], rtol=0, atol=ATOL)
        if mixed >= 3:
            break
    collector.close()


class Gated(nn.Module):
    """A network that, for the workers' vectors, answers only once the gate is open."""

    gate, called = threading.Event(), threading.Event()
    calls = 0
    fails_at = None

    def __init__(self, spec):
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, obs):
        if threading.current_thread().name == "headrace inference":
            Gated.calls += 1
            Gated.called.set()
            assert Gated.gate.wait(60)
            if Gated.calls == Gated.fails_at:
                raise ZeroDivisionError("the user's own message")
        out = self.linear(obs)
        return out[..., :2], out[..., 2]


@pytest.fixture
def gate():
    """Closed until it is set."""
    Gated.gate, Gated.called = threading.Event(), threading.Event()
    Gated.calls, Gated.fails_at = 0, None
    yield Gated.gate
    Gated.gate.set()


def all_wait(collector):
    """Order a batch, and look on until each vector has asked for its first actions."""
    collector.publish(policies_for(collector._plan), 0)
    collector._order()
    memories = [worker.memory for worker in collector.workers]
    fragments = [f for memory in memories for of in memory.fragments.values() for [f] in of]

    def all_have_asked():
        begun = all(int(fragment.env_id[0]) >= 0 for fragment in fragments)
        return begun and Gated.calls and all(memory.turn[0] == -1 for memory in memories)

    collector.run_until(lambda: all_have_asked() or not collector.pending)
    assert Gated.calls == 1
    assert all(fragment.reward.isnan().all() for fragment in fragments)


def test_requests_of_several_vectors_make_one_batch(gate):
    plan = learner_plan(Counting, num_envs=8, num_steps=8, model=Gated)
    collector = workers(plan, 1)
    all_wait(collector)
    gate.set()
    assert 1 < collector.collect().metrics["inference_batch"] <= 4
    collector.close()


def test_error_of_the_network_reaches_the_user_unchanged(gate):
    gate.set()
    Gated.fails_at = 5
    plan = learner_plan(Counting, model=Gated)
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    for _ in range(2):  # however often it is asked
        with pytest.raises(ZeroDivisionError, match="the user's own message"):
            collector.collect()
    collector.close()


@pytest.mark.more
def test_hanging_network_ends_the_run_with_its_stack(gate, monkeypatch):
    plan = learner_plan(Counting, model=Gated)
    collector = workers(plan)
    all_wait(collector)
    monkeypatch.setattr("headrace.collectors.backends.inference_server.LEAST_LIMIT_S", 1.0)
    monkeypatch.setattr("headrace.timeouts.LEAST_LIMIT_S", 1.0)
    with pytest.raises(WorkerError, match=r"(?s)in forward.*has not given actions for 1 s"):
        collector.collect()
    gate.set()
    collector.close()


@pytest.mark.more
def test_worker_that_waits_long_for_the_network_is_not_killed(gate):
    plan, said = learner_plan(Counting, model=Gated, guards=Guards(env_timeout_s=0.5)), []
    collector = workers(plan, say=said.append)
    all_wait(collector)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        collector.poll(0.1)
    gate.set()
    assert collector.collect() is not None
    assert (said, collector.ledger.restarts) == ([], 0)
    collector.close()


def test_server_writes_nothing_for_a_dismissed_worker(gate):
    plan = learner_plan(Counting, model=Gated)
    policy = policy_for(plan)
    published = Published({"default": policy})
    published.publish({"default": policy}, 0)
    [layout] = plan.layouts
    first, second, third = (batch.allocate(layout) for _ in range(3))
    for fragment in (first, second, third):
        fragment.obs[0] = 1.0
    inference = InferenceServer(plan, published)
    with inference.admit(0, {0: [(first,)], 1: [(second,)]}) as asks:
        asks.send(REQUEST.pack(0, 0, 0, 0, NEWEST))
        assert Gated.called.wait(60)
        asks.send(REQUEST.pack(1, 0, 0, 0, NEWEST))
        threading.Timer(0.3, gate.set).start()
        inference.dismiss(0)
        assert gate.is_set() and int(first.policy_version[0, 0]) == 0  # that round has ended
        with pytest.raises(ConnectionError):
            asks.send(REQUEST.pack(1, 0, 0, 0, NEWEST))
    with inference.admit(0, {1: [(third,)]}) as asks:
        asks.send(REQUEST.pack(1, 0, 0, 0, NEWEST))
        assert ANSWER.unpack(asks.recv(ANSWER.size)) == (1, 0)
    assert int(third.policy_version[0, 0]) == 0
    assert (second.policy_version != 0).all() and second.stored_outputs["value"].isnan().all()
    inference.close()


def test_worker_killed_while_it_waits_is_replaced(gate):
    plan, said = learner_plan(Counting, model=Gated), []
    collector = workers(plan, say=said.append)
    all_wait(collector)
    os.kill(collector.workers[0].child.process.pid, signal.SIGKILL)
    threading.Timer(1.0, gate.set).start()  # while the pool waits for the round to end
    expected = inline(plan_for(Counting, model=Gated))
    expected.publish(policies_for(plan), 0)
    for a, b in zip(collector.collect().fragments, expected.collect().fragments, strict=True):
        assert_alike(a, b)
    assert "Worker 0 died (SIGKILL), while waiting for actions" in said[0]
    assert collector.ledger.restarts == 1
    collector.close()
    expected.close()


@pytest.mark.more
def test_a_round_may_take_as_long_as_a_step(gate, monkeypatch):
    """The pool waits for its end by --env-timeout-s, not by the default's least."""
    monkeypatch.setattr("headrace.collectors.backends.inference_server.LEAST_LIMIT_S", 0.0)
    plan = learner_plan(Counting, model=Gated, guards=Guards(env_timeout_s=60.0))
    collector = workers(plan)
    all_wait(collector)
    os.kill(collector.workers[0].child.process.pid, signal.SIGKILL)
    threading.Timer(0.5, gate.set).start()  # while the pool waits for the round to end
    assert collector.collect() is not None
    assert collector.ledger.restarts == 1
    collector.close()


@repeats("lag", [0, 2])
def test_workers_killed_at_any_time_are_replaced(lag):
    sizes, batches = {"num_envs": 8, "num_steps": 32}, 6
    plan = learner_plan(short_cartpole, lag=lag, asynchronous=lag > 0, **sizes)
    collector = AsynchronousCollector(plan, 2, never) if lag else workers(plan)
    expected = inline(plan_for(short_cartpole, **sizes))
    made = {v: [] for v in plan.vectors}
    for each in (collector, expected):
        each.publish(policies_for(plan), 0)
    for _ in range(batches):
        for v, fragment in enumerate(expected.collect().fragments):
            copied = torch.utils._pytree.tree_map(torch.clone, vars(fragment))
            made[v].append(type(fragment)(**copied))
    expected.close()
    killers = []
    for k in range(batches):
        if k in (1, 3):
            pid = collector.workers[k // 2].child.process.pid
            killers.append(threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)))
            killers[-1].start()
        for fragment in collector.collect().fragments:
            left = made[int(fragment.env_id[0]) // 2]
            if left:  # another vector may be ahead
                assert_alike(fragment, left.pop(0))
        collector.release_batch(more=k + 1 < batches)
    for killer in killers:
        killer.join()
    collector.halt()
    ledger = collector.ledger
    assert 1 <= ledger.restarts <= 2
    assert ledger.collected - ledger.lost - ledger.remade == batches * 8 * 32
    collector.close()


class Alone(Counting):
    """In a worker, the environment of one seed dies in its third step."""

    def __init__(self, learner, seed):
        super().__init__()
        self.learner, self.seed, self.first = learner, seed, None

    def reset(self, *, seed=None, options=None):
        self.first = seed if self.first is None else self.first
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if os.getpid() != self.learner and self.first == self.seed and self.t == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_death_in_a_step_is_reported_with_the_env_whose_turn_it_was():
    which = {"learner": os.getpid(), "seed": derive(3, "env", 5, 0)}
    guards = Guards(on_worker_loss="fail")
    plan = learner_plan(Alone, num_envs=8, kwargs=which, guards=guards)
    collector = workers(plan, 1)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(WorkerError, match=r"in step 3 with action ., env 5 of .* worker 0"):
        collector.collect()
    collector.close()


def test_error_in_a_step_has_the_environment_s_message():
    plan = learner_plan(lambda: Broken("step"), num_envs=8)
    collector = workers(plan)
    collector.publish(policies_for(plan), 0)
    with pytest.raises(EnvError, match=r"(?s)the user's own message: step 7.*worker "):
        collector.collect()
    collector.close()


@pytest.mark.more
def test_hanging_step_loses_its_worker_s_fragments(tmp_path, capsys):
    (tmp_path / "once").mkdir()
    run = headrace.train(
        "headrace.envs.faulty:Faulty", algo="appo", lag=1, run_dir=tmp_path / "run",
        env_kwargs={"faults": "hang@40", "once": str(tmp_path / "once"), "slow_step": 0.005},
        num_workers=2, inference="learner", env_timeout_s=2.0, num_envs=8, num_steps=16,
        total_env_steps=8 * 16 * 12,
    )  # fmt: skip
    assert "has not answered for 2 s and was killed" in capsys.readouterr().out
    assert run.summary["restarts"] == 1
    assert_balanced(run.summary)


def test_stopped_workers_give_up_fragments_and_count_steps():
    plan, stop = learner_plan(lambda: Sleepy(0.02), num_envs=8, num_steps=1000), StopLater(0.5)
    collector = workers(plan, stop=stop)
    collector.publish(policies_for(plan), 0)
    stop.begin()
    assert collector.collect() is None
    assert 0 < collector.ledger.lost == collector.ledger.collected < 1000
    collector.close()


def test_closed_workers_leave_nothing_behind():
    plan = learner_plan(short_cartpole, num_envs=8)
    workers(plan).close()  # starts what stays: the server that forks
    before, threads = children(), threading.enumerate()
    files = os.listdir("/proc/self/fd")
    for _ in range(2):
        collector = workers(plan)
        collector.publish(policies_for(plan), 0)
        collector.collect()
        collector.close()
        del collector
    assert threading.enumerate() == threads
    assert children() == before
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(files)


@pytest.mark.more
@pytest.mark.parametrize(("algo", "lag", "least"), [(FAST, 0, 9.0), ("appo", 2, 7.0)])
def test_training_with_the_server_learns(tmp_path, algo, lag, least):
    more = {} if lag == 0 else {"lr": 3e-3, "gamma": 0.5, "num_epochs": 4, "num_minibatches": 4}
    run = headrace.train(
        Identity, algo=algo, total_env_steps=12_000, run_dir=tmp_path / "run", lag=lag,
        num_workers=2, inference="learner", **SMALL | {"envs_per_vector": 2} | more,
    )  # fmt: skip
    assert run.mean_return > least
    assert_balanced(run.summary)
    assert set(run.summary["worker_meters"]) == {"worker 0", "worker 1", "inference"}
    assert all(1 <= row["inference_batch"] <= 4 for row in read_metrics(run.dir))


def test_server_without_workers_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)inference='learner' .* none: num_workers=0"):
        resolve({"env": "Taxi-v3", "inference": "learner", "num_workers": 0})
    assert resolve({"env": "Taxi-v3", "inference": "learner"}, cores=3).run.num_workers == 3


@pytest.mark.parametrize(
    ("given", "envs_per_vector"),
    [
        ({}, 2),
        ({"num_envs": 7}, 1),
        ({"num_envs": 64, "num_learners": 2}, 16),
        ({"env": "CartPole-v1"}, 2),  # a preset's vectors are those of workers that act
        ({"envs_per_vector": 4}, 4),
    ],
)
def test_each_worker_has_two_vectors_by_default(given, envs_per_vector):
    settings = resolve({"env": "Taxi-v3", "num_workers": 2, "inference": "learner"} | given)
    assert settings.run.envs_per_vector == envs_per_vector


def test_worker_with_one_vector_is_noted(tmp_path, capsys):
    headrace.train(
        "CartPole-v1", num_workers=2, inference="learner", envs_per_vector=4, num_steps=16,
        total_env_steps=128, run_dir=tmp_path / "run",
    )  # fmt: skip
    assert "2 vectors for 2 workers. A worker" in capsys.readouterr().out
