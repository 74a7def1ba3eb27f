"""The pages of SAC and TD3: losses and targets by hand, critics, and what their settings do."""

import copy
import dataclasses
import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.algos.critics import crossq, sac, sac_of_choices, td3
from headrace.algos.critics.sac import SAC, TQC
from headrace.algos.critics.shared import critics_loss
from headrace.algos.critics.td3 import DDPG, TD3
from headrace.config.algorithms import ALGORITHMS
from headrace.device_seeding import batch_noise
from headrace.distributed.ranks import SINGLE_RANK
from headrace.errors import ConfigError, UsageError
from headrace.models.critics.batch_norm import BatchNorm, by_batch
from headrace.models.critics.critics import Critics
from headrace.models.critics.dropout import USES, Dropout, row_keys
from headrace.models.critics.estimates import LeastOfSome, LeastValue, TruncatedQuantiles
from headrace.models.critics.heads import ExploringChoice, NoisyAction, SquashedGaussian
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.algos.reach import Reach
from tests.marks import repeats

SMALL = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "seed": 1, "quiet": True}
BOX = Space("box", (3,), "float32")
ACTION = Space("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
SPEC = EnvSpec("toy", BOX, ACTION)
NETWORK = Network(hidden_sizes=(8, 8), activation="relu")


def modules_of(algo, spec=SPEC, **settings):
    algorithm = ALGORITHMS[algo]
    config = algorithm.Config(replay_size=100, **settings)
    torch.manual_seed(0)
    policy = algorithm.build_policy(spec, NETWORK, config)
    return algorithm.build(policy, spec, NETWORK, config, 1, SINGLE_RANK), config


def of_sac(modules, target):
    """What `sac.targets` needs, with other target critics."""
    return {name: modules[name] for name in ("policy", "temperature")} | {"target": target}


def rows_of(count=5, num_noise=4):
    torch.manual_seed(1)
    return {
        "obs": torch.randn(count, 3),
        "next_obs": torch.randn(count, 3),
        "action": torch.rand(count, 2) * 2 - 1,
        "reward": torch.randn(count),
        "discount": torch.rand(count),
        "noise": torch.randn(count, num_noise),
        "weight": torch.full((count,), 1 / count),
    }


class Critic:
    """Stands in for critics that give known outputs, `[E, B, K]`, and keeps the actions."""

    def __init__(self, *values, estimate=None):
        self.outputs = torch.tensor(values)
        self.estimate = estimate or LeastValue()
        if estimate is None:
            self.outputs = self.outputs.unsqueeze(-1)

    def __call__(self, obs, action, **_):
        self.action = action
        return self.outputs

    def of_action(self, obs, action, key):
        return self(obs, action)


def test_targets_of_sac_by_hand():
    modules, _ = modules_of("sac", ent_coef=0.5)
    rows = rows_of(2) | {"reward": torch.tensor([1.0, 2.0]), "discount": torch.tensor([0.5, 0.0])}
    critic = Critic([3.0, 7.0], [4.0, 5.0])  # the least: 3, 5
    found = sac.targets(rows, **of_sac(modules, critic))
    head = modules["policy"].head
    params = modules["policy"](rows["next_obs"])[0]
    action, log_prob = (each.detach() for each in head.draw(params, rows["noise"][:, :2]))
    assert torch.equal(critic.action, action)
    expected = [1 + 0.5 * (3 - 0.5 * float(log_prob[0])), 2.0]
    assert found["target"][:, 0].tolist() == pytest.approx(expected)


def test_tqc_by_hand():
    modules, _ = modules_of("tqc", ent_coef=0.5)
    rows = rows_of(1) | {"reward": torch.tensor([1.0]), "discount": torch.tensor([0.5])}
    of = TruncatedQuantiles(3, 1)
    critic = Critic([[3.0, 7.0, 1.0]], [[4.0, 5.0, 2.0]], estimate=of)  # without 7 and 5
    found = sac.targets(rows, **of_sac(modules, critic))["target"]
    with torch.no_grad():
        params = modules["policy"](rows["next_obs"])[0]
        log_prob = modules["policy"].head.draw(params, rows["noise"][:, :2])[1]
    expected = [1 + 0.5 * (value - 0.5 * float(log_prob)) for value in (1, 2, 3, 4)]
    assert found[0].tolist() == pytest.approx(expected)
    assert of.to_improve(critic.outputs).tolist() == pytest.approx([22 / 6])
    # One critic with quantiles 0 and 1 (at 1/4 and 3/4), and the target 3: errors of 3 and 2
    of = TruncatedQuantiles(2, 0)
    loss = of.loss(torch.tensor([[[0.0, 1.0]]]), torch.tensor([[3.0]]))
    assert float(loss) == pytest.approx((0.25 * 2.5 + 0.75 * 1.5) / 2)
    loss = of.loss(torch.tensor([[[0.0, 1.0]]]), torch.tensor([[-3.0]]))
    assert float(loss) == pytest.approx((0.75 * 2.5 + 0.25 * 3.5) / 2)
    with pytest.raises(ConfigError, match=r"(?s)dropped_quantiles=25.*some are left"):
        modules_of("tqc", dropped_quantiles=25)


def test_a_target_takes_the_least_of_critics_that_are_drawn_for_each_row():
    of, outputs = LeastOfSome(4, 2), torch.randn(4, 3000, 1)
    torch.manual_seed(0)
    found = of.of_next(outputs, torch.randn(3000, 4))
    order = outputs.squeeze(-1).sort(0).values
    rank = (order < found.T).sum(0)  # of the one that was taken: 3 of 6 pairs have the least
    share = torch.bincount(rank, minlength=4) / 3000
    assert share.tolist() == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0], abs=0.03)
    assert torch.equal(of.to_improve(outputs), outputs.mean(0).squeeze(-1))
    with pytest.raises(ConfigError, match=r"(?s)critics_in_target=5.*num_critics=2"):
        modules_of("sac", critics_in_target=5)


