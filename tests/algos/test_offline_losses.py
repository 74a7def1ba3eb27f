"""The losses of BC, TD3+BC, CQL and IQL by hand."""

import math

import pytest
import torch

from headrace.algos.critics.shared import critics_loss
from headrace.algos.offline import bc, cql, iql, td3_bc
from headrace.models.critics.heads import SquashedGaussian
from tests.algos.test_critics import Critic, modules_of, rows_of


def test_td3_bc_improves_values_and_stays_near_recorded_actions():
    """Eq. 3: λ Q(s, π(s)) - (π(s) - a)², λ = α / mean |Q|; and so in parts of a minibatch."""
    modules, config = modules_of("td3bc", value_scale=2.5)
    policy, rows = modules["policy"], rows_of(4)
    critics = Critic([4.0, -2.0, 1.0, 1.0])
    total, metrics = td3_bc.actor_loss(policy, rows, config, critics=critics)
    with torch.no_grad():
        action = policy.head.mode(policy(rows["obs"])[0])
    distance = (action - rows["action"]).square().mean(-1)
    expected = distance.mean() - 2.5 / 2.0 * 1.0  # mean |Q| = 2, mean Q = 1
    assert float(total.detach()) == pytest.approx(float(expected))
    assert float(metrics["distance"]) == pytest.approx(float(distance.mean()))
    half = {name: column[:2] for name, column in rows.items()}  # weights that add up to 1/2
    of_half, _ = td3_bc.actor_loss(policy, half, config, critics=Critic([4.0, -2.0]))
    expected = 0.5 * (distance[:2].mean() - 2.5 / 3.0 * 1.0)
    assert float(of_half.detach()) == pytest.approx(float(expected))


def test_cloning_raises_the_probability_of_recorded_actions():
    modules, config = modules_of("bc")
    policy, rows = modules["policy"], rows_of(4)
    log_prob, entropy, _ = policy.evaluate(rows["obs"], rows["action"])
    total, metrics = bc.loss(policy, rows, config)
    assert float(total.detach()) == pytest.approx(float(-log_prob.detach().mean()))
    assert float(metrics["entropy"]) == pytest.approx(float(entropy.detach().mean()))


def test_cql_lowers_values_of_actions_that_were_not_recorded():
    """Eq. 4: log (1/K Σ_k exp Q(s, a_k) / p(a_k)) - Q(s, a): mean of rows, sum of critics."""
    modules, config = modules_of("cql", conservative_weight=3.0)
    critics, rows = modules["critics"], rows_of(2)
    rows |= {"seen": rows["obs"], "target": torch.tensor([[1.0], [2.0]])}
    rows |= {"others": torch.rand(2, 3, 2) * 2 - 1, "density": torch.randn(2, 3)}
    total, metrics = cql.conservative_loss(critics, rows, config)
    plain, _ = critics_loss(critics, rows, config)
    with torch.no_grad():
        gap = 0.0
        for row in range(2):
            seen = rows["seen"][row : row + 1]
            recorded = critics(seen, rows["action"][row : row + 1])
            others = [critics(seen, rows["others"][row, k : k + 1]) for k in range(3)]
            for e in range(len(recorded)):
                terms = [
                    math.exp(float(of[e]) - float(rows["density"][row, k]))
                    for k, of in enumerate(others)
                ]
                gap += (math.log(sum(terms) / 3) - float(recorded[e])) / 2
    assert float(metrics["conservative_gap"]) == pytest.approx(gap, rel=1e-4)
    assert float(total.detach() - plain.detach()) == pytest.approx(3.0 * gap, rel=1e-4)


def test_cql_s_other_actions_are_uniform_and_the_policy_s_own_here_and_next():
    modules, config = modules_of("cql", num_sampled_actions=2)
    policy = modules["policy"]
    rows = rows_of(3, num_noise=20)
    found = cql.other_actions(policy, rows, config)
    assert found["others"].shape == (3, 6, 2)
    assert float(found["others"][:, :2].min()) < -0.3
    assert 0.3 < float(found["others"][:, :2].max()) < 1.0
    assert found["density"][:, :2].tolist() == [[pytest.approx(-2 * math.log(2))] * 2] * 3
    head = policy.head
    assert isinstance(head, SquashedGaussian)
    for part, name in ((1, "obs"), (2, "next_obs")):
        params = policy(rows[name])[0].detach().unsqueeze(1).expand(-1, 2, -1)
        actions = found["others"][:, 2 * part : 2 * part + 2]
        log_prob, _ = head.evaluate(params, actions)
        density = found["density"][:, 2 * part : 2 * part + 2]
        torch.testing.assert_close(density.detach(), log_prob.detach(), rtol=1e-3, atol=1e-3)


def test_iql_s_value_is_an_expectile_and_its_policy_weighs_recorded_actions():
    modules, config = modules_of("iql", expectile=0.7, advantage_scale=3.0)
    rows = rows_of(2) | {"seen": None, "best": torch.tensor([3.0, 1.0])}

    def value(seen):
        return torch.tensor([2.0, 2.0])  # 1 below, and 1 above

    total, _ = iql.value_loss(value, rows, config)
    assert float(total) == pytest.approx((0.7 * 1 + 0.3 * 1) / 2)
    rows["best"] = torch.tensor([4.0, 1.0])
    assert float(iql.value_loss(value, rows, config)[0]) == pytest.approx((0.7 * 4 + 0.3 * 1) / 2)
    policy = modules["policy"]
    rows["importance"] = torch.tensor([1.0, 3.0])
    with torch.no_grad():
        action = policy.head.mode(policy(rows["obs"])[0])
    distance = (action - rows["action"]).square().sum(-1)
    total, _ = iql.actor_loss(policy, rows, config)
    expected = (distance * rows["importance"]).mean()
    assert float(total.detach()) == pytest.approx(float(expected))


def test_iql_s_targets_are_of_v_and_its_weights_of_advantages():
    modules, config = modules_of("iql", advantage_scale=3.0)
    losses = ALGORITHM.losses(modules, config)
    rows = rows_of(3)
    rows |= {"discount": torch.tensor([0.5, 0.9, 0.0])}
    policy, value, target = (modules[name] for name in ("policy", "value", "target"))
    with torch.no_grad():
        after = value(policy.normalized(rows["next_obs"]))
        v = value(policy.normalized(rows["obs"]))
        least = target(policy.normalized(rows["obs"]), rows["action"]).amin(0).squeeze(-1)
        goal = losses["critics"].prepare(rows)["target"][:, 0]
        importance = losses["policy"].prepare(rows)["importance"]
    torch.testing.assert_close(goal, rows["reward"] + rows["discount"] * after)
    torch.testing.assert_close(importance, (3.0 * (least - v)).exp().clamp(max=100.0))


ALGORITHM = iql.IQLAlgorithm()
