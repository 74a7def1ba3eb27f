"""Kernel environments: the same functions interpreted, compiled, and on a (simulated) GPU."""

import pytest
import torch

from headrace.spec import Agents
from tests.kernel_support import Ring, assert_equal, played


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


def test_threads_share_the_environments_out():
    alone, shared = (played(Ring(), 7, 20, "cpu", num_threads=n) for n in (1, 3))
    assert_equal(shared, alone)