def test_targets_of_td3_and_ddpg_by_hand():
    modules, config = modules_of("td3", target_noise=0.2, target_noise_clip=0.3)
    rows = rows_of(2, 2) | {"reward": torch.tensor([1.0, 2.0])}
    rows |= {"discount": torch.tensor([0.5, 0.0]), "noise": torch.tensor([[1.0, -9.0], [0.0, 9.0]])}
    critic, policies = Critic([3.0, 7.0], [4.0, 5.0]), [modules["policy"], modules["target_policy"]]
    with torch.no_grad():
        policies[1].model.actor.bias.copy_(torch.tensor([0.0, 2.0]))  # not the policy's own
        best = policies[1](rows["next_obs"])[0].tanh()
    of = {"policy": policies[0], "target_policy": policies[1], "target": critic}
    found = td3.targets(rows, **of, cfg=config)
    expected = (best + torch.tensor([[0.2, -0.3], [0.0, 0.3]])).clamp(-1, 1)
    torch.testing.assert_close(critic.action, expected)
    assert (critic.action == 1).any()
    assert found["target"].tolist() == [[1 + 0.5 * 3], [2.0]]
    td3.targets(rows, **of, cfg=DDPG())
    torch.testing.assert_close(critic.action, best)


def test_the_loss_of_critics_by_hand():
    found = Critic([1.0, 2.0], [3.0, 2.0])
    minibatch = {"seen": None, "action": None, "target": torch.tensor([[2.0], [4.0]])}
    minibatch["weight"] = torch.tensor([0.5, 0.5])
    total, metrics = critics_loss(found, minibatch, SAC())
    assert float(total) == (1 + 1) / 2 + (4 + 4) / 2
    assert metrics["error"].tolist() == [1.0, 2.0]
    assert float(metrics["mean_value"]) == 2.0


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_the_loss_of_the_policy_moves_no_critic(algo):
    modules, config = modules_of(algo)
    loss = ALGORITHMS[algo].losses(modules, config)["policy"]
    total, _ = loss.function(modules["policy"], rows_of(), config)
    total.backward()
    assert all(p.grad is None for p in modules["critics"].parameters())
    assert all(p.grad is None for p in modules["target"].parameters())
    gradients = [p.grad for p in modules["policy"].parameters()]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    if algo == "sac":
        assert modules["temperature"].log_alpha.grad is None


