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


def test_threads_share_the_environments_out():
    alone, shared = (played(Ring(), 7, 20, "cpu", num_threads=n) for n in (1, 3))
    assert_equal(shared, alone)
