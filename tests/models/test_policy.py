"""Distributions, normalizers and the policy, against torch's own and against plain sums."""

import numpy as np
import pytest
import torch

from headrace.models.distributions import Categorical, Gaussian, MultiCategorical
from headrace.models.networks import FlatEncoder
from headrace.models.normalization import NormalizeObs, NormalizeReward, RunningMoments
from headrace.models.policy import Network
from headrace.spec import ActionCodec, EnvSpec, Space
from headrace.weights import FlatWeights, Published
from tests.support import build_policy, plan_for, policies_for, policy_for, short_cartpole

DISCRETE = Space("discrete", (), "int64", nvec=(3,), start=(0,))
SPEC = EnvSpec("test", Space("box", (4,), "float32"), DISCRETE)


def uniform(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).clamp(1e-6, 1 - 1e-6)


def test_categorical_equals_torch():
    logits = torch.randn(50, 3)
    action = torch.arange(50) % 3
    log_prob, entropy = Categorical(3).evaluate(logits, action)
    theirs = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_prob, theirs.log_prob(action))
    torch.testing.assert_close(entropy, theirs.entropy())


def test_multi_categorical_is_the_product_of_its_parts():
    logits = torch.randn(50, 5)
    head = MultiCategorical((2, 3))
    action, sampled = head.sample(logits, uniform(50, 2))
    log_prob, entropy = head.evaluate(logits, action)
    parts = [torch.distributions.Categorical(logits=part) for part in logits.split([2, 3], -1)]
    expected = sum(part.log_prob(action[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(sampled, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    assert head.mode(logits).tolist() == [[r[:2].argmax(), r[2:].argmax()] for r in logits.numpy()]
    # Each choice has noise of its own
    action, _ = head.sample(torch.zeros(2, 5), torch.tensor([[0.1, 0.9], [0.9, 0.1]]))
    assert action.tolist() == [[0, 2], [1, 0]]


def test_categorical_samples_by_inverse_cdf():
    # p = 0.2, 0.5, 0.3: cumulative 0.2, 0.7, 1
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(5, 3)
    noise = torch.tensor([0.1, 0.19, 0.21, 0.69, 0.71]).unsqueeze(-1)
    action, _ = Categorical(3).sample(logits, noise)
    assert action.tolist() == [0, 0, 1, 1, 2]


def test_a_choice_of_probability_0_is_never_taken():
    never = float("-inf")
    logits = torch.tensor([[never, 0.0, 0.3, never]]).expand(4, 4)
    noise = torch.tensor([2.0**-24, 0.3, 0.7, 1 - 2.0**-24]).unsqueeze(-1)
    action, log_prob = Categorical(4).sample(logits, noise)
    assert set(action.tolist()) <= {1, 2}
    assert torch.isfinite(log_prob).all()


def test_gaussian_equals_torch_and_samples_what_it_says():
    head = Gaussian(2)
    with torch.no_grad():
        head.log_std.copy_(torch.tensor([0.3, -1.0]))
    mean = torch.tensor([1.0, -2.0]).expand(100_000, 2)
    action, log_prob = head.sample(mean, uniform(100_000, 2))
    theirs = torch.distributions.Normal(mean, head.log_std.exp())
    torch.testing.assert_close(log_prob, theirs.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4)
    evaluated, entropy = head.evaluate(mean, action)
    torch.testing.assert_close(evaluated, log_prob)
    torch.testing.assert_close(entropy, theirs.entropy().sum(-1))
    # standard error of the mean: exp(0.3) / sqrt(100,000) = 0.004
    torch.testing.assert_close(action.mean(0), mean[0], rtol=0, atol=0.02)
    torch.testing.assert_close(action.std(0), head.log_std.exp(), rtol=0.01, atol=0)


@pytest.mark.parametrize("chunks", [1, 3])
def test_running_moments_are_those_of_everything_seen(chunks):
    rows = torch.randn(99, 4) * 5 + 1000
    moments = RunningMoments((4,))
    for part in rows.chunk(chunks):
        moments.update(part)
    moments.update(rows[:0])  # nothing seen: nothing changed
    torch.testing.assert_close(moments.mean, rows.double().mean(0))
    torch.testing.assert_close(moments.var, rows.double().var(0, correction=0))
    assert moments.count == 99


def test_normalizers_begin_as_identity_and_clip():
    obs, reward = NormalizeObs(Space("box", (2,), "float32")), NormalizeReward()
    torch.testing.assert_close(obs(torch.tensor([0.5, -3.0])), torch.tensor([0.5, -3.0]))
    assert obs(torch.tensor([50.0, -50.0])).tolist() == [10, -10]
    # Means 2 and 7, variances 1 and 0: what never changes becomes 0
    obs.update(torch.tensor([[[1.0, 7.0], [3.0, 7.0]]]), torch.ones(1, 2, dtype=torch.bool))
    assert obs(torch.tensor([4.0, 7.0])).tolist() == [2, 0]
    reward.update(torch.tensor([0.0, 8.0]))  # variance 16, deviation 4; the mean stays in
    torch.testing.assert_close(reward(torch.tensor([8.0])), torch.tensor([2.0]))


def test_encoder_flattens_boxes_and_makes_integers_one_hot():
    assert FlatEncoder(Space("box", (2, 3), "float32"))(torch.zeros(7, 5, 2, 3)).shape == (7, 5, 6)
    encoder = FlatEncoder(Space("discrete", (), "int64", nvec=(4,), start=(10,)))
    assert encoder(torch.tensor([10, 13])).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("network", [Network(), Network(shared_trunk=True, normalize_obs=True)])
def test_policy_s_views_agree(network):
    policy = build_policy(SPEC, network, seed=0)
    obs = torch.randn(6, 4)
    out = policy.act(obs, uniform(6, 1))
    log_prob, _, value = policy.evaluate(obs, out["action"])
    assert torch.equal(log_prob, out["log_prob"])
    assert torch.equal(value, out["value"])
    assert torch.equal(policy.value(obs), value)
    assert torch.equal(policy.act_greedily(obs)["action"], policy(obs)[0].argmax(-1))


def test_a_policy_is_the_same_for_the_same_seed_and_leaves_torch_s_generator_alone():
    torch.manual_seed(7)
    before = torch.rand(1)
    torch.manual_seed(7)
    a, b = (build_policy(SPEC, Network(), seed=s) for s in (1, 1))
    assert torch.equal(torch.rand(1), before)
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y)
    other = build_policy(SPEC, Network(), seed=2)
    assert not torch.equal(other.model.actor.weight, a.model.actor.weight)


def test_hidden_layers_are_orthogonal():
    weight = build_policy(SPEC, Network(), seed=0).model.actor_trunk.layers[1].weight
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(64), atol=1e-4, rtol=0)


def test_flat_weights_carry_parameters_and_normalizers():
    network = Network(normalize_obs=True, normalize_reward=True)
    ours, theirs = (
        {name: build_policy(SPEC, network, seed=seed + i) for i, name in enumerate("ab")}
        for seed in (1, 3)
    )
    ours["b"].normalize_obs.update(torch.randn(5, 2, 4), torch.ones(5, 2, dtype=torch.bool))
    memory = bytearray(FlatWeights.num_bytes(ours))
    FlatWeights(ours, memory).publish(ours)
    FlatWeights(theirs, memory).pull(theirs)
    for policy in "ab":
        for name, value in ours[policy].state_dict().items():
            assert torch.equal(value, theirs[policy].state_dict()[name]), (policy, name)


def test_actions_reach_the_environment_in_its_own_terms():
    inf = float("inf")
    box = Space("box", (2, 2), "float32", low=(-2, 0, -inf, -1), high=(2, 10, inf, inf))
    policy_action = np.array([[0.5, -3.0, 7.0, -5.0]], np.float32)
    # [-2, 2]: 0.5 * 2; [0, 10]: clipped to -1, so 0; unbounded: as is; half-bounded: clipped to -1
    np.testing.assert_allclose(ActionCodec(box).to_env(policy_action), [[[1, 0], [7, -1]]])
    discrete = Space("discrete", (), "int64", nvec=(3,), start=(5,))
    assert ActionCodec(discrete).to_env(np.array([0, 2])).tolist() == [5, 7]
    multi = Space("multi_discrete", (2,), "int64", nvec=(3, 3), start=(0, 1))
    assert ActionCodec(multi).to_env(np.array([[0, 2]])).tolist() == [[0, 3]]


def test_specs_travel_as_json():
    inf = float("inf")
    spec = EnvSpec("x", Space("box", (1,), "float32", (-inf,), (inf,)), DISCRETE)
    assert EnvSpec.from_json(spec.to_json()) == spec


def test_a_reader_that_is_overtaken_takes_the_newest_again():
    plan = plan_for(short_cartpole)
    policies = policies_for(plan)
    published = Published(policies)
    for version in range(3):
        published.publish(policies_for(plan, seed=version), version)
    pulls = []

    class Overtaken(FlatWeights):
        """While it is read, the learner publishes two more."""

        def pull(self, modules):
            super().pull(modules)
            pulls.append(published.newest)
            for version in range(3, 5) if len(pulls) == 1 else ():
                published.publish(policies_for(plan, seed=version), version)

    for part in published._parts:
        part.__class__ = Overtaken
    assert published.pull(policies) == 4
    assert pulls == [2, 4]
    expected = policy_for(plan, seed=4).state_dict()
    pulled = policies["default"].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pulled.items())
    assert published.pull(policies, 3) == 3