def test_the_gradient_of_the_policy_is_that_through_the_critics():
    """The frozen critics give the action the gradient that learning ones give it."""
    modules, _ = modules_of("td3")
    critics, rows = modules["critics"], rows_of()
    found = []
    for frozen in (True, False):
        action = rows["action"].clone().requires_grad_()
        critics(rows["obs"], action, frozen=frozen).sum().backward()
        found.append(action.grad)
    assert torch.equal(*found)
    one = critics(rows["obs"], rows["action"], first=1)
    torch.testing.assert_close(one, critics(rows["obs"], rows["action"])[:1])


@pytest.mark.parametrize("layer_norm", [False, True])
def test_critics_in_one_product_equal_separate_ones(layer_norm):
    critics = Critics(SPEC, NETWORK, 3, layer_norm=layer_norm).double()
    rows = {name: column.double() for name, column in rows_of().items()}
    rows |= {"seen": rows["obs"], "target": rows["reward"].unsqueeze(-1)}
    total, _ = critics_loss(critics, rows, SAC())
    total.backward()
    joined = torch.cat((rows["obs"], rows["action"]), -1)
    for number, value in enumerate(critics(rows["obs"], rows["action"])):
        layers = []
        for batched in critics.layers:
            layer = nn.Linear(*batched.weight.shape[1:], dtype=torch.float64)
            layer.weight.data.copy_(batched.weight[number].T)
            layer.bias.data.copy_(batched.bias[number, 0])
            norm = nn.LayerNorm(layer.out_features, dtype=torch.float64)
            layers += [layer, *([norm] if layer_norm else []), nn.ReLU()]
        last = 3 if layer_norm else 2  # of the modules after the last layer's
        one = nn.Sequential(*layers[: 1 - last])
        out = one(joined)
        torch.testing.assert_close(out, value, rtol=1e-9, atol=1e-9)
        ((out - rows["target"]).square().squeeze(-1) * rows["weight"]).sum().backward()
        linear = [layer for layer in one if isinstance(layer, nn.Linear)]
        for layer, batched in zip(linear, critics.layers, strict=True):
            expected = batched.weight.grad[number].T
            torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-9, atol=1e-9)


