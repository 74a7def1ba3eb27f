"""PPO's page: the loss worked out by hand, and every setting seen to do something."""

import math

import pytest
import torch

from headrace import batch
from headrace.algos import a2c, ppo, targets
from headrace.algos.a2c import A2C
from headrace.algos.ppo import PPO
from headrace.config.algorithms import load_algorithm, name_of_config
from headrace.config.resolve import resolve
from headrace.learner.optimizer import Optimizer
from tests.support import inline, learn_once, learner_for, plan_for, policy_for, short_cartpole


class TwoRows:
    """Stands in for a policy that gives two rows known log-probs, entropies and values."""

    def __init__(self, log_prob, entropy, value):
        self.result = tuple(torch.tensor(x) for x in (log_prob, entropy, value))

    def evaluate(self, _obs, _action):
        return self.result


def minibatch(ent_coef=0.0, **columns):
    rows = {"obs": torch.zeros(2, 1), "action": torch.zeros(2), "weight": torch.tensor([0.5, 0.5])}
    columns |= {"clip_coef": 0.2, "ent_coef": ent_coef}
    return rows | {name: torch.tensor(column) for name, column in columns.items()}


def test_the_loss_by_hand():
    # ratios exp(log 1.5) = 1.5 and 0.5; advantages 2 and -1; clipped to [0.8, 1.2]:
    #   row 0: min(1.5 * 2, 1.2 * 2) = 2.4    row 1: min(0.5 * -1, 0.8 * -1) = -0.8   mean 0.8
    # values 1 and 3 against targets 2 and 2: half the mean of 1 and 1 is 0.5; entropies 0.7, 0.3
    policy = TwoRows([math.log(1.5), math.log(0.5)], [0.7, 0.3], [1.0, 3.0])
    rows = minibatch(
        log_prob=[0.0, 0.0], value=[1.0, 2.0], advantage=[2.0, -1.0], target=[2.0, 2.0],
        ent_coef=0.1,
    )  # fmt: skip
    total, metrics = ppo.loss(policy, rows, PPO(vf_coef=0.5))
    assert float(total) == pytest.approx(-0.8 + 0.5 * 0.5 - 0.1 * 0.5)
    assert float(metrics["policy_loss"]) == pytest.approx(-0.8)
    assert float(metrics["value_loss"]) == pytest.approx(0.5)
    assert float(metrics["entropy"]) == pytest.approx(0.5)
    assert float(metrics["clip_fraction"]) == 1.0
    # (r - 1) - log r: 0.5 - 0.405465 = 0.094535 and -0.5 + 0.693147 = 0.193147; mean 0.143841
    assert float(metrics["approx_kl"]) == pytest.approx(0.143841, abs=1e-5)


def test_the_clipped_value_loss_by_hand():
    # Row 0: value moved from 1 to 2, clipped to 1.2; target 3: max((2-3)², (1.2-3)²) = 3.24.
    # Row 1: unmoved at 2, target 2: 0. Half of the mean: 0.81; without the clip 0.25.
    policy = TwoRows([0.0, 0.0], [0.0, 0.0], [2.0, 2.0])
    rows = minibatch(log_prob=[0.0, 0.0], value=[1.0, 2.0], advantage=[0.0, 0.0], target=[3.0, 2.0])
    for cfg, expected in ((PPO(clip_value_loss=True), 0.81), (PPO(), 0.25)):
        assert float(ppo.loss(policy, rows, cfg)[1]["value_loss"]) == pytest.approx(expected)


def one_update(cfg, progress=0.0, change=lambda experience: None):
    plan = plan_for(short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4)
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    experience = batch.join(collector.collect().fragments, torch.device("cpu"))
    collector.close()
    change(experience)
    metrics = learn_once(
        ppo.PPOAlgorithm(), policy, experience, cfg,
        lambda epochs: torch.arange(32).unsqueeze(1).repeat(epochs, 1, 4), progress=progress,
    )  # fmt: skip
    return policy.state_dict(), {name: float(value) for name, value in metrics.items()}


