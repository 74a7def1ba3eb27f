"""Random numbers are addressed, and are what they claim to be."""

import numpy as np
import pytest

from headrace.seeding import action_noise, derive, env_orders, permutations, philox


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        # Known answers of the authors' own distribution (Random123, kat_vectors, philox4x32 10).
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key, counter, expected):
    words = philox(
        tuple(np.array(k, np.uint64) for k in key), tuple(np.array(c, np.uint64) for c in counter)
    )
    assert tuple(int(w) for w in words) == expected


def test_noise_depends_on_env_and_step_only():
    whole = action_noise(5, np.arange(6), 0, 20, 3)
    assert whole.shape == (20, 6, 3)
    # Any cut by envs or by steps gives the same numbers.
    np.testing.assert_array_equal(whole[:, 2:4], action_noise(5, np.array([2, 3]), 0, 20, 3))
    np.testing.assert_array_equal(whole[7:12], action_noise(5, np.arange(6), 7, 5, 3))
    # Other seeds, envs and steps have others.
    assert len(np.unique(action_noise(5, np.arange(6), 0, 20, 9))) == 6 * 20 * 9
    assert not np.array_equal(whole, action_noise(6, np.arange(6), 0, 20, 3))


def test_noise_is_uniform_and_never_0_or_1():
    noise = action_noise(1, np.arange(100), 0, 1000, 2)
    assert noise.min() > 0.0
    assert noise.max() < 1.0
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    # 200,000 draws over 20 bins: 10,000 each, standard deviation 97
    assert np.abs(counts - 10_000).max() < 500


def test_the_step_counter_is_64_bits():
    assert not np.array_equal(
        action_noise(1, np.arange(2), 0, 4, 1), action_noise(1, np.arange(2), 2**32, 4, 1)
    )


@pytest.mark.parametrize("num_epochs", [1, 4, 6])
def test_permutations_depend_on_env_update_and_epoch(num_epochs):
    orders = permutations(7, np.arange(5), 3, num_epochs, 64)
    assert orders.shape == (num_epochs, 64, 5) and orders.dtype == np.int64
    assert (np.sort(orders, axis=1) == np.arange(64)[:, None]).all()
    # Of some of the envs, and of fewer epochs, they are the same.
    np.testing.assert_array_equal(
        orders[:, :, 3:], permutations(7, np.array([3, 4]), 3, num_epochs, 64)
    )
    np.testing.assert_array_equal(orders, permutations(7, np.arange(5), 3, 9, 64)[:num_epochs])
    others = [
        permutations(*of, num_epochs, 64) for of in ((8, np.arange(5), 3), (7, np.arange(5), 4))
    ]
    columns = np.concatenate([orders, *others]).swapaxes(1, 2).reshape(-1, 64)
    assert len(np.unique(columns, axis=0)) == len(columns)


def test_permutations_are_uniform():
    """Each step comes to each place equally often."""
    orders = permutations(1, np.arange(1000), 0, 4, 8).swapaxes(1, 2).reshape(-1, 8)
    counts = [np.bincount(orders[:, place], minlength=8) for place in range(8)]
    # 4,000 columns: 500 each, standard deviation 21
    assert np.abs(np.array(counts) - 500).max() < 110


def test_env_orders_depend_on_update_and_epoch_and_are_uniform():
    orders = env_orders(7, 16, 3, 6)
    assert orders.shape == (6, 16) and orders.dtype == np.int64
    assert (np.sort(orders) == np.arange(16)).all()
    np.testing.assert_array_equal(orders[:3], env_orders(7, 16, 3, 3))
    others = [env_orders(8, 16, 3, 6), env_orders(7, 16, 4, 6)]
    assert len(np.unique(np.concatenate([orders, *others]), axis=0)) == 18
    many = np.concatenate([env_orders(1, 8, update, 4) for update in range(1000)])
    counts = [np.bincount(many[:, env], minlength=8) for env in range(8)]
    # 4,000 orders: 500 each, standard deviation 21
    assert np.abs(np.array(counts) - 500).max() < 110


def test_derived_seeds_differ_by_every_part_of_the_address():
    seeds = [
        derive(s, role, *path)
        for s in (0, 1)
        for role in ("env", "eval")
        for path in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
