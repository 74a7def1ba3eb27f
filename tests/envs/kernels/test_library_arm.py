"""The arm against its equations of motion, written another way and solved in float64."""

import numpy as np
import pytest
import torch

from headrace.envs.kernels.library.arm import Reacher
from tests.envs.kernels.support import act_at_random, vector_of

N, LENGTH, DAMPING, TAU = 2_000, 0.5, 0.1, 0.025


def mass(q):
    """The matrix `[N, 2, 2]` of kinetic energy, v M v / 2, from where the two masses are."""
    first, second = q[:, 0], q.sum(1)
    zero = np.zeros(len(q))
    elbow = LENGTH * np.stack([[-np.sin(first), zero], [np.cos(first), zero]])
    link = LENGTH * np.stack([[-np.sin(second)] * 2, [np.cos(second)] * 2])
    elbow, hand = np.moveaxis(elbow, -1, 0), np.moveaxis(elbow + link, -1, 0)
    return np.swapaxes(elbow, 1, 2) @ elbow + np.swapaxes(hand, 1, 2) @ hand


def acceleration(q, v, torque):
    """Lagrange's equations, with derivatives of the mass matrix by differences."""
    by = 1e-6
    slopes = [
        (mass(q + by * np.eye(2)[k]) - mass(q - by * np.eye(2)[k])) / (2 * by) for k in range(2)
    ]
    change = slopes[0] * v[:, :1, None] + slopes[1] * v[:, 1:, None]
    ahead = np.einsum("nij,nj->ni", change, v)
    energy = np.stack([np.einsum("ni,nij,nj->n", v, slope, v) / 2 for slope in slopes], 1)
    push = torque - DAMPING * v - ahead + energy
    return np.linalg.solve(mass(q), push[..., None])[..., 0]


def stepped():
    env, rng = Reacher(), np.random.default_rng(1)
    vector, (fragment,) = vector_of(env, N, 1)
    act_at_random([fragment], vector.spec, rng)
    vector.bind(fragment)
    angles, speeds = rng.uniform(-np.pi, np.pi, (2, N)), rng.uniform(-8, 8, (2, N))
    for name, column in zip(env.state, (*angles, *speeds), strict=False):
        vector.world[name].copy_(torch.from_numpy(column))
    before = {name: vector.world[name].numpy().astype(float) for name in env.state}
    vector.step(0)
    after = {name: vector.world[name].numpy().astype(float) for name in env.state}
    return before, after, np.clip(vector.world["action"].numpy(), -1, 1).astype(float), fragment


def test_a_step_follows_the_equations_of_motion():
    before, after, torque, fragment = stepped()
    q = np.stack([before["shoulder"], before["elbow"]], 1)
    v = np.stack([before["shoulder_dot"], before["elbow_dot"]], 1)
    fast = np.zeros(N, bool)
    for _ in range(2):
        v = v + TAU * acceleration(q, v, torque)
        fast |= (np.abs(v) > 9.99).any(1)
        v = v.clip(-10, 10)
        q = q + TAU * v
    assert 0 < fast.sum() < 0.2 * N
    found = np.stack([after["shoulder"], after["elbow"]], 1)
    turns = np.rint((found - q) / (2 * np.pi))
    assert np.abs(found).max() <= np.pi + 1e-5
    assert np.abs(found - 2 * np.pi * turns - q)[~fast].max() < 1e-4
    speeds = np.stack([after["shoulder_dot"], after["elbow_dot"]], 1)
    assert np.abs(speeds - v)[~fast].max() < 1e-3
    hand = LENGTH * np.stack(
        [np.cos(q[:, 0]) + np.cos(q.sum(1)), np.sin(q[:, 0]) + np.sin(q.sum(1))]
    )
    way = np.stack([before["target_x"], before["target_y"]]) - hand
    reward = -(np.hypot(*way) + 0.01 * (torque**2).sum(1))
    assert fragment.reward[0].numpy()[~fast] == pytest.approx(reward[~fast], abs=1e-3)
    obs = fragment.obs[1].numpy()
    assert obs[~fast][:, 8:] == pytest.approx(way.T[~fast], abs=1e-3)
    assert obs[:, :2] == pytest.approx(
        np.stack([np.cos(found[:, 0]), np.sin(found[:, 0])], 1), abs=1e-5
    )


def test_targets_are_within_reach_and_an_arm_begins_at_rest():
    vector, (fragment,) = vector_of(Reacher(), N, 1)
    vector.bind(fragment)
    distance = np.hypot(vector.world["target_x"].numpy(), vector.world["target_y"].numpy())
    assert 0.2 <= distance.min() < 0.21
    assert 0.94 < distance.max() <= 0.9501
    assert not vector.world["shoulder_dot"].any()
    assert vector.spec.action.low == (-1.0, -1.0)
