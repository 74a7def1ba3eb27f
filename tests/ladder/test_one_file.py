"""Rung 1: the plain one-file PPO and the package, with the same random numbers, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch

from headrace.algos.ppo import PPO
from headrace.config.resolve import resolve
from headrace.envs.factory import EnvMaker, env_spec
from headrace.models.policy import Network
from headrace.seeding import action_noise, derive, permutations
from tests.support import inline, learner_for, plan_for, short_cartpole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import numpy as np

import ppo_one_file as plain

SEED, UPDATES = 3, 6


class SameRandomness(plain.Randomness):
    """The package's random numbers, for the plain file."""

    def reset_seed(self, env, episode):
        return derive(SEED, "env", env, episode)

    def noise(self, first_step, num_steps, num_envs):
        return action_noise(SEED, np.arange(num_envs), first_step, num_steps, 1)[..., 0]

    def order(self, update, epoch, num_steps, num_envs):
        return permutations(SEED, np.arange(num_envs), update, epoch + 1, num_steps)[epoch]


def copy_weights(policy, agent):
    """The same numbers in the same places: two hidden layers and one on top, twice."""
    pairs = [
        (policy.model.actor_trunk.layers[0], agent.actor[0]),
        (policy.model.actor_trunk.layers[1], agent.actor[2]),
        (policy.model.actor, agent.actor[4]),
        (policy.model.critic_trunk.layers[0], agent.critic[0]),
        (policy.model.critic_trunk.layers[1], agent.critic[2]),
        (policy.model.critic, agent.critic[4]),
    ]
    for ours, theirs in pairs:
        theirs.load_state_dict(ours.state_dict())
    return pairs


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_package_equals_the_one_file_ppo(num_minibatches):
    algo = PPO(
        lr=1e-2, num_epochs=3, num_minibatches=num_minibatches, gamma=0.97, gae_lambda=0.9,
        clip_coef=0.1, ent_coef=0.01,
    )  # fmt: skip
    plan = plan_for(
        short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4, seed=SEED,
        network=Network(arithmetic="plain"),
    )  # fmt: skip
    collector = inline(plan)
    settings = resolve(
        {"env": "short", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4, "seed": SEED}
        | {"arithmetic": "plain"}
        | {name: getattr(algo, name) for name in algo._explicit}
    )
    learner = learner_for(settings, plan.spec)
    agent = plain.Agent(4, 2)
    pairs = copy_weights(learner.policies["default"], agent)

    truncations = 0
    for _ in range(UPDATES):
        collector.publish(learner.policies, learner.version)
        batch = collector.collect()
        truncations += sum(int(f.num_final) for f in batch.fragments)
        learner.update(learner.assemble(batch.fragments), 0)
    cfg = plain.Config(
        total_env_steps=UPDATES * 32 * 4, num_envs=4, num_steps=32, num_epochs=3,
        num_minibatches=num_minibatches, lr=1e-2, gamma=0.97, gae_lambda=0.9, clip_coef=0.1,
        ent_coef=0.01,
    )  # fmt: skip
    plain.train(short_cartpole, cfg, SameRandomness(SEED), agent)

    assert truncations > 5, "the time limit must play a part"
    for ours, theirs in pairs:
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.bias, theirs.bias)
    collector.close()


def test_the_one_file_learns_by_itself():
    seen = []
    plain.train(
        short_cartpole,
        plain.Config(total_env_steps=256),
        plain.Randomness(0),
        on_update=lambda steps, mean: seen.append((steps, mean)),
    )
    assert seen[-1][0] == 256
    assert env_spec(EnvMaker(short_cartpole)).observation.shape == (4,)
