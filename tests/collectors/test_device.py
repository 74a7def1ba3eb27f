"""The device collector: batches of environments that live where the learner is (here: the CPU)."""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import headrace
from headrace import device_seeding, seeding
from headrace.algos import targets
from headrace.batch import allocate, columns
from headrace.collectors.device import DeviceCollector
from headrace.envs.kernels.library.classic_control import CartPole
from headrace.errors import ConfigError, EnvError
from headrace.meter import Meter
from headrace.models.cuda_graph import CudaGraph
from headrace.models.policy import Network
from headrace.spec import Agents
from tests.envs.kernels.support import Ring, run, vector_of
from tests.ladder.test_collect import equal
from tests.ladder.test_resume import assert_same
from tests.marks import repeats
from tests.support import inline, never, plan_for, policies_for, policy_for, policy_plan, workers

CPU = torch.device("cpu")


class ShortCartPole(CartPole):
    """Cut off after 9 steps: terminations and truncations in every batch."""

    max_episode_steps = 9


def on_device(plan, stop=never, state=None):
    return DeviceCollector(plan, CPU, Meter(), stop, state)


SEEING = {"shared_critic": True, "agent_ids": True}


@pytest.mark.parametrize(
    ("env", "core", "more"),
    [(ShortCartPole, "none", {}), (ShortCartPole, "gru", {}), (Ring, "none", SEEING)],
)
def test_the_device_collector_makes_what_the_others_make(env, core, more):
    network = Network(core=core, hidden_sizes=(8,), core_size=8)
    plan = plan_for(
        env, num_envs=6, envs_per_vector=6, num_steps=20, network=network, native=True, **more
    )
    collectors = [on_device(plan), inline(plan), workers(plan, 1)]
    finals = 0
    try:
        for version in range(3):
            policy = policy_for(plan, seed=version)
            batches = []
            for collector in collectors:
                collector.publish({"default": policy}, version)
                batches.append(collector.collect())
                collector.release_batch(more=True)
            for other in batches[1:]:
                equal(batches[0].fragments[0], other.fragments[0])
                assert batches[0].episodes == sorted(other.episodes)
                assert batches[0].env_steps == other.env_steps == 120
            _, step, _ = batches[0].fragments[0].finals()
            finals += int((step < 20).sum())
    finally:
        for collector in collectors:
            collector.close()
    assert finals > 10, "truncated episodes must be among them"


def test_a_batch_that_does_not_count_is_made_again():
    plan = plan_for(ShortCartPole, num_steps=12, native=True)
    collector, other = on_device(plan), on_device(plan)
    policy = policy_for(plan)
    for one in (collector, other):
        one.publish({"default": policy}, 0)
        one.collect()
    first = collector.collect()
    kept = {name: getattr(first.fragments[0], name).clone() for name in ("obs", "reward", "action")}
    collector.discard_batch()
    assert collector.ledger.lost == first.env_steps
    state, expected = collector.state(), other.state()
    assert state.keys() == expected.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name])
    again = collector.collect()
    for name, tensor in kept.items():
        assert torch.equal(getattr(again.fragments[0], name), tensor)


def test_a_stop_is_seen_before_a_batch():
    stopped = []
    plan = plan_for(ShortCartPole, native=True)
    collector = on_device(plan, stop=lambda: bool(stopped))
    collector.publish(policies_for(plan), 0)
    assert collector.collect() is not None
    stopped.append(True)
    assert collector.collect() is None


SETTINGS = {
    "num_envs": 6, "num_steps": 16, "seed": 5, "quiet": True, "vectorization": "native",
    "schedule_env_steps": 6 * 16 * 8,
    "algo": headrace.PPO(lr=3e-3, lr_schedule="linear", num_minibatches=2),
}  # fmt: skip


@repeats("core", ["none", "lstm"])
def test_stopped_and_resumed_is_uninterrupted(tmp_path, core):
    network = headrace.Network(core=core, normalize_obs=True, normalize_reward=True)
    settings = SETTINGS | {"network": network}
    whole = headrace.train(
        ShortCartPole, run_dir=tmp_path / "whole", total_env_steps=6 * 96, **settings
    )
    headrace.train(ShortCartPole, run_dir=tmp_path / "part", total_env_steps=3 * 96, **settings)
    resumed = headrace.resume(
        tmp_path / "part", env=ShortCartPole, total_env_steps=6 * 96, quiet=True
    )
    assert_same(whole, resumed)


