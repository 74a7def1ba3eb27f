"""Gradients of the losses of PPO, APPO, A2C and IMPALA that are written out, against autograd's."""

import math

import pytest
import torch

from headrace.algos import manual_gradient, ppo
from headrace.algos.a2c import A2C
from headrace.algos.appo import APPO
from headrace.algos.impala import IMPALA
from headrace.algos.ppo import PPO
from headrace.config.algorithms import GRADIENTS, load_algorithm, name_of_config
from headrace.learner.learner import loss_of
from headrace.learner.optimizer import Optimizer
from headrace.models.fast_paths import choose
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.models.test_numpy_inference import BOX, DISCRETE, MULTI, PRODUCT, SEEN, own, trained
from tests.support import build_policy

ROWS = 300
CFG = PPO(ent_coef=0.02, vf_coef=0.7)


def minibatch_for(policy, seen, cfg):
    """What another policy did: ratios on both sides of the clip; some rows have no weight."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    obs = observations(seen, normal)
    noise = torch.rand(ROWS, policy.num_draws, generator=generator).clamp(1e-6, 1 - 1e-6)
    with torch.no_grad():
        acted = policy.act(obs, noise)
    weight = (torch.rand(ROWS, generator=generator) < 0.9).float()
    return {
        "obs": obs,
        "action": acted["action"],
        "log_prob": acted["log_prob"] + 0.3 * normal(ROWS),
        "value": (acted["value"].double() + 0.3 * normal(ROWS).double()).float(),
        "advantage": normal(ROWS),
        "target": acted["value"] + normal(ROWS),
        "weight": weight / weight.sum(),
        "clip_coef": torch.tensor(getattr(cfg, "clip_coef", 0.2)),
        "ent_coef": torch.tensor(cfg.ent_coef),
    }


def observations(seen, normal):
    if seen.kind == "dict":
        return {key: observations(part, normal) for key, part in seen.parts}
    numbers = 2 * normal(ROWS, *seen.shape)
    if seen.kind == "multi_binary":
        return (numbers > 0).to(torch.int8)
    if seen.kind == "discrete":
        return numbers.abs().long() % seen.nvec[0] + seen.start[0]
    if seen.dtype == "int8":  # a mask: each row allows the first choice of each action
        numbers[:, [first for first in (0, 3, 7) if first < seen.size]] = 1
        numbers[0] = -1  # as in a row that only resets
        return (numbers > 0).to(torch.int8)
    return (50 * numbers).clamp(0, 255).byte() if seen.dtype == "uint8" else numbers


def of_the_page(policy, minibatch, loss=ppo.loss, cfg=CFG):
    """Metrics, and gradients by name."""
    policy.zero_grad()
    total, metrics = loss(policy, minibatch, cfg)
    total.backward()
    return metrics, {name: p.grad.clone() for name, p in policy.named_parameters()}


def by_itself(gradient, policy, minibatch):
    metrics = gradient(minibatch)
    assert gradient.flat.numel() == sum(p.numel() for p in policy.parameters())
    parts = gradient.parts(gradient.flat)
    return metrics, {name: parts[p].clone() for name, p in policy.named_parameters()}


def assert_equals_the_page(spec, network, dtype, cfg=CFG):
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, spec.observation, cfg)
    policy.to(dtype)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    loss = load_algorithm(name_of_config(cfg)).losses({"policy": policy}, cfg)["policy"].function
    path, reason = choose(GRADIENTS, loss, policy, network, cfg)
    assert path, reason
    gradient = path.make(policy, network, cfg)
    metrics, plain = of_the_page(policy, minibatch, loss, cfg)
    assert 0.1 < metrics.get("clip_fraction", 0.5) < 0.9
    close = {"rtol": 1e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-9}
    for _ in range(2):  # the second in the memory of the first
        metrics_by_hand, quick = by_itself(gradient, policy, minibatch)
        assert metrics.keys() == metrics_by_hand.keys()
        for name, metric in metrics.items():
            found = torch.as_tensor(metrics_by_hand[name]).double()
            torch.testing.assert_close(found, metric.double(), rtol=1e-4, atol=1e-6)
        assert plain.keys() == quick.keys()
        for name, expected in plain.items():
            assert expected.abs().max() > 1e-5, name
            assert quick[name].dtype == dtype
            torch.testing.assert_close(quick[name], expected, **close)
    for name, tensor in policy.state_dict().items():  # moved, and nothing more
        assert tensor.equal(before[name]), name


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@both_dtypes
@pytest.mark.parametrize("action", [DISCRETE, BOX], ids=lambda space: space.kind)
@pytest.mark.parametrize(
    ("seen", "network"),
    [
        (SEEN, {}),
        (SEEN, {"hidden_sizes": (32,)}),
        (SEEN, {"hidden_sizes": (96, 64, 32)}),
        (SEEN, {"shared_trunk": True, "hidden_sizes": (48, 24)}),
        (Space("box", (2, 3), "float32"), {"normalize_obs": True}),
        (Space("box", (8,), "uint8"), {"normalize_obs": True}),
        (Space("box", (), "float32"), {"normalize_obs": True}),
        (Space("multi_binary", (4,), "int8"), {"normalize_obs": True}),
        (Space("discrete", (), "int64", nvec=(9,), start=(-2,)), {"normalize_obs": True}),
    ],
    ids=lambda of: of.describe() if isinstance(of, Space) else ",".join(of) or "default",
)
def test_equals_the_page(seen, network, action, dtype):
    assert_equals_the_page(EnvSpec("test", seen, action), Network(**network), dtype)


@both_dtypes
@pytest.mark.parametrize("activation", ["relu", "elu", "silu"])
def test_other_activations(activation, dtype):
    assert_equals_the_page(EnvSpec("test", SEEN, BOX), Network(activation=activation), dtype)


MASK = ("mask", Space("box", (DISCRETE.nvec[0],), "int8"))
MULTI_MASK = ("mask", Space("box", (sum(MULTI.nvec),), "int8"))
OF_PRODUCT = ("mask", Space("box", (sum(MULTI.nvec) + DISCRETE.nvec[0],), "int8"))
PARTS = (("a", SEEN), ("b", Space("discrete", (), "int64", nvec=(4,), start=(1,))))
SPECS = {
    "several choices": EnvSpec("test", SEEN, MULTI),
    "a Dict of actions": EnvSpec("test", SEEN, PRODUCT),
    "mask": EnvSpec("test", Space("dict", parts=(("", SEEN), MASK)), DISCRETE, mask_key="mask"),
    "mask of several choices": EnvSpec(
        "test", Space("dict", parts=(*PARTS, MULTI_MASK)), MULTI, mask_key="mask"
    ),
    "mask of a Dict of actions": EnvSpec(
        "test", Space("dict", parts=(("", SEEN), OF_PRODUCT)), PRODUCT, mask_key="mask"
    ),
    "a Dict": EnvSpec("test", Space("dict", parts=PARTS), DISCRETE),
    "a critic that sees the game": EnvSpec(
        "test", Space("dict", parts=(("", SEEN), ("state", BOX))), BOX, state_key="state"
    ),
}


@both_dtypes
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
def test_other_spaces(name, normalize, dtype):
    assert_equals_the_page(SPECS[name], Network(normalize_obs=normalize), dtype)


@both_dtypes
@pytest.mark.parametrize(
    "cfg",
    [PPO(clip_value_loss=True), A2C(ent_coef=0.1), APPO(), IMPALA(vf_coef=0.3)],
    ids=lambda cfg: name_of_config(cfg),
)
def test_other_losses(cfg, dtype):
    assert_equals_the_page(EnvSpec("test", SEEN, DISCRETE), Network(), dtype, cfg)


def test_a_value_near_the_old_one_is_not_clipped():
    """`old + (value - old)` is not always `value`, but rounding must not look like clipping."""
    cfg = PPO(clip_value_loss=True)
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network()
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, cfg)
    away = 0.19 * (2 * torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) - 1)
    with torch.no_grad():
        policy.model.critic.weight *= 0.05
        policy.model.critic.bias.zero_()
        value = policy.value(minibatch["obs"])
    minibatch |= {"value": (value.double() + away).float(), "target": value + 0.1}
    _, expected = of_the_page(policy, minibatch, cfg=cfg)
    _, found = by_itself(manual_gradient.PPOGradient(policy, network, cfg), policy, minibatch)
    for name, of in expected.items():
        torch.testing.assert_close(found[name], of, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_normalizers_are_read_when_an_update_starts(shared):
    spec, network = EnvSpec("test", SEEN, BOX), Network(normalize_obs=True, shared_trunk=shared)
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, CFG)
    gradient = manual_gradient.PPOGradient(policy, network, CFG)
    before = by_itself(gradient, policy, minibatch)[1]
    policy.normalize_obs.update(5 + 3 * torch.randn(50, 1, 6), torch.ones(50, 1, dtype=torch.bool))
    gradient.start_update()
    _, expected = of_the_page(policy, minibatch)
    _, found = by_itself(gradient, policy, minibatch)
    for name, of in expected.items():
        torch.testing.assert_close(found[name], of, rtol=1e-4, atol=2e-6)
    assert any(not of.allclose(before[name]) for name, of in expected.items())


def test_it_is_of_the_parameters_as_they_are_now():
    """They were changed in place, as an optimizer or a checkpoint does; and of fewer rows."""
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network()
    policy, other = trained(spec, network), trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, CFG)
    gradient = manual_gradient.PPOGradient(policy, network, CFG)
    by_itself(gradient, policy, minibatch)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    policy.load_state_dict(other.state_dict())
    few, none = ({n: c[:k] if c.dim() else c for n, c in minibatch.items()} for k in (50, 0))
    for rows in (minibatch, few, none, minibatch, few):
        _, expected = of_the_page(other, rows)
        _, found = by_itself(gradient, policy, rows)
        for name, of in expected.items():
            torch.testing.assert_close(found[name], of, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("num_parts", [1, 7])
def test_the_optimizer_takes_the_same_steps_with_either(num_parts):
    spec, network = EnvSpec("test", SEEN, BOX), Network()
    policies = [trained(spec, network).double() for _ in range(2)]
    minibatch = minibatch_for(policies[0].float(), SEEN, CFG)
    minibatch = {n: c.double() if c.is_floating_point() else c for n, c in minibatch.items()}
    metrics, states = [], []
    for policy, manual in zip(policies, (False, True), strict=True):
        policy.double()
        gradient = manual_gradient.PPOGradient(policy, network, CFG) if manual else None
        spec = ppo.PPOAlgorithm().losses({"policy": policy}, CFG)["policy"]
        loss = loss_of(spec, CFG, compiled=False)
        optimizer = Optimizer(loss, 0.5, num_parts, manual=gradient)
        metrics.append([optimizer.step(minibatch, 1e-2) for _ in range(3)])
        states.append({name: moment.clone() for name, moment in optimizer.state().items()})
        # A gradient that is not finite changes nothing, and is counted.
        optimizer.step(minibatch | {"target": minibatch["target"] * float("nan")}, 1e-2)
        assert float(optimizer.nonfinite) == 1 and float(optimizer.num_nonfinite()) == 1
        assert all(optimizer.state()[name].equal(moment) for name, moment in states[-1].items())
        # What is loaded is what is stepped from.
        optimizer.load_state({name: moment * 0 for name, moment in states[-1].items()})
        assert all(not moment.any() for moment in optimizer.state().values())
        optimizer.load_state(states[-1])
        metrics[-1].append(optimizer.step(minibatch, 1e-2))
    for plain, quick in zip(*metrics, strict=True):
        for name, metric in plain.items():
            found = torch.as_tensor(quick[name]).double()
            torch.testing.assert_close(found, metric.double(), rtol=1e-5, atol=1e-7)
    for plain, quick in zip(*(p.parameters() for p in policies), strict=True):
        torch.testing.assert_close(quick, plain, rtol=1e-6, atol=1e-8)
    assert list(states[0]) == list(states[1])
    for name, moment in states[0].items():
        torch.testing.assert_close(states[1][name], moment, rtol=1e-5, atol=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("advantage", float("nan")),
        ("advantage", float("inf")),
        ("log_prob", float("nan")),
        ("log_prob", float("-inf")),
        ("target", float("nan")),
        ("target", 1e30),
        ("obs", float("nan")),
    ],
)
def test_what_is_not_finite_comes_through(column, value):
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network()
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, CFG)
    row = int(minibatch["weight"].argmax())
    minibatch[column][row] = value
    gradient = manual_gradient.PPOGradient(policy, network, CFG)
    for metrics, found in (
        of_the_page(policy, minibatch),
        by_itself(gradient, policy, minibatch),
    ):
        assert not math.isfinite(metrics["loss"])
        assert not torch.isfinite(torch.nn.utils.get_total_norm(found.values()))


@pytest.mark.parametrize(
    ("seen", "network", "model", "reason"),
    [
        (SEEN, {"arithmetic": "plain"}, None, "--arithmetic plain"),
        (SEEN, {"precision": "bf16"}, None, "precision bf16"),
        (SEEN, {"hidden_sizes": ()}, None, "no hidden layer"),
        (SEEN, {"core": "lstm"}, None, "a recurrent core"),
        (SEEN, {}, own, "a network of your own"),
        (Space("box", (12, 12), "uint8"), {}, None, "images"),
    ],
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_other_networks_use_autograd(seen, network, model, reason):
    spec, network = EnvSpec("test", seen, DISCRETE), Network(**network)
    policy = build_policy(spec, network, 0, model)
    assert choose(GRADIENTS, ppo.loss, policy, network, CFG) == (None, reason)