def test_epochs_end_once_the_kl_is_too_large():
    _, free = one_update(PPO(lr=1e-2))
    assert free["num_epochs"] == 4
    assert free["approx_kl"] > 0.001
    assert one_update(PPO(lr=1e-2, target_kl=1e-4))[1]["num_epochs"] == 1
    assert one_update(PPO(lr=1e-2, target_kl=10.0))[1]["num_epochs"] == 4


def test_schedules_fall_to_0_or_stay():
    falling = PPO(lr=0.1, lr_schedule="linear", clip_coef=0.4, clip_schedule="linear")
    for progress, lr, clip in ((0.0, 0.1, 0.4), (0.75, 0.025, 0.1), (1.0, 0.0, 0.0)):
        _, metrics = one_update(falling, progress)
        assert metrics["lr"] == pytest.approx(lr)
        assert metrics["clip_coef"] == pytest.approx(clip)
    _, metrics = one_update(PPO(lr=0.1, clip_coef=0.4), 0.75)
    assert (metrics["lr"], metrics["clip_coef"]) == (pytest.approx(0.1), pytest.approx(0.4))
    before, _ = one_update(PPO(lr=0.0))
    after, _ = one_update(falling, 1.0)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "setting",
    [
        {"lr": 1e-2},
        {"num_epochs": 2},
        {"num_minibatches": 2},
        {"gamma": 0.5},
        {"gae_lambda": 0.5},
        {"clip_coef": 0.001},
        {"normalize_advantage": False},
        {"ent_coef": 0.5},
        {"vf_coef": 5.0},
        {"max_grad_norm": 1e-5},
    ],
    ids=str,
)
def test_every_setting_changes_what_is_learned(setting):
    base, _ = one_update(PPO())
    other, _ = one_update(PPO(**setting))
    assert not all(torch.equal(base[name], other[name]) for name in base)


def test_rows_that_are_not_valid_are_not_learned_from():
    def cut(experience):
        experience.valid[5:9] = False

    def cut_and_spoil(experience):
        cut(experience)
        experience.stored_outputs["log_prob"][5:9] = 3.0
        experience.action[5:9] = 1

    whole, _ = one_update(PPO())
    one, _ = one_update(PPO(), change=cut)
    other, _ = one_update(PPO(), change=cut_and_spoil)
    assert not torch.equal(whole["model.actor.weight"], one["model.actor.weight"])
    for name in one:
        assert torch.equal(one[name], other[name]), name


