"""NatureCNN PPO on a stored batch against an independent plain implementation."""

import pytest
import torch
from torch import nn

from headrace.algos import ppo
from headrace.algos.ppo import PPO
from headrace.algos.targets import Cuts, advantages, minibatches
from headrace.distributed.ranks import SINGLE_RANK
from headrace.models.networks import ImageEncoder
from headrace.models.policy import Network, torch_seed
from headrace.spec import Space
from tests.marks import repeats
from tests.support import inline, plan_for, policy_for


def stored_batch(**network):
    """A batch of Breakout, by a policy that is not uniform."""
    plan = plan_for("ALE/Breakout-v5", num_steps=24, num_envs=4, envs_per_vector=4, native=True,
                    network=Network(hidden_sizes=(), clip_reward=1.0, **network))  # fmt: skip
    policy = policy_for(plan)
    with torch.no_grad():
        policy.model.actor.weight.mul_(30)
    collector = inline(plan)
    collector.publish({"default": policy}, 0)
    (fragment,) = collector.collect().fragments
    collector.close()
    return policy, fragment


class Plain(nn.Module):
    """Mnih et al. 2015, written from the paper's table, NCHW, with weights that are handed in."""

    def __init__(self, state):
        super().__init__()
        self.w = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        for tensor in self.w.values():
            tensor.requires_grad_()

    def forward(self, obs):
        x = obs.float() / 255
        for layer, stride in ((0, 4), (2, 2), (4, 1)):
            w = self.w[f"model.encoder.net.{layer}.weight"]
            b = self.w[f"model.encoder.net.{layer}.bias"]
            x = nn.functional.conv2d(x, w, b, stride).relu()
        x = x.flatten(1) @ self.w["model.encoder.net.7.weight"].T
        x = (x + self.w["model.encoder.net.7.bias"]).relu()
        logits = x @ self.w["model.actor.weight"].T + self.w["model.actor.bias"]
        value = x @ self.w["model.critic.weight"].T + self.w["model.critic.bias"]
        return logits, value[:, 0]


def plain_loss(plain, fragment, cfg):
    """PPO over the whole batch as one minibatch, in a loop over time and plain torch."""
    T, N = fragment.reward.shape
    old_value = fragment.stored_outputs["value"]
    with torch.no_grad():
        last = plain(fragment.obs[-1])[1]
    advantage, running = torch.zeros(T, N), torch.zeros(N)
    for t in reversed(range(T)):
        live = 1 - fragment.terminated[t].float()
        cut = 1 - (fragment.terminated[t] | fragment.truncated[t]).float()
        after = old_value[t + 1] if t + 1 < T else last
        delta = fragment.reward[t].clamp(-1, 1) + cfg.gamma * live * after - old_value[t]
        advantage[t] = running = delta + cfg.gamma * cfg.gae_lambda * cut * running
    target = (advantage + old_value).flatten()
    flat = advantage.flatten()
    flat = (flat - flat.mean()) / (flat.std(correction=0) + 1e-8)
    logits, value = plain(fragment.obs[:-1].flatten(0, 1))
    dist = torch.distributions.Categorical(logits=logits)
    old = fragment.stored_outputs["log_prob"].flatten()
    ratio = (dist.log_prob(fragment.action.flatten()) - old).exp()
    clipped = ratio.clamp(1 - cfg.clip_coef, 1 + cfg.clip_coef)
    return (
        -torch.min(ratio * flat, clipped * flat).mean()
        + cfg.vf_coef * 0.5 * (value - target).square().mean()
        - cfg.ent_coef * dist.entropy().mean()
    )


def test_naturecnn_ppo_equals_a_plain_implementation():
    policy, fragment = stored_batch()
    assert not fragment.truncated.any()  # the plain loop has no final observations
    fragment.reward[::5] = 3.0  # random play scores seldom; and clipping must matter
    cfg = PPO(num_epochs=1, num_minibatches=1, clip_coef=0.1, ent_coef=0.01)
    with torch.no_grad():  # another policy than the one that acted: ratios that are not 1
        policy.model.actor.bias += torch.tensor([0.1, -0.2, 0.3, 0.0])
    rows = advantages(policy, fragment, cfg.gamma, cfg.gae_lambda)
    rows["log_prob"] = fragment.stored_outputs["log_prob"].flatten()
    everything = torch.arange(fragment.reward.numel())
    whole = minibatches(
        rows, Cuts(everything.unsqueeze(0), None, 1), SINGLE_RANK, normalize_advantage=True
    )
    minibatch = whole[0]
    scalars = {"clip_coef": torch.tensor(0.1), "ent_coef": torch.tensor(0.01)}
    ours, metrics = ppo.loss(policy, minibatch | scalars, cfg)
    ours.backward()
    plain = Plain(policy.state_dict())
    theirs = plain_loss(plain, fragment, cfg)
    theirs.backward()
    assert 0 < metrics["clip_fraction"] < 1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.w[name].grad, rtol=1e-5, atol=1e-5)
    assert sum(p.grad.abs().sum() for p in policy.parameters()) > 1


@repeats("image_net", ["nature", "impala", "small"])
def test_every_image_net_acts_and_learns(image_net):
    policy, fragment = stored_batch(image_net=image_net)
    for parameter in policy.parameters():  # residual blocks begin with weights of 0
        parameter.data += 0.01 * torch.randn_like(parameter)
    log_prob, entropy, value = policy.evaluate(
        fragment.obs[:-1].flatten(0, 1), fragment.action.flatten()
    )
    (log_prob.mean() + entropy.mean() + value.mean()).backward()
    assert all(p.grad.abs().sum() > 0 for p in policy.parameters())


@pytest.mark.parametrize(("net", "side"), [("small", 8), ("impala", 20), ("nature", 48)])
def test_features_begin_no_larger_than_a_vector_beside_them(net, side):
    """Larger ones drive the tanh layer after them into saturation: it would not see the vector."""
    with torch_seed(1):
        encoder = ImageEncoder(Space("box", (side, side, 1), "uint8"), net)
    pixels = torch.randint(0, 256, (50, side, side, 1), dtype=torch.uint8)
    with torch.no_grad():
        for image in (pixels, torch.full_like(pixels, 255)):
            assert float(encoder(image).square().mean().sqrt()) < 3


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("net", ["small", "impala", "nature"])
def test_encoder_in_bf16_is_close_to_fp32_and_so_is_its_gradient(net, layer_norm):
    with torch_seed(1):
        encoder = ImageEncoder(Space("box", (48, 48, 3), "uint8"), net, layer_norm=layer_norm)
    pixels = torch.randint(0, 256, (30, 48, 48, 3), dtype=torch.uint8)
    found = []
    for on in (False, True):
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = encoder(pixels).float()
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in encoder.parameters())])
    for full, half in zip(*found, strict=True):
        assert (half - full).norm() <= 0.05 * full.norm()
        assert full.norm() == 0 or not torch.equal(half, full)


@pytest.mark.more
def test_bf16_is_close_to_fp32_and_leaves_weights_and_outputs_fp32():
    policy, fragment = stored_batch()
    half, _ = stored_batch(precision="bf16")
    half.load_state_dict(policy.state_dict())
    obs = fragment.obs[:-1].flatten(0, 1)
    with torch.no_grad():
        (params, value), (half_params, half_value) = policy(obs), half(obs)
    assert half_params.dtype == half_value.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in half.parameters())
    torch.testing.assert_close(half_params, params, rtol=0.05, atol=0.05)
    torch.testing.assert_close(half_value, value, rtol=0.05, atol=0.05)
    assert not torch.equal(half_value, value)
