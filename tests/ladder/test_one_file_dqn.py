"""Rung 1 for replay: the plain one-file DQN and the package, with the same random numbers."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.config.resolve import resolve
from headrace.device_seeding import replay_draws
from headrace.seeding import action_noise, derive
from tests.support import inline, learner_for, plan_for, short_cartpole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import dqn_one_file as plain

SEED, UPDATES = 3, 8
SIZES = {"num_envs": 4, "num_steps": 16}
ROWS = 4 * 16


class SameRandomness(plain.Randomness):
    """The package's random numbers, for the plain file."""

    def reset_seed(self, env, episode):
        return derive(SEED, "env", env, episode)

    def noise(self, first_step, num_steps, num_envs):
        return action_noise(SEED, np.arange(num_envs), first_step, num_steps, 1)[..., 0]

    def draws(self, gradient_step, batch_size):
        return replay_draws(SEED, gradient_step, 1, batch_size, torch.device("cpu"))[0].numpy()


@pytest.mark.parametrize("double_q", [True, False])
def test_package_equals_the_one_file_dqn(double_q):
    total = UPDATES * ROWS
    same = {"batch_size": 24, "replay_ratio": 0.3, "learning_starts": 100, "double_q": double_q}
    same |= {"target_update_interval": 7, "lr": 1e-2, "gamma": 0.9}
    settings = resolve(
        {"env": "short", "algo": "dqn", "envs_per_vector": 4, "seed": SEED, "arithmetic": "plain"}
        | {"total_env_steps": total, "hidden_sizes": [256, 256], "activation": "relu"}
        | {"exploration_fraction": 0.5, "exploration_final_eps": 0.1, "num_workers": 0}
        | {"replay_size": 10_000}
        | SIZES | same
    )  # fmt: skip
    plan = plan_for(short_cartpole, envs_per_vector=4, seed=SEED, settings=settings, **SIZES)
    collector = inline(plan)
    learner = learner_for(settings, plan.spec)
    policy = learner.policies["default"]
    network = plain.QNetwork(4, 2)
    layers = [*policy.model.trunk.layers, policy.model.actor]
    for ours, theirs in zip(layers, [*network][::2], strict=True):
        theirs.load_state_dict(ours.state_dict())

    truncations = 0
    for update in range(UPDATES):
        collector.publish(learner.policies, learner.version)
        batch = collector.collect()
        truncations += sum(int(f.num_final) for f in batch.fragments)
        learner.update(learner.assemble(batch.fragments), update * ROWS, ROWS)
    collector.close()
    cfg = plain.Config(
        total_env_steps=total, exploration_fraction=0.5, final_epsilon=0.1, **SIZES, **same
    )
    plain.train(short_cartpole, cfg, SameRandomness(SEED), network)

    assert truncations > 5, "the time limit must play a part"
    assert learner.learner_steps == int(0.3 * (total - 100))
    for ours, theirs in zip(layers, [*network][::2], strict=True):
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)


def test_the_one_file_learns_by_itself():
    seen = []
    plain.train(
        short_cartpole,
        plain.Config(total_env_steps=512, learning_starts=100),
        plain.Randomness(0),
        on_update=lambda steps, mean: seen.append((steps, mean)),
    )
    assert seen[-1][0] == 512
