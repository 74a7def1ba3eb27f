"""Advantages as minibatches have them, and values beside rewards whose scale drifts."""

import pytest
import torch

from headrace.algos.targets import Cuts, minibatches, values
from headrace.distributed.ranks import SINGLE_RANK
from headrace.models.policy import Network
from tests.support import inline, plan_for, policies_for, short_cartpole


def rows_of(advantage, target):
    count = len(advantage)
    return {
        "obs": torch.zeros(count, 1), "advantage": advantage, "target": target,
        "valid": torch.ones(count, dtype=torch.bool),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("deviation", "expected"),
    [(2.0, 1.0), (0.06, 1.0), (0.01, 0.2), (0.0, 0.0)],
)
def test_advantages_that_are_noise_are_not_scaled_up(deviation, expected):
    """Beside value targets of deviation 1; both come with an offset."""
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    targets = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(8)
    rows = rows_of(3 + deviation * signs, 5 + targets)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    index = torch.stack([2 * order[:8], 2 * order[:8] + 1], -1).flatten()
    whole = minibatches(rows, None, SINGLE_RANK, normalize_advantage=True)[0]
    torch.testing.assert_close(whole["advantage"], expected * signs, atol=1e-4, rtol=1e-4)
    cut = Cuts(index.unsqueeze(0), None, 1)
    part = minibatches(rows, cut, SINGLE_RANK, normalize_advantage=True)[0]
    assert part["advantage"].mean() == pytest.approx(0.0, abs=1e-4)
    plain = minibatches(rows, None, SINGLE_RANK, normalize_advantage=False)[0]
    assert torch.equal(plain["advantage"], rows["advantage"])


def test_values_follow_the_scale_of_rewards():
    network = Network(normalize_reward=True)
    plan = plan_for(short_cartpole, num_steps=32, num_envs=2, network=network)
    policies = policies_for(plan)
    collector = inline(plan)
    collector.publish(policies, 0)
    (fragment,) = collector.collect().fragments
    collector.close()
    (policy,) = policies.values()
    normalizer = policy.normalize_reward
    normalizer.update(torch.tensor([0.0, 6.0] * 4))  # of deviation 3
    assert float(normalizer.drift) == 1.0  # no values have been learned before
    with torch.no_grad():
        before = values(policy, fragment, None)
    normalizer.update(torch.tensor([3 - 63**0.5, 3 + 63**0.5] * 4))  # all: of 6
    assert float(normalizer.drift) == pytest.approx(0.5)
    assert float(policy.scaled(torch.ones(1))) == pytest.approx(1 / 6)
    with torch.no_grad():
        after = values(policy, fragment, None)
    for old, new in zip(before, after, strict=True):
        assert old.abs().sum() > 0
        torch.testing.assert_close(new, 0.5 * old)
    normalizer.update(torch.tensor([-3.0, 9.0]))  # of the deviation that there is
    assert float(normalizer.drift) == pytest.approx(1.0)
