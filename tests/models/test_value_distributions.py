"""C51 and quantiles: means, targets and losses, against loops and closed forms."""

import math

import pytest
import torch

from headrace.errors import ConfigError
from headrace.models.action_values.value_distributions import C51, MeanOnly, Quantiles


def projected(probability, reward, discount, atoms):
    """Algorithm 1 of Bellemare et al. 2017, one number at a time."""
    v_min, v_max = atoms[0], atoms[-1]
    width = (v_max - v_min) / (len(atoms) - 1)
    m = [0.0] * len(atoms)
    for p, z in zip(probability, atoms, strict=True):
        b = (min(max(reward + discount * z, v_min), v_max) - v_min) / width
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:
            m[lower] += p
        else:
            m[lower] += p * (upper - b)
            m[upper] += p * (b - lower)
    return m


def test_c51_projects_as_a_loop_does():
    torch.manual_seed(0)
    of = C51(7, -3.0, 5.0)
    outputs, reward = torch.randn(40, 7), 4 * torch.randn(40)
    discount = torch.rand(40).masked_fill(torch.rand(40) < 0.2, 0.0)
    reward[:3] = torch.tensor([5.0, -3.0, 9.0])  # on both ends, and beyond
    found = of.target(outputs, reward, discount)
    p, atoms = outputs.softmax(-1), of.atoms.tolist()
    for row in range(40):
        expected = projected(p[row].tolist(), float(reward[row]), float(discount[row]), atoms)
        assert found["target"][row].tolist() == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(found["target"].sum(-1), torch.ones(40))
    # The projection keeps the mean of what is not clipped.
    whole = found["clipped"] == 0
    assert 3 < whole.sum() < 37
    mean = reward + discount * of.mean(outputs)
    torch.testing.assert_close(found["target_mean"][whole], mean[whole], rtol=1e-5, atol=1e-5)
    assert float(found["clipped"][2]) == pytest.approx(1.0)


def test_returns_at_the_ends_of_any_range_have_probabilities():
    """Rounding may put v_max beyond the last atom: its probability would be negative."""
    for v_min in range(-50, 1):
        for v_max in range(1, 50):
            of = C51(51, float(v_min), float(v_max))
            reward = torch.tensor([v_min - 1.0, v_min, v_max, v_max + 1.0])
            found = of.target(torch.zeros(4, 51), reward, torch.zeros(4))
            assert (found["target"] >= 0).all()
            assert of.error(torch.zeros(4, 51), found).isfinite().all()


def test_c51_s_loss_is_least_at_its_target():
    of = C51(11, 0.0, 10.0)
    target = torch.rand(5, 11).softmax(-1)
    right = target.log()
    rows = {"target": target, "target_mean": target @ of.atoms}
    assert of.error(right, rows).tolist() == pytest.approx([0.0] * 5, abs=1e-6)
    wrong = right.clone()
    wrong[:, 0] += 1
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Categorical(probs=target), torch.distributions.Categorical(logits=wrong)
    )
    torch.testing.assert_close(of.error(wrong, rows), divergence, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(of.mean(right), rows["target_mean"])


def test_quantile_loss_as_a_loop_computes_it():
    torch.manual_seed(1)
    of = Quantiles(4)
    outputs, target = 2 * torch.randn(6, 4), 2 * torch.randn(6, 4)
    for row, found in enumerate(of.loss(outputs, target).tolist()):
        total = 0.0
        for i in range(4):
            for j in range(4):
                u = float(target[row, j] - outputs[row, i])
                huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                total += abs((i + 0.5) / 4 - (u < 0)) * huber / 4
        assert found == pytest.approx(total, rel=1e-5)


@pytest.mark.more
def test_quantiles_are_learned():
    """From draws of a known distribution; the Huber part of the loss moves them a little."""
    torch.manual_seed(2)
    of = Quantiles(5)
    outputs = torch.zeros(1, 5, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.3)
    draws = 100 * torch.rand(2000, 5)  # uniform: quantiles at 10, 30, 50, 70, 90
    for _ in range(800):
        optimizer.zero_grad()
        of.loss(outputs.expand(2000, -1), draws).mean().backward()
        optimizer.step()
    assert outputs[0].tolist() == pytest.approx([10, 30, 50, 70, 90], abs=3)
    assert float(of.mean(outputs.detach())) == pytest.approx(50, abs=2)


@pytest.mark.parametrize("of", [MeanOnly(), Quantiles(3)])
def test_other_targets_move_and_shrink(of):
    outputs = torch.arange(2.0 * of.num_atoms).view(2, -1)
    found = of.target(outputs, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    expected = torch.tensor([1.0, 2.0]).unsqueeze(-1) + torch.tensor([[0.5], [0.0]]) * outputs
    torch.testing.assert_close(found["target"].view(2, -1), expected)
    torch.testing.assert_close(found["target_mean"], expected.mean(-1))


def test_a_range_without_width_is_refused():
    with pytest.raises(ConfigError, match=r"v_min=1.0, v_max=1.0 and num_atoms=51: C51 needs"):
        C51(51, 1.0, 1.0)
    with pytest.raises(ConfigError, match="two atoms or more"):
        C51(1, 0.0, 1.0)
    assert C51(2, 0.0, 1.0).atoms.tolist() == [0.0, 1.0]