def test_the_squashed_gaussian_equals_torchs():
    head = SquashedGaussian(2).double()
    params, normal = torch.randn(6, 4).double() * 0.3, torch.randn(6, 2).double()
    action, log_prob = head.draw(params, normal)
    mean, log_std = params.chunk(2, -1)
    gaussian = torch.distributions.Normal(mean, log_std.exp())
    expected = torch.distributions.TransformedDistribution(
        gaussian, torch.distributions.TanhTransform()
    )
    torch.testing.assert_close(log_prob, expected.log_prob(action).sum(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.evaluate(params, action)[0], log_prob, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(head.mode(params), mean.tanh())
    far = torch.full((1, 4), 30.0).double()
    assert torch.isfinite(head.draw(far, torch.ones(1, 2).double())[1]).all()


@pytest.mark.parametrize("head", [SquashedGaussian(2), NoisyAction(2, 0.1)])
def test_actions_are_uniform_until_the_head_is_told(head):
    noise, params = torch.rand(1000, 2), torch.zeros(1000, head.num_params)
    head.is_random.fill_(1.0)
    assert torch.equal(head.explore(params, noise), 2 * noise - 1)
    head.is_random.fill_(0.0)
    deviation = float(head.explore(params, noise).std())
    expected = 0.1 if isinstance(head, NoisyAction) else math.sqrt(0.394)  # of tanh of a normal
    assert deviation == pytest.approx(expected, rel=0.1)


def test_the_log_probability_of_a_noisy_action_is_that_of_its_noise():
    head, params = NoisyAction(2, 0.3), torch.randn(4, 2)
    gaussian = torch.distributions.Normal(params.tanh(), 0.3)
    action = head.explore(params, torch.rand(4, 2))
    log_prob, entropy = head.evaluate(params, action)
    torch.testing.assert_close(log_prob, gaussian.log_prob(action).sum(-1))
    torch.testing.assert_close(entropy, gaussian.entropy().sum(-1))


def test_noise_belongs_to_the_step_and_the_slot():
    slot = torch.arange(512)
    noise = torch.stack([batch_noise(3, step, slot, 5) for step in range(40)])
    steps = torch.arange(40).repeat_interleave(512)
    assert torch.equal(batch_noise(3, steps, slot.repeat(40), 5), noise.flatten(0, 1))
    assert torch.equal(batch_noise(3, 7, slot[100:110], 5), noise[7, 100:110])
    numbers = noise.flatten()
    assert len(numbers.unique()) > 0.99 * len(numbers)
    assert float(numbers.mean()) == pytest.approx(0, abs=0.02)
    assert float(numbers.std()) == pytest.approx(1, abs=0.02)
    each = np.corrcoef(noise.flatten(0, 1).T.numpy()) - np.eye(5)
    assert np.abs(each).max() < 0.03


def train(path, algo, **more):
    return headrace.train(Reach, algo=algo, run_dir=path, **SMALL | {"total_env_steps": 640} | more)


SIZES = {"learning_starts": 64, "replay_ratio": 0.2, "batch_size": 32, "lr": 1e-2}


@pytest.mark.more
def test_temperature_nears_its_target_or_stays(tmp_path):
    for target, grows in ((-5.0, False), (1.0, True)):
        algo = SAC(**SIZES, target_entropy=target, initial_ent_coef=0.5)
        run = train(tmp_path / str(target), algo)
        assert (read_metrics(run.dir)[-1]["ent_coef"] > 0.5) == grows
    run = train(tmp_path / "fixed", SAC(**SIZES, ent_coef=0.3))
    assert read_metrics(run.dir)[-1]["ent_coef"] == pytest.approx(0.3)


@repeats(
    ("algo", "setting", "value"),
    [
        (SAC, "num_critics", 3),
        (TD3, "target_noise_clip", 0.01),
        (TQC, "dropped_quantiles", 10),
        (TQC, "num_quantiles", 5),
        (SAC, "critics_in_target", 1),
        (SAC, "layer_norm", True),
        (SAC, "tau", 0.1),
        (SAC, "policy_delay", 2),
        (SAC, "ent_coef", 0.1),
        (SAC, "initial_ent_coef", 0.1),
        (SAC, "target_entropy", -3.0),
        (SAC, "max_grad_norm", 0.1),
        (SAC, "n_step", 3),
        (SAC, "priority_alpha", 0.6),
        (SAC, "lr_schedule", "linear"),
        (TD3, "exploration_noise", 0.5),
        (TD3, "target_noise", 0.5),
        (TD3, "policy_delay", 1),
        (DDPG, "target_noise", 0.5),
    ],
    keep=2,
)
def test_every_setting_changes_what_is_learned(tmp_path, algo, setting, value):
    learned = []
    for name, more in (("base", {}), ("changed", {setting: value})):
        run = train(tmp_path / name, algo(**SIZES, **more))
        learned.append(checkpoint.newest(run.dir).tensors("policy_default"))
    assert not all(torch.equal(learned[0][name], learned[1][name]) for name in learned[0])


def test_a_batch_is_normalized_by_its_own_moments_only_while_it_is_learned_from():
    torch.manual_seed(0)
    layer = BatchNorm(2, 1, 3)
    features = torch.randn(2, 400, 3) * torch.tensor([1.0, 2.0, 3.0]) + 5
    assert torch.allclose(layer(features), features, rtol=1e-2)  # running moments of 0 and 1
    with by_batch(layer):
        for _ in range(600):
            found = layer(features)
    torch.testing.assert_close(found.mean(1), torch.zeros(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.std(1), torch.ones(2, 3), atol=1e-2, rtol=0)
    torch.testing.assert_close(layer(features), found, atol=2e-2, rtol=0)
    assert float(layer.num_batches) == 600
    # Once running moments have settled, those of an odd batch are corrected towards them
    layer.num_batches.fill_(1e6)
    expected = layer(2 * features)
    with by_batch(layer):
        odd = layer(2 * features)
    torch.testing.assert_close(odd.mean(1), expected.mean(1).clamp(max=5.0), atol=0.1, rtol=0)
    torch.testing.assert_close(odd.std(1), expected.std(1), atol=0.1, rtol=0)
    features.requires_grad_()
    layer(features, frozen=True).sum().backward()
    assert layer.weight.grad is None
    assert features.grad.abs().min() > 0


def test_crossq_takes_values_of_both_observations_from_one_pass():
    modules, config = modules_of("crossq", ent_coef=0.5)
    policy, critics = modules["policy"], modules["critics"]
    rows = rows_of(6)
    rows |= {"next_action": torch.rand(6, 2), "next_log_prob": torch.randn(6)}
    before = critics.norms[0].mean.clone()
    both = torch.cat((rows["obs"], rows["next_obs"]))
    actions = torch.cat((rows["action"], rows["next_action"]))
    other = copy.deepcopy(critics)
    with torch.no_grad(), by_batch(other):
        now, after = other(both, actions).squeeze(-1).chunk(2, 1)
    value = after.amin(0) - 0.5 * rows["next_log_prob"]
    target = rows["reward"] + rows["discount"] * value
    expected = ((now - target).square().sum(0) / 6).sum()
    of = {"policy": policy, "temperature": modules["temperature"]}
    total, metrics = crossq.critics_loss(critics, rows, config, **of)
    assert float(total.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert float(metrics["mean_value"]) == pytest.approx(float(now.mean()), rel=1e-4)
    assert not torch.equal(critics.norms[0].mean, before)
    assert "target" not in modules


def test_the_mean_gradient_of_crossq_s_critics_is_younger_than_that_of_sac_s(tmp_path):
    for algo, beta1 in ((headrace.CROSSQ, 0.5), (SAC, 0.9)):
        config = algo(**SIZES | {"replay_ratio": 0.002})
        run = train(tmp_path / algo.__name__, config)
        assert run.summary["learner_steps"] == 1
        state = checkpoint.newest(run.dir).tensors("learner_default")
        means = [name for name in state if "critics" in name and name.endswith("exp_avg")]
        for name in means:
            gradient = (state[f"{name}_sq"] / 0.001).sqrt()
            torch.testing.assert_close(state[name].abs(), (1 - beta1) * gradient)
        assert len(means) >= 6


def test_the_policy_of_crossq_learns_moments_and_leaves_those_of_the_critics():
    modules, config = modules_of("crossq")
    policy, critics = modules["policy"], modules["critics"]
    before = {name: buffer.clone() for name, buffer in critics.named_buffers()}
    mean = policy.model.actor.norm.mean.clone()
    of = {"critics": critics, "temperature": modules["temperature"]}
    crossq.actor_loss(policy, rows_of(6), config, **of)[0].backward()
    assert all(torch.equal(before[name], buffer) for name, buffer in critics.named_buffers())
    assert all(parameter.grad is None for parameter in critics.parameters())
    assert all(parameter.grad is not None for parameter in policy.parameters())
    assert not torch.equal(policy.model.actor.norm.mean, mean)
    noise = torch.rand(6, 2)
    acted = policy.act(rows_of(6)["obs"], noise)["action"]
    alone = policy.act(rows_of(6)["obs"][:1], noise[:1])["action"]
    torch.testing.assert_close(alone, acted[:1])  # it acts by running moments


class Unbounded(Reach):
    action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def test_crossq_learns_in_bf16_and_from_whole_minibatches(tmp_path):
    more = SMALL | {"total_env_steps": 256, "learning_starts": 64}
    run = headrace.train(
        Reach, algo="crossq", precision="bf16", run_dir=tmp_path / "run", replay_ratio=0.1, **more
    )
    assert math.isfinite(read_metrics(run.dir)[-1]["td_error"])
    moments = checkpoint.newest(run.dir).tensors("learner_default")
    assert {t.dtype for name, t in moments.items() if name.endswith((".mean", ".var"))} == {
        torch.float32
    }
    with pytest.raises(ConfigError, match=r"(?s)moments of whole minibatches.*--algo sac"):
        headrace.train(
            Reach, algo="crossq", run_dir=tmp_path / "parts", num_accumulation_steps=2, **more
        )


@pytest.mark.parametrize("algo", ["sac", "tqc", "crossq", "td3", "ddpg"])
def test_other_actions_are_refused_in_words(tmp_path, algo):
    with pytest.raises(ConfigError, match=r"(?s)finite bounds.*without.*--algo ppo"):
        headrace.train(Unbounded, algo=algo, run_dir=tmp_path / "run", **SMALL)
    if algo != "sac":
        with pytest.raises(ConfigError, match=r"(?s)Box action space.*Discrete\(2\).*--algo sac"):
            headrace.train("CartPole-v1", algo=algo, run_dir=tmp_path / "run", **SMALL)
    quantiles = SAC(num_quantiles=5)
    with pytest.raises(ConfigError, match=r"(?s)num_quantiles=5.*choices.*Leave them"):
        headrace.train("CartPole-v1", algo=quantiles, run_dir=tmp_path / "run", **SMALL)


@pytest.mark.parametrize(
    ("algo", "settings", "words"),
    [
        ("sac", {"ent_coef": 0.1, "target_entropy": -2.0}, "target_entropy=-2.0.*ent_coef=0.1"),
        ("sac", {"ent_coef": 0.1, "initial_ent_coef": 0.5}, "initial_ent_coef.*Use --ent-coef 0,"),
        ("sac", {"dropped_quantiles": 1}, "dropped_quantiles=1.*num_quantiles=1"),
        ("sac", {"burn_in": 3}, "burn_in=3 has no effect with core='none'.*Use --core lstm"),
        ("sac", {"priority_beta": 0.5}, "priority_beta=0.5.*priority_alpha=0.0"),
        ("ddpg", {"target_noise_clip": 0.1}, "target_noise_clip=0.1.*target_noise=0.0"),
        ("sac", {"dropout": 1.0}, "dropout=1.0: expected less than 1"),
        ("tqc", {"critics_in_target": 1}, "has no effect with num_quantiles=25"),
        (
            "crossq",
            {"dropped_quantiles": 3},
            "dropped_quantiles=3 has no effect with algo='crossq'",
        ),
        ("crossq", {"tau": 0.01}, "tau=0.01 has no effect with algo='crossq'.*leave --tau out"),
        ("sac", {"initial_ent_coef": 0.0}, "initial_ent_coef=0.0.*at least 1e-06"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, algo, settings, words):
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        headrace.train(
            Reach, algo=algo, run_dir=tmp_path / "run", total_env_steps=640, learning_starts=64,
            **SMALL, **settings,
        )  # fmt: skip


@pytest.mark.parametrize("algo", ["crossq", "redq", "droq", "tqc", "ddpg"])
def test_a_preset_of_sac_or_td3_serves_their_children(tmp_path, algo):
    of_run = {"total_env_steps": 8, "num_envs": 2, "num_steps": 1, "learning_starts": 2}
    run = headrace.train(
        "headrace/Pendulum-v1", algo=algo, run_dir=tmp_path / "run", quiet=True, **of_run
    )
    settings = json.loads((run.dir / "config.json").read_text())["settings"]
    assert settings["replay_ratio"] == (20 if algo in ("redq", "droq") else 1 / 16)


def test_dropout_drops_its_share_of_the_units_by_the_keys_of_rows():
    torch.manual_seed(0)
    layer = Dropout(0.1, 2, 300)
    keys = row_keys(batch_noise(1, 5, torch.arange(2000), USES))
    units = torch.rand(2, 2000, 300) + 1
    dropped = layer(units, keys[:, 0]) == 0
    torch.testing.assert_close(layer(units, keys[:, 0])[~dropped], (units / 0.9)[~dropped])
    assert torch.equal(layer(units[:1], keys[:, 0]) == 0, dropped[:1])  # the first network alone
    share = dropped.float()
    assert share.mean() == pytest.approx(0.1, abs=0.001)
    assert share.mean((0, 2)).std() == pytest.approx((0.1 * 0.9 / 600) ** 0.5, rel=0.2)  # of rows
    assert share.mean(1).std() == pytest.approx((0.1 * 0.9 / 2000) ** 0.5, rel=0.2)  # of units
    # Two units, two rows and two passes are dropped together as often as by chance
    for axis in (1, 2):
        pair = share.roll(1, axis) * share
        assert pair.mean() == pytest.approx(0.01, abs=0.0005)
    for other in keys.T[1:]:
        assert (share * (layer(units, other) == 0)).mean() == pytest.approx(0.01, abs=0.0005)


def test_each_pass_of_critics_drops_other_units():
    modules, config = modules_of("droq", dropout=0.5)
    policy, critics, target = (modules[name] for name in ("policy", "critics", "target"))
    rows = rows_of(4, 2 * 2 + 2)
    used = []
    for layer in (critics.dropout[0], target.dropout[0]):
        layer.register_forward_pre_hook(lambda _, args: used.append(args[1]))
    rows["row_keys"] = row_keys(torch.randn(4, USES))
    rows |= sac.targets(rows, **of_sac(modules, target))
    critics_loss(critics, rows, config)
    of = {"critics": critics, "temperature": modules["temperature"]}
    sac.actor_loss(policy, rows, config, **of)
    assert torch.equal(torch.stack(used, 1), rows["row_keys"])
    same = critics.of_action(rows["seen"], rows["action"], rows["row_keys"][:, 1])
    assert not torch.equal(same, critics.of_action(rows["seen"], rows["action"]))


CHOICES = EnvSpec("choices", BOX, Space("discrete", (), "int64", nvec=(3,)))


def test_sac_of_choices_by_hand():
    modules, config = modules_of("sac", CHOICES, ent_coef=0.5)
    policy, temperature = modules["policy"], modules["temperature"]
    rows = rows_of(2) | {"reward": torch.tensor([1.0, 2.0]), "discount": torch.tensor([0.5, 0.0])}
    with torch.no_grad():
        probability = policy(rows["obs"])[0].softmax(-1)
        after = policy(rows["next_obs"])[0].softmax(-1)
    outputs = torch.tensor([[[1.0, 5.0, 3.0]] * 2, [[2.0, 4.0, 9.0]] * 2]).unsqueeze(-1)
    least = torch.tensor([1.0, 4.0, 3.0])

    def critic(obs):
        return outputs

    of = {"policy": policy, "target": critic, "temperature": temperature}
    found = sac_of_choices.targets(rows, **of)["target"]
    value = (after * (least - 0.5 * after.log())).sum(-1)
    assert found[:, 0].tolist() == pytest.approx([1 + 0.5 * float(value[0]), 2.0])
    of = {"critics": critic, "temperature": temperature, "target_share": 0.7}
    total, metrics = sac_of_choices.actor_loss(policy, rows, config, **of)
    entropy = -(probability * probability.log()).sum(-1)
    expected = -(0.5 * entropy + (probability * least).sum(-1)).mean()
    assert float(total.detach()) == pytest.approx(float(expected))
    missing = 0.7 * math.log(3) - entropy
    assert metrics["missing_entropy"].tolist() == pytest.approx(missing.tolist())
    critics = modules["critics"]
    chosen = torch.tensor([2, 0])
    of_each = critics(rows["obs"])
    taken = critics.of_action(rows["obs"], chosen)
    assert torch.equal(taken[:, 0], of_each[:, 0, 2])
    assert torch.equal(taken[:, 1], of_each[:, 1, 0])


def test_choices_that_are_not_allowed_are_never_taken_and_count_for_nothing():
    head, noise = ExploringChoice(4), torch.rand(500, 1)
    likes_0 = torch.randn(500, 4) + torch.tensor([3.0, 0.0, 0.0, 0.0])
    params = head.masked(likes_0, torch.tensor([True, False, True, False]))
    for is_random in (0.0, 1.0):
        head.is_random.fill_(is_random)
        taken = head.explore(params, noise)
        assert set(taken.tolist()) == {0, 2}
    assert int((taken == 0).sum()) == pytest.approx(250, abs=60)  # at random: as often as others
    log_prob, entropy = head.evaluate(params, taken)
    assert torch.isfinite(log_prob).all()
    assert float(entropy.max()) <= math.log(2) + 1e-6


def test_targets_of_masked_choices_are_finite_whatever_alpha_is():
    parts = (("obs", BOX), ("mask", Space("multi_binary", (3,), "int8")))
    seen = Space("dict", parts=parts)
    masked = dataclasses.replace(CHOICES, observation=seen, mask_key="mask")
    modules, _ = modules_of("sac", masked, ent_coef=5.0)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.int8)
    obs = {"obs": torch.randn(2, 3), "mask": mask}
    rows = rows_of(2) | {"obs": obs, "next_obs": obs, "discount": torch.tensor([0.5, 0.5])}
    outputs = torch.tensor([[[1.0, 5.0, 3.0]] * 2]).unsqueeze(-1)
    policy, temperature = modules["policy"], modules["temperature"]
    of = {"policy": policy, "target": lambda obs: outputs, "temperature": temperature}
    found = sac_of_choices.targets(rows, **of)["target"][:, 0]
    with torch.no_grad():
        p = policy(obs)[0][0].softmax(-1)[[0, 2]]
    value = (p * (torch.tensor([1.0, 3.0]) - 5.0 * p.log())).sum()
    assert found.tolist() == pytest.approx(
        [float(rows["reward"][0] + 0.5 * value), float(rows["reward"][1])]
    )


@pytest.mark.more
def test_sac_learns_choices(tmp_path):
    sizes = SIZES | {"lr": 1e-3, "learning_starts": 200, "replay_ratio": 0.5}
    run = headrace.train(
        "CartPole-v1", algo=SAC(**sizes), run_dir=tmp_path / "run",
        **SMALL | {"total_env_steps": 4_000},
    )  # fmt: skip
    rows = read_metrics(run.dir)
    assert np.mean(run.evaluate(episodes=10).returns) > 3 * rows[3]["mean_return"]
    assert 0 < rows[-1]["entropy"] < math.log(2)


class Own(nn.Module):
    """A network of one's own, with so many parameters for each component of an action."""

    def __init__(self, spec, of_each):
        super().__init__()
        self.layer = nn.Linear(spec.seen.size, of_each * spec.action.size)

    def forward(self, obs):
        params = self.layer(obs)
        return params, params.sum(-1)


def test_a_network_of_ones_own_learns(tmp_path):
    for algo, of_each in ((SAC(**SIZES), 2), (TD3(**SIZES), 1)):
        run = train(tmp_path / str(of_each), algo, model=lambda spec, n=of_each: Own(spec, n))
        assert run.summary["learner_steps"] == int(0.2 * (640 - 64))
    with pytest.raises(UsageError, match=r"\[n, 4\]"):
        train(tmp_path / "wrong", SAC(**SIZES), model=lambda spec: Own(spec, 1))
