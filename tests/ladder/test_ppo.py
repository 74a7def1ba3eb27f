"""Rung 7, as far as PPO alone allows: ratios of 1, and advantage actor-critic's gradient."""

import pytest
import torch

from headrace import batch
from headrace.algos import a2c, ppo
from headrace.algos.a2c import A2C
from headrace.algos.ppo import PPO
from headrace.algos.targets import advantages
from headrace.models.policy import Network
from tests.support import inline, learn_once, plan_for, policy_for, short_cartpole


def fresh_batch(network=None, **kwargs):
    plan = plan_for(short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4, network=network)
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    experience = batch.join(collector.collect().fragments, torch.device("cpu"))
    collector.close()
    return policy, experience


def test_at_lag_0_ratios_are_exactly_1_with_equal_shapes():
    policy, experience = fresh_batch(Network(arithmetic="plain"))
    for t in range(experience.num_steps):  # the shape that was acted with: one row of the batch
        log_prob, _, value = policy.evaluate(experience.obs[t], experience.action[t])
        assert torch.equal(
            (log_prob - experience.stored_outputs["log_prob"][t]).exp(), torch.ones(4)
        )
        assert torch.equal(value, experience.stored_outputs["value"][t])


def test_at_lag_0_ratios_are_1_within_1e_6_in_one_large_minibatch():
    policy, experience = fresh_batch()
    log_prob, _, _ = policy.evaluate(experience.obs[:-1], experience.action)
    ratio = (log_prob - experience.stored_outputs["log_prob"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_one_epoch_one_minibatch_no_clip_is_the_advantage_actor_critic_gradient(shared_trunk):
    policy, experience = fresh_batch(Network(shared_trunk=shared_trunk))
    cfg = PPO(num_epochs=1, num_minibatches=1, clip_coef=1e9, ent_coef=0.01, max_grad_norm=1e9)
    gradients = {}

    def catch(loss):
        def step(minibatch, lr):
            policy.zero_grad()
            total, metrics = loss(policy, minibatch)
            total.backward()
            gradients.update({n: p.grad.clone() for n, p in policy.named_parameters()})
            return metrics

        return step

    learn_once(
        ppo.PPOAlgorithm(), policy, experience, cfg,
        lambda epochs: torch.arange(32).unsqueeze(1).repeat(epochs, 1, 4),
        step=catch(lambda policy, minibatch: ppo.loss(policy, minibatch, cfg)),
    )  # fmt: skip
    # A2C's own page, and its formula (Mnih et al. 2016, arXiv:1602.01783) written out:
    # -log π(a|s) A + c_v (V - R)² / 2 - c_e H
    by_ppo = dict(gradients)
    theirs = A2C(ent_coef=0.01, gae_lambda=cfg.gae_lambda, normalize_advantage=True)
    learn_once(
        a2c.A2CAlgorithm(), policy, experience, theirs, lambda epochs: None,
        step=catch(lambda policy, minibatch: a2c.loss(policy, minibatch, theirs)),
    )  # fmt: skip
    by_a2c = dict(gradients)
    rows = advantages(policy, experience, cfg.gamma, cfg.gae_lambda)
    advantage = rows["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
    log_prob, entropy, value = policy.evaluate(rows["obs"], rows["action"])
    loss = (
        -(log_prob * advantage).mean()
        + 0.5 * 0.5 * (value - rows["target"]).square().mean()
        - 0.01 * entropy.mean()
    )
    policy.zero_grad()
    loss.backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(by_ppo[name], parameter.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(by_a2c[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert sum(g.abs().sum() for g in by_a2c.values()) > 0.1