@pytest.mark.more
def test_two_learners_with_half_the_environments_each_learn_the_same(tmp_path):
    settings = SETTINGS | {"total_env_steps": 96, "schedule_env_steps": 0}
    one, two = (
        headrace.train(
            ShortCartPole, run_dir=tmp_path / str(n), num_learners=n, **settings
        ).policy.module.state_dict()
        for n in (1, 2)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.more
@repeats(("before", "after"), [(1, 2), (2, 1)])
def test_other_learners_go_on_with_the_episodes_under_way(tmp_path, capsys, before, after):
    settings = SETTINGS | {"total_env_steps": 96, "num_learners": before, "schedule_env_steps": 0}
    headrace.train(ShortCartPole, run_dir=tmp_path / "r", **settings)
    headrace.resume(tmp_path / "r", env=ShortCartPole, total_env_steps=2 * 96, num_learners=after)
    assert "6 restored, 0 replayed, 0 begun anew" in capsys.readouterr().out


def test_a_stop_ends_a_batch_and_nothing_of_it_counts():
    plan, asked = plan_for(ShortCartPole, num_steps=12, native=True), []

    def after_17():
        asked.append(None)
        return len(asked) > 17

    collector, other = on_device(plan, stop=after_17), on_device(plan)
    policy = policy_for(plan)
    for one in (collector, other):
        one.publish({"default": policy}, 0)
        assert one.collect() is not None
    assert collector.collect() is None
    assert (collector.ledger.collected, collector.ledger.lost) == (16 * 4 - 4, 12)
    state, expected = collector.state(), other.state()
    assert state.keys() == expected.keys()
    for name, array in state.items():
        np.testing.assert_array_equal(array, expected[name])


def test_only_the_last_episodes_are_told_and_all_are_counted(tmp_path):
    run = headrace.train(
        ShortCartPole, run_dir=tmp_path / "r", total_env_steps=64 * 64, num_envs=64, num_steps=64,
        vectorization="native", quiet=True,
    )  # fmt: skip
    assert run.summary["episodes"] >= 64 * 7
    assert run.summary["mean_return"] == pytest.approx(9, abs=0.5)


def test_places_for_final_observations_that_were_not_needed_change_nothing():
    plan = plan_for(ShortCartPole, num_envs=5, num_steps=4, native=True)
    policy, (n, T) = policy_for(plan), (5, 4)
    [acting] = plan.policies.values()
    one, other = (
        allocate(
            columns(
                plan.spec,
                acting.stored_outputs,
                T,
                n,
                capacity=capacity,
            )
        )
        for capacity in (3, 10)
    )
    generator = torch.Generator().manual_seed(1)
    for name in ("obs", "reward"):
        tensor = torch.randn(getattr(one, name).shape, generator=generator)
        for fragment in (one, other):
            getattr(fragment, name).copy_(tensor)
    value, finals = torch.randn(T, n, generator=generator), torch.randn(3, 4, generator=generator)
    step, row = torch.tensor([0, 2, 3]), torch.tensor([4, 1, 1])
    for fragment, place in ((one, torch.arange(3)), (other, torch.tensor([7, 2, 4]))):
        fragment.terminated.zero_()
        fragment.truncated.zero_()
        fragment.truncated[step, row] = True
        fragment.stored_outputs["value"].copy_(value)
        fragment.final_step.fill_(T)
        fragment.final_row.zero_()
        fragment.final_obs.fill_(float("nan"))
        fragment.final_step[place], fragment.final_row[place] = step, row
        fragment.final_obs[place] = finals
        fragment.num_final.fill_(len(fragment.final_step))
    found, expected = (
        targets.advantages(policy, fragment, 0.9, 0.8)["advantage"] for fragment in (other, one)
    )
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("first_step", "draws"), [(0, 1), (7, 3), (2**33, 1), (5, 0)])
def test_noise_on_a_device_is_the_same(first_step, draws):
    ids = np.array([0, 5, 2**31 + 7])
    expected = seeding.action_noise(3, ids, first_step, 9, draws)
    found = device_seeding.action_noise(3, torch.from_numpy(ids), first_step, 9, draws)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("num_epochs", [1, 4, 6])
