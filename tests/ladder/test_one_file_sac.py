"""Rung 1 for SAC: the plain one-file SAC and the package, with the same random numbers."""

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from headrace.config.resolve import resolve
from headrace.device_seeding import batch_noise, replay_draws
from headrace.seeding import action_noise, derive
from tests.algos.reach import Reach
from tests.support import inline, learner_for, plan_for

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import sac_one_file as plain

SEED, UPDATES = 3, 8
SIZES = {"num_envs": 4, "num_steps": 16}
ROWS = 4 * 16


class SameRandomness(plain.Randomness):
    """The package's random numbers, for the plain file."""

    def reset_seed(self, env, episode):
        return derive(SEED, "env", env, episode)

    def noise(self, first_step, size):
        return action_noise(SEED, np.arange(size[1]), first_step, size[0], size[2])

    def draws(self, gradient_step, batch_size):
        return replay_draws(SEED, gradient_step, 1, batch_size, torch.device("cpu"))[0].numpy()

    def normal(self, gradient_step, batch_size, count):
        return batch_noise(SEED, gradient_step, torch.arange(batch_size), count)


def test_package_equals_the_one_file_sac():
    total = UPDATES * ROWS
    same = {"batch_size": 24, "replay_ratio": 0.3, "learning_starts": 100}
    same |= {"lr": 1e-2, "gamma": 0.9, "tau": 0.02}
    settings = resolve(
        {"env": "reach", "algo": "sac", "envs_per_vector": 4, "seed": SEED, "arithmetic": "plain"}
        | {"total_env_steps": total, "hidden_sizes": [256, 256], "activation": "relu"}
        | {"replay_size": 10_000, "num_workers": 0}
        | SIZES | same
    )  # fmt: skip
    plan = plan_for(Reach, envs_per_vector=4, seed=SEED, settings=settings, **SIZES)
    collector = inline(plan)
    learner = learner_for(settings, plan.spec)
    policy = learner.policies["default"]
    critics = learner.learners["default"].modules["critics"]
    plain_policy, plain_critics = plain.Policy(2, 2), plain.Critics(4)
    layers = [*policy.model.trunk.layers, policy.model.actor]
    for ours, theirs in zip(layers, [*plain_policy][::2], strict=True):
        theirs.load_state_dict(ours.state_dict())
    pairs = [
        (ours, theirs)
        for layer, *of_layer in zip(
            critics.layers, plain_critics.weights, plain_critics.biases, strict=True
        )
        for ours, theirs in zip((layer.weight, layer.bias), of_layer, strict=True)
    ]
    for ours, theirs in pairs:
        theirs.data.copy_(ours.data)

    terminations = truncations = 0
    for update in range(UPDATES):
        collector.publish(learner.policies, learner.version)
        batch = collector.collect()
        truncations += sum(int(f.num_final) for f in batch.fragments)
        terminations += sum(int(f.terminated.sum()) for f in batch.fragments)
        learner.update(learner.assemble(batch.fragments), update * ROWS, ROWS)
    collector.close()
    cfg = plain.Config(total_env_steps=total, **SIZES, **same)
    plain.train(Reach, cfg, SameRandomness(SEED), plain_policy, plain_critics)

    assert truncations > 5
    assert terminations > 5
    assert learner.learner_steps == int(0.3 * (total - 100))
    for ours, theirs in zip(layers, [*plain_policy][::2], strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)


def test_the_one_file_learns_by_itself():
    seen = []
    plain.train(
        lambda: gym.make("Pendulum-v1"),
        plain.Config(total_env_steps=256, learning_starts=200, batch_size=32),
        plain.Randomness(0),
        on_update=lambda steps, mean: seen.append((steps, mean)),
    )
    assert seen[-1][0] == 256
    assert seen[-1][1] == pytest.approx(0.0)  # no episode has ended yet
