"""Priorities against their definition: sums, frequencies, and what is never drawn."""

import numpy as np
import pytest
import torch

from headrace.replay.priorities import Priorities


def filled(num_envs=3, num_places=200, seed=0, share_of_zeros=0.5):
    rng = np.random.default_rng(seed)
    priorities = Priorities(num_envs, num_places)
    values = rng.exponential(size=(num_envs, num_places))
    values[rng.random(values.shape) < share_of_zeros] = 0.0
    env, place = np.indices(values.shape).reshape(2, -1)
    priorities.set(torch.from_numpy(env), torch.from_numpy(place), torch.from_numpy(values.ravel()))
    return priorities, values


@pytest.mark.parametrize("num_places", [1, 2, 63, 64, 65, 5_000])
def test_sums_stay_those_of_the_parts(num_places):
    rng = np.random.default_rng(1)
    priorities, values = filled(2, num_places)
    for _ in range(50):
        env, place = rng.integers(2, size=40), rng.integers(num_places, size=40)
        new = rng.exponential(size=40) * rng.integers(2, size=40)
        for e, p in zip(env, place, strict=True):
            values[e, p] = max(new[(env == e) & (place == p)])
        priorities.set(*(torch.from_numpy(array) for array in (env, place, new)))
    assert priorities.sums().numpy() == pytest.approx(values.sum(1), rel=1e-12)


def test_places_are_drawn_in_proportion_and_none_of_priority_zero():
    priorities, values = filled()
    share = values / values.sum()
    count = np.zeros_like(values)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2_000):
        env, place, slot, probability = priorities.draw(
            torch.rand(32, dtype=torch.float64, generator=generator)
        )
        assert slot.tolist() == list(range(32))
        np.add.at(count, (env.numpy(), place.numpy()), 1)
        assert probability.numpy() == pytest.approx(share[env, place])
    assert not count[values == 0].any()
    expected = 64_000 * share[values > 0]
    chi2 = ((count[values > 0] - expected) ** 2 / expected).sum()
    assert chi2 < len(expected) + 4 * (2 * len(expected)) ** 0.5


def test_rounding_draws_no_place_of_priority_zero():
    """The first part of what is drawn from begins a rounding error before its environment."""
    priorities = Priorities(2, 3)
    env, place = torch.tensor([0, 1]), torch.tensor([0, 1])
    priorities.set(env, place, torch.tensor([0.1, 0.2], dtype=torch.float64))
    for count in range(1, 200):
        env, place, _, probability = priorities.draw(torch.zeros(count, dtype=torch.float64))
        assert (probability > 0).all(), (count, env, place)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_are_places_with_a_priority(uniform):
    for seed in range(20):
        priorities, values = filled(seed=seed, share_of_zeros=0.9)
        env, place, _, _ = priorities.draw(torch.full((7,), uniform, dtype=torch.float64))
        assert (values[env, place] > 0).all()