def test_permutations_on_a_device_are_the_same(num_epochs):
    ids = np.arange(50)
    expected = seeding.permutations(3, ids, 2**32 + 1, num_epochs, 32)
    found = device_seeding.permutations(3, torch.from_numpy(ids), 2**32 + 1, num_epochs, 32)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("env", "more"), [(ShortCartPole, {}), (Ring, SEEING)])
def test_a_graph_that_is_replayed_makes_what_was_made_step_by_step(env, more):
    device = torch.device("cuda")
    plan = plan_for(env, num_envs=256, envs_per_vector=256, num_steps=20, native=True, **more)
    eager, replayed = (DeviceCollector(plan, device, Meter(), never) for _ in range(2))
    assert isinstance(replayed._roll_out, CudaGraph)
    eager._roll_out = eager._act
    policy = policy_for(plan).to(device)
    for version in range(4):
        for parameter in policy.parameters():
            parameter.data.add_(0.01)
        for collector in (eager, replayed):
            collector.publish({"default": policy}, version)
        one, other = (collector.collect() for collector in (eager, replayed))
        equal(one.fragments[0], other.fragments[0])
        assert one.episodes == other.episodes


def test_several_policies_make_one_fragment_each():
    plan = plan_for(Ring, num_envs=3, envs_per_vector=3, num_steps=10, native=True)
    parts = [Agents(0, 2), Agents(2, 1)]
    network = Network(hidden_sizes=(8,))
    policies = {
        name: policy_plan(plan.spec, network, part, learns=name == "a")
        for name, part in zip("ab", parts, strict=True)
    }
    collector = DeviceCollector(replace(plan, policies=policies), CPU, Meter(), never)
    together = on_device(plan)
    policy = policy_for(plan)
    collector.publish({"a": policy, "b": policy}, 0)
    together.publish({"default": policy}, 0)
    for _ in range(2):
        found, (whole,) = collector.collect(), together.collect().fragments
        for fragment, part in zip(found.fragments, parts, strict=True):
            rows = [3 * e + i for e in range(3) for i in range(part.first, part.first + part.size)]
            for name in ("obs", "action", "reward", "terminated", "truncated", "valid"):
                assert torch.equal(getattr(fragment, name), getattr(whole, name)[:, rows]), name
        assert found.agent_steps == int(whole.valid.sum()) < 90
        assert [len(of.stored_outputs) for of in found.fragments] == [2, 0]
        assert all(len(episode.by_policy) == 2 for episode in found.episodes)


@pytest.mark.more
def test_a_run_goes_on_with_another_number_of_learners(tmp_path):
    headrace.train(ShortCartPole, run_dir=tmp_path / "r", total_env_steps=96, **SETTINGS)
    for goal, num_learners in ((192, 2), (288, 1)):
        run = headrace.resume(
            tmp_path / "r", env=ShortCartPole, total_env_steps=goal, num_learners=num_learners
        )
        assert run.summary["env_steps"] == goal


def test_all_environments_are_one_vector(tmp_path):
    with pytest.raises(
        ConfigError, match=r"of ShortCartPole all are stepped together.* one vector: all 6"
    ):
        headrace.train(
            ShortCartPole, run_dir=tmp_path / "r", envs_per_vector=2, total_env_steps=96,
            **SETTINGS,
        )  # fmt: skip


class Dividing(Ring):
    """The last agent is paid nothing that is a number once, in the second step of an episode."""

    @staticmethod
    def pay(w, e, i):
        w.reward[e, i] = 1
        if i == 2 and w.step[e] == 2:
            w.reward[e, i] = math.nan


def test_who_got_what_is_not_finite_is_told_and_places_that_were_not_needed_are_not_looked_at():
    parts = [Agents(0, 2), Agents(2, 1)]
    for env, bad in ((Ring(), False), (Dividing(), True)):
        vector, fragments = vector_of(env, 3, 10, parts=parts)
        for fragment in fragments:
            fragment.final_obs.fill_(math.nan)
            fragment.action.zero_()
        told = r"\(step 2 of the fragment, env 0 of Dividing, agent 2, inline\)"
        with pytest.raises(EnvError, match=told) if bad else contextlib.nullcontext():
            run(vector, fragments)
        vector.close()
