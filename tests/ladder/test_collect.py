"""Rung 2: inline and workers make the same batches, bit for bit, whoever steps what."""

import dataclasses

import gymnasium as gym
import pytest
import torch

from headrace.batch import each
from headrace.models.policy import Network
from tests.marks import repeats
from tests.support import (
    Nested,
    inline,
    plan_for,
    policies_for,
    short_cartpole,
    workers,
)


def equal(a, b):
    """Every array of two fragments, of the final observations the part that was written."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "stored_outputs":
            assert x.keys() == y.keys()
            for name in x:
                assert torch.equal(x[name], y[name]), name
        elif field.name == "obs":
            assert_equal_obs(x, y)
        elif not field.name.startswith("final_"):
            assert torch.equal(x, y), field.name
    for x, y in zip(finals(a), finals(b), strict=True):
        assert_equal_obs(x, y)


def assert_equal_obs(a, b):
    each(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), a, b)


def finals(fragment):
    """The final observations that there are: kernel environments have places to spare."""
    obs, step, row = fragment.finals()
    used = step < fragment.num_steps
    return each(lambda o: o[used], obs), step[used], row[used]


def both(plan, num_workers, batches=4):
    """Collect from both, with weights that change in between."""
    one, many = inline(plan), workers(plan, num_workers)
    try:
        for version in range(batches):
            policies = policies_for(plan, seed=version)
            for collector in (one, many):
                collector.publish(policies, version)
            yield one.collect(), many.collect()
    finally:
        one.close()
        many.close()


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_inline_equals_workers(num_workers):
    plan = plan_for(short_cartpole, num_steps=40, num_envs=6, envs_per_vector=2)
    finals = 0
    for a, b in both(plan, num_workers):
        assert len(a.fragments) == len(b.fragments) == 3
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
            finals += int(x.num_final)
        assert sorted(a.episodes) == sorted(b.episodes)
    assert finals > 10, "truncated episodes must be among them"


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_inline_equals_workers_for_a_kernel_environment(num_workers):
    plan = plan_for(
        "headrace/CartPole-v1",
        native=True,
        kwargs={"max_episode_steps": 15},
        num_steps=40,
        num_envs=6,
        network=Network(normalize_obs=True),
    )
    cuts = ends = 0
    for a, b in both(plan, num_workers):
        assert len(a.fragments) == len(b.fragments) == 3
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
            cuts += len(finals(x)[1])
            ends += int(x.terminated.sum())
        assert sorted(a.episodes) == sorted(b.episodes)
        assert a.episodes
    assert cuts > 10
    assert ends > 10


def test_inline_equals_workers_with_continuous_actions_and_normalizers():
    plan = plan_for(
        lambda: gym.make("Pendulum-v1", max_episode_steps=15),  # a lambda reaches workers too
        num_steps=20,
        num_envs=4,
        network=Network(normalize_obs=True, shared_trunk=True),
    )
    for a, b in both(plan, 2):
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_inline_equals_workers_with_a_recurrent_core(core, num_workers):
    plan = plan_for(short_cartpole, num_envs=6, network=Network(core=core))
    for batches, (a, b) in enumerate(both(plan, num_workers)):
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
            assert x.recurrent_state[0].any() == (batches > 0)


@repeats("num_workers", [2, 1])
def test_inline_equals_workers_with_nested_observations_and_actions(num_workers):
    plan = plan_for(Nested, num_envs=6, network=Network(normalize_obs=True))
    ends = 0
    for a, b in both(plan, num_workers):
        for x, y in zip(a.fragments, b.fragments, strict=True):
            equal(x, y)
            ends += int(x.terminated.sum() + x.truncated.sum())
        assert sorted(a.episodes) == sorted(b.episodes)
    assert ends > 10


def test_a_fragment_goes_on_where_the_last_one_ended():
    plan = plan_for(short_cartpole, num_steps=8, num_envs=2)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    (first,) = collector.collect().fragments
    last_obs = first.obs[-1].clone()
    collector.publish(policies_for(plan), 1)
    (second,) = collector.collect().fragments
    assert torch.equal(second.obs[0], last_obs)
    assert second.policy_version.unique().tolist() == [1]
    collector.close()


def test_the_vector_size_decides_bits_and_the_seed_decides_everything():
    def first_batch(**kwargs):
        plan = plan_for(short_cartpole, num_envs=4, **kwargs)
        collector = inline(plan)
        collector.publish(policies_for(plan), 0)
        rewards = torch.cat([f.obs for f in collector.collect().fragments], 1)
        collector.close()
        return rewards

    assert torch.equal(first_batch(), first_batch())
    assert not torch.equal(first_batch(), first_batch(seed=4))
