"""Whoever plays the games of a league, and whatever is lost: the same batches, to the bit."""

import itertools
import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from headrace.batch import Fragment, each
from headrace.collectors.api import LeaguePlan
from headrace.collectors.device import DeviceCollector
from headrace.envs.games.seats import LATEST, Pool
from headrace.meter import Meter
from tests.ladder.test_collect import equal, finals
from tests.leagues.support import (
    GRID,
    POOL,
    RPS,
    SMALL_GRID,
    Strangers,
    Takes,
    Trio,
    copied,
    league_plan,
)
from tests.marks import repeats
from tests.support import inline, never, policies_for, workers

POOLS = [
    POOL,
    Pool((1, 3), (3.0, 1.0), 0.1, ("",) * 9),
    Pool((7, 5, 2), (1.0,) * 3, 0.5, ("",) * 9),
]
GAMES = {
    "at once": (Trio, {}),
    "in turns": (Takes, {}),
    "kernel, two policies": (GRID, SMALL_GRID),
    "kernel, one policy": (RPS, {}),
}


def plan_of(game, lag=0, num_envs=6, envs_per_vector=2, num_steps=8, **more):
    env, kwargs = GAMES[game]
    sizes = {"num_envs": num_envs, "envs_per_vector": envs_per_vector, "num_steps": num_steps}
    return league_plan(env, POOLS[0], kwargs=kwargs, lag=lag, **sizes, **more)


def on_device(plan, state=None):
    return DeviceCollector(plan, torch.device("cpu"), Meter(), never, state)


def played(collector, plan, batches, disturb=lambda k: None, first=0, pools=POOLS):
    """What the loop does, with other weights and another pool after each batch."""
    collector.publish(policies_for(plan, seed=first), first)
    for k in range(first, first + batches):
        collected = collector.collect()
        yield [copied(of) for of in collected.fragments], sorted(collected.episodes)
        collector.release_batch(more=k + 1 < first + batches)
        disturb(k)
        collector.publish(policies_for(plan, seed=k + 1), k + 1)
        collector.set_pool(pools[(k + 1) % 3])
    collector.halt()
    collector.close()


def assert_met(of_batches):
    """All members were met, and the learned policies themselves."""
    met = {of.match[0] if of.match else LATEST for _, episodes in of_batches for of in episodes}
    assert met == {LATEST, *(member for pool in POOLS for member in pool.members)}


def assert_same_batches(one, other):
    for (fragments, episodes), (others, other_episodes) in zip(one, other, strict=True):
        assert episodes == other_episodes
        for a, b in zip(fragments, others, strict=True):
            equal(a, b)


SOME = [
    ("in turns", 0, 2), ("at once", 1, 3), ("kernel, two policies", 1, 3),
    ("kernel, one policy", 0, 1), ("in turns", 1, 1), ("at once", 0, 1),
]  # fmt: skip
ALL = [*SOME, *(of for of in itertools.product(GAMES, (0, 1), (1, 2, 3)) if of not in SOME)]


@repeats(("game", "lag", "num_workers"), ALL, keep=2, few=len(SOME))
def test_inline_equals_workers(game, lag, num_workers):
    plan = plan_of(game, lag)
    expected = list(played(inline(plan), plan, 9))
    assert_met(expected)
    assert_same_batches(expected, list(played(workers(plan, num_workers), plan, 9)))


KERNELS = ["kernel, two policies", "kernel, one policy"]


@repeats("game", KERNELS)
def test_the_device_collector_makes_what_a_worker_makes(game):
    plan = plan_of(game, envs_per_vector=6)
    expected = list(played(workers(plan, 1), plan, 9))
    assert_met(expected)
    assert_same_batches(expected, list(played(on_device(plan), plan, 9)))


def joined(fragments, num_sides):
    """The fragments of vectors as one of each side, as a device collector has them."""
    for i in range(num_sides):
        of_side = fragments[i::num_sides]
        columns = {
            name: torch.cat([getattr(of, name) for of in of_side], dim)
            for name, dim in (
                ("action", 1), ("reward", 1), ("terminated", 1), ("truncated", 1), ("valid", 1),
                ("env_id", 0), ("policy_version", 1),
            )
        }  # fmt: skip
        obs = each(lambda *o: torch.cat(o, 1), *(of.obs for of in of_side))
        stored = {
            name: torch.cat([of.stored_outputs[name] for of in of_side], 1)
            for name in of_side[0].stored_outputs
        }
        yield columns, obs, stored


@repeats("game", reversed(KERNELS))
def test_valid_rows_on_the_device_are_those_of_three_workers(game):
    """Of small vectors, products may be rounded in another way."""
    plan = plan_of(game)
    num_sides, valid, rows = len(plan.parts), 0, 0
    for (on, ended), (off, ended_off) in zip(
        played(on_device(plan), plan, 4), played(workers(plan, 3), plan, 4), strict=True
    ):
        assert ended == ended_off
        for one, (columns, obs, stored) in zip(on, joined(off, num_sides), strict=True):
            is_valid = one.valid
            assert torch.equal(is_valid, columns["valid"])
            assert torch.equal(one.env_id, columns["env_id"])
            for name in ("action", "reward", "terminated", "truncated", "policy_version"):
                assert torch.equal(getattr(one, name)[is_valid], columns[name][is_valid]), name
            assert torch.equal(one.obs[:-1][is_valid], obs[:-1][is_valid])
            for name, values in stored.items():
                found = one.stored_outputs[name][is_valid]
                torch.testing.assert_close(found, values[is_valid], rtol=1e-5, atol=1e-6)
            valid, rows = valid + int(is_valid.sum()), rows + is_valid.numel()
    assert 0.3 * rows < valid < 0.9 * rows


