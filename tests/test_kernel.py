"""Kernel environments: the same functions interpreted, compiled, and on a (simulated) GPU."""

import numpy as np
import pytest
import torch

from headrace.spec import Agents
from tests.kernel_support import (
    Ring,
    act_at_random,
    assert_equal,
    contents,
    played,
    run,
    vector_of,
)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("parts", [(), (Agents(0, 2), Agents(2, 1)), (Agents(2, 1), Agents(0, 2))])
def test_a_game_is_the_same_whatever_runs_it(target, parts):
    reference = played(Ring(), 3, 12, "python", parts=parts)
    assert_equal(played(Ring(), 3, 12, target, parts=parts), reference)
    fragments, episodes = reference[1]
    ends = torch.cat([found["terminated"].flatten() for found in fragments])
    cuts = torch.cat([found["truncated"].flatten() for found in fragments])
    assert ends.any()
    assert cuts.any()
    assert episodes


def test_a_constant_may_be_a_table():
    fragments, _ = played(Ring(), 200, 12, "cpu", num_fragments=1)[0]
    paid = set(fragments[0]["reward"].flatten().tolist())
    assert {1, 4, 9} < paid  # alone, two in a cell, all three
    assert paid <= {0, 1, 4, 9, 1 - 10, 4 - 10, 9 - 10}  # the bomb costs 10


def test_a_world_goes_on_where_it_was_kept():
    first, fragments = vector_of(Ring(), 5, 12)
    act_at_random(fragments, first.spec, np.random.default_rng(1))
    run(first, fragments)
    kept = first.state() | first.obs()
    assert "crowd" not in kept
    second, others = vector_of(Ring(), 5, 12)
    for fragment, other in zip(fragments, others, strict=True):
        other.action.copy_(fragment.action)
    second.restore(kept)
    assert run(second, others) == run(first, fragments)
    assert_equal([([contents(f) for f in fragments], 0)], [([contents(f) for f in others], 0)])


def test_threads_share_the_environments_out():
    alone, shared = (played(Ring(), 7, 20, "cpu", num_threads=n) for n in (1, 3))
    assert_equal(shared, alone)