class Times(torch.nn.Module):
    """A loss: what a layer makes of the factors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, minibatch):
        return self.layer(minibatch["factor"]).sum(), {}


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    loss = Times(torch.nn.Linear(3, 1))
    layer, optimizer = loss.layer, Optimizer(loss, max_grad_norm=1.0)

    def step(factor):
        return optimizer.step({"factor": torch.full((3,), factor)}, lr=0.1)["grad_norm"]

    step(1.0)
    before = {k: v.clone() for k, v in (layer.state_dict() | optimizer.state()).items()}
    assert not torch.isfinite(step(float("nan")))
    after = layer.state_dict() | optimizer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert float(optimizer.nonfinite) == 1
    step(1.0)
    assert not torch.equal(before["weight"], layer.weight)
    assert float(optimizer.nonfinite) == float(optimizer.num_nonfinite()) == 1
    with torch.no_grad():
        layer.weight[0, 0] = float("inf")
    assert float(optimizer.num_nonfinite()) == 2


def test_gradients_are_clipped_by_their_norm():
    loss = Times(torch.nn.Linear(1, 1, bias=False))
    layer, optimizer = loss.layer, Optimizer(loss, max_grad_norm=0.5)
    norm = optimizer.step({"factor": torch.tensor([8.0])}, lr=0.1)["grad_norm"]
    assert float(norm) == pytest.approx(8.0)  # as it was before
    assert float(layer.weight.grad.abs()) == pytest.approx(0.5)


@pytest.mark.parametrize(("page", "cfg"), [(ppo, PPO(num_minibatches=8)), (a2c, A2C())])
def test_many_rows_that_are_not_valid_are_left_out(page, cfg, monkeypatch):
    """Some minibatches have none that is; every rank takes a step with one row of weight 0 then."""
    _, policy, experience = experience_of()
    experience.valid[:] = torch.rand(32, 4, generator=torch.manual_seed(0)) < 0.7
    experience.valid[4:8] = False  # a minibatch
    gradients, rows = [], []

    def step(minibatch, lr):
        policy.zero_grad()
        total, metrics = page.loss(policy, minibatch, cfg)
        total.backward()
        gradients[-1].append([p.grad.clone() for p in policy.parameters()])
        rows[-1].append(len(minibatch["weight"]))
        return metrics

    algorithm = load_algorithm(name_of_config(cfg))
    for many in (0.125, 2.0):
        monkeypatch.setattr(targets, "_MANY", many)
        gradients.append([])
        rows.append([])
        learn_once(
            algorithm, policy, experience, cfg,
            lambda epochs: torch.arange(32).unsqueeze(1).repeat(epochs, 1, 4), step=step,
        )  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    valid = [int(part.sum()) for part in experience.valid.chunk(8 if page is ppo else 1)]
    assert rows[0] == [max(1, count) for count in valid] * (4 if page is ppo else 1)
    assert set(rows[1]) == {16 if page is ppo else 128}


def experience_of(num_steps=32):
    """A fragment of CartPole by an untrained policy, and its plan."""
    plan = plan_for(short_cartpole, num_steps=num_steps, num_envs=4, envs_per_vector=4)
    collector, policy = inline(plan), policy_for(plan)
    collector.publish({"default": policy}, 0)
    experience = batch.join(collector.collect().fragments, torch.device("cpu"))
    collector.close()
    return plan, policy, experience


def test_columns_that_are_picked_at_once_or_one_by_one_are_the_same(monkeypatch):
    _, policy, experience = experience_of()
    experience.valid[3:9, 1] = False
    seen = []

    def step(minibatch, lr):
        seen[-1].append({name: column.clone() for name, column in minibatch.items()})
        return {"approx_kl": 0.0}

    for most_bytes in (targets._SMALL, 0):
        monkeypatch.setattr(targets, "_SMALL", most_bytes)
        seen.append([])
        learn_once(
            load_algorithm("ppo"), policy, experience, PPO(num_minibatches=8),
            lambda epochs: torch.stack([torch.randperm(32, generator=torch.manual_seed(e))
                                        .unsqueeze(1).expand(-1, 4) for e in range(epochs)]),
            step=step,
        )  # fmt: skip
    at_once, one_by_one = seen
    assert len(at_once) == 32 and at_once[0]["obs"].shape[1:] == (4,)
    for one, other in zip(at_once, one_by_one, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_updates_with_a_written_out_gradient_equal_those_with_autograd(algo):
    """Of a learner, whose normalizer changes between updates."""
    plan, _, experience = experience_of()
    found = []
    for arithmetic in ("auto", "plain"):
        settings = resolve(
            {"env": "cut", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4, "algo": algo}
            | {"normalize_obs": True, "arithmetic": arithmetic, "lr": 1e-3}
        )
        learner = learner_for(settings, plan.spec, dtype=torch.float64)
        for update in range(3):
            experience.obs += 0.5  # so that the moments move
            learner.update(learner.assemble([experience]), 128 * update, 128)
        experience.obs -= 1.5
        found.append(learner.policies["default"].state_dict())
        assert (
            learner.learners["default"]
            .gradients["policy"]
            .startswith({"auto": "manual", "plain": "autograd"}[arithmetic])
        )
    for name, of in found[0].items():
        torch.testing.assert_close(of, found[1][name], rtol=1e-6, atol=1e-7, msg=name)