def pid_of(collector, i):
    return collector.workers[i].child.process.pid


@pytest.mark.fault_a
@repeats("lag", [1, 0], ids=["while it makes the next one", "between batches"])
@repeats("game", ["in turns", "kernel, two policies", "at once"])
def test_a_killed_worker_is_replaced_and_the_batches_are_the_same(game, lag):
    plan = plan_of(game, lag)
    expected, told = list(played(inline(plan), plan, 7)), []
    collector = workers(plan, 2, say=told.append)

    def disturb(k):
        if k in (1, 4):
            os.kill(pid_of(collector, k % 2), signal.SIGKILL)

    assert_same_batches(expected, list(played(collector, plan, 7, disturb)))
    assert collector.ledger.restarts == 2 == len(told)
    assert collector.ledger.lost == 0


KINDS = {"inline": inline, "device": on_device}


@pytest.mark.parametrize(
    ("kind", "game"),
    [("inline", "at once"), ("inline", "in turns"), ("inline", "kernel, two policies"),
     ("device", "kernel, two policies")],
)  # fmt: skip
def test_restored_in_the_middle_of_episodes_it_goes_on_to_the_bit(kind, game):
    """Against members that are in the pool no more, too."""
    make, size = KINDS[kind], 6 if kind == "device" else 2
    plan = plan_of(game, envs_per_vector=size, num_steps=3)
    whole = list(played(make(plan), plan, 12))
    for stop in (4, 7):
        collector, state = make(plan), {}
        for k, _ in enumerate(played(collector, plan, stop)):
            if k == stop - 1:
                collector.release_batch(more=False)
                state = {name: np.array(array) for name, array in collector.state().items()}
        members = np.concatenate([a for n, a in state.items() if n.endswith("seats.member")])
        steps = np.concatenate([a for n, a in state.items() if n.endswith("episode_step")])
        pool = POOLS[stop % 3]
        assert set(members[steps > 0].tolist()) - {LATEST, *pool.members}
        plan_now = replace(plan, league=replace(plan.league, pool=pool))
        restored = make(plan_now, state=state)
        assert restored.restored.new_episode == 0
        rest = list(played(restored, plan_now, 12 - stop, first=stop))
        assert_same_batches(whole[stop:], rest)


@dataclass(frozen=True)
class FromData:
    """A `LoadMember` on a machine that sees no directories."""

    load: Strangers

    def __call__(self, pool, member):
        assert pool.data[member] == bytes([member]), "no policy has come with the pool"
        return self.load(pool, member)


def with_data(pool, members):
    """What `with_policies` does with real ones."""
    return replace(pool, data=pool.data | {member: bytes([member]) for member in members})


@pytest.mark.parametrize("game", ["in turns", "kernel, two policies"])
def test_workers_that_see_no_directory_get_the_policies_of_those_who_play(game):
    """Of the pool, and where a worker begins also of those who are in it no more."""
    env, kwargs = GAMES[game]
    plan = league_plan(env, POOLS[0], kwargs=kwargs, num_envs=4, envs_per_vector=2, num_steps=3)
    whole = list(played(inline(plan), plan, 9))
    load = FromData(plan.league.load)
    # Each has the policies of the pool before it, too, as those of a run
    pools = [with_data(pool, POOLS[k - 1].members + pool.members) for k, pool in enumerate(POOLS)]
    league = LeaguePlan(4, load, pools[0], with_data)
    state, told, restarted = {}, [], []
    for begin in (0, 4):
        # As a run's: the first pool is that of its last checkpoint
        plan_now = replace(plan, league=replace(league, pool=pools[begin % 3]))
        collector = workers(plan_now, 2, state=state, say=told.append)

        def disturb(k, collector=collector):
            if k in (2, 6):
                os.kill(pid_of(collector, k // 4), signal.SIGKILL)
                members = [a for n, a in collector.state().items() if n.endswith("seats.member")]
                outside = set(np.concatenate(members).tolist()) - {LATEST}
                restarted.append(outside - set(pools[(k + 1) % 3].members))

        batches = played(collector, plan, 9 - begin, disturb, first=begin, pools=pools)
        for k, batch in enumerate(batches, begin):
            assert_same_batches([whole[k]], [batch])
            if begin == 0 and k == 3:
                collector.release_batch(more=False)
                state = {name: np.array(array) for name, array in collector.state().items()}
                batches.close()
                collector.close()
                break
    assert len(told) == 2
    assert all(restarted), restarted


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_count_is_made_again(kind):
    plan = plan_of("kernel, two policies", envs_per_vector=6, num_steps=4)
    collector = KINDS[kind](plan)
    collector.publish(policies_for(plan), 0)
    for _ in range(3):
        collector.collect()
        collector.release_batch(more=True)
    first = [copied(of) for of in collector.collect().fragments]
    collector.discard_batch()
    if kind == "inline":  # a run ends then, and goes on from the state
        plan = replace(plan, league=replace(plan.league, pool=POOLS[0]))
        again = inline(plan, state=collector.state())
        collector.close()
        collector = again
        collector.publish(policies_for(plan), 0)
    for one, other in zip(first, collector.collect().fragments, strict=True):
        equal(one, other)
    assert not all(bool(of.valid.all()) for of in first)
    collector.close()


def test_fragments_have_final_observations_of_learned_and_other_rows():
    """Else the comparisons above would say little of them."""
    plan = plan_of("at once")
    fragments = [of for batch, _ in played(inline(plan), plan, 3) for of in batch]
    assert all(isinstance(of, Fragment) for of in fragments)
    count = sum(len(finals(of)[1]) for of in fragments)
    valid = sum(int(of.valid[step, row]) for of in fragments
                for step, row in zip(*finals(of)[1:], strict=True))  # fmt: skip
    assert 10 < valid < count - 10
