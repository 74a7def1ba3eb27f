"""A product of distributions: its parts, side by side."""

import gymnasium as gym
import numpy as np
import torch
from torch.distributions import Categorical, Normal

import headrace
from headrace.envs.factory import EnvMaker, env_spec
from headrace.models.distributions import head_for
from headrace.models.policy import Network, Policy
from tests.support import Nested

SPEC = env_spec(EnvMaker(Nested))
SIZES = [3, 2, 2, 2]  # Discrete, MultiBinary(2), Box(2)


def some_params(n=64):
    head = head_for(SPEC.action)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.tensor([-1.0, 0.5]))
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(n, head.num_params, generator=generator)
    return head, params, torch.rand(n, head.num_draws, generator=generator)


def test_log_probs_and_entropies_are_the_sums_of_the_parts():
    head, params, noise = some_params()
    assert (head.num_params, head.num_draws, head.num_choices) == (9, 5, 7)
    action, log_prob = head.sample(params, noise)
    gear, left, right, means = params.split(SIZES, -1)
    choices = [Categorical(logits=logits) for logits in (gear, left, right)]
    steer = Normal(means, torch.tensor([-1.0, 0.5]).exp())
    expected = sum(part.log_prob(action[:, i]) for i, part in enumerate(choices))
    expected += steer.log_prob(action[:, 3:]).sum(-1)
    entropy = sum(part.entropy() for part in choices) + steer.entropy().sum(-1)
    torch.testing.assert_close(log_prob, expected)
    again, found = head.evaluate(params, action)
    assert torch.equal(again, log_prob)
    torch.testing.assert_close(found, entropy)
    # Each part is drawn by noise of its own: the first by the first column alone
    changed = noise.clone()
    changed[:, 0] = 1 - noise[:, 0]
    other, _ = head.sample(params, changed)
    assert torch.equal(other[:, 1:], action[:, 1:])
    assert (other[:, 0] != action[:, 0]).any()


def test_the_mode_and_the_mask_are_those_of_the_parts():
    head, params, _ = some_params()
    gear, left, right, means = params.split(SIZES, -1)
    columns = [logits.argmax(-1, keepdim=True).float() for logits in (gear, left, right)]
    assert torch.equal(head.mode(params), torch.cat([*columns, means], -1))
    allowed = torch.tensor([0, 1, 0, 1, 0, 0, 1], dtype=torch.bool).expand(len(params), -1)
    masked = head.masked(params, allowed)
    assert head.mode(masked)[:, :3].unique(dim=0).tolist() == [[1, 0, 1]]
    assert torch.equal(masked[:, 7:], means)


class Looking(torch.nn.Module):
    """A network of one's own, that takes observations as the environment nests them."""

    def __init__(self, spec):
        super().__init__()
        self.out = torch.nn.Linear(5, headrace.num_params(spec) + 1)

    def forward(self, obs):
        image, rest = obs[0].float().mean((-3, -2, -1)), obs[1]
        pair, bits = rest["pair"][0], rest["pair"][1].float()
        choice = rest["choice"].float()
        out = self.out(torch.cat([pair, bits, (image + choice).unsqueeze(-1)], -1))
        return out[..., :-1], out[..., -1]


def test_a_network_of_one_s_own_gets_nested_observations(tmp_path):
    run = headrace.train(
        Nested, model=Looking, run_dir=tmp_path / "r", total_env_steps=64, num_envs=4,
        num_steps=16, quiet=True,
    )  # fmt: skip
    obs, _ = Nested().reset(seed=0)
    action = run.policy(obs)
    assert Nested().action_space.contains(action)
    batch = gym.vector.utils.concatenate(
        Nested().observation_space, [obs, obs],
        gym.vector.utils.create_empty_array(Nested().observation_space, 2),
    )  # fmt: skip
    both = run.policy(batch)
    assert both["gears"][0].shape == (2,)
    np.testing.assert_allclose(both["steer"], [action["steer"]] * 2, rtol=1e-6)
    loaded = headrace.load_policy(run.dir, model=Looking)
    assert str(loaded(obs)) == str(action)


def test_the_first_deviation_of_each_continuous_action_is_the_setting():
    for spec in (SPEC, env_spec(EnvMaker("Pendulum-v1"))):
        policy = Policy(spec, Network(initial_log_std=-0.5))
        (log_std,) = policy.head.parameters()
        assert (log_std == -0.5).all()
