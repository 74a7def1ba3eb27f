"""DQN's loss with its gradient written out, and its targets, against the page's own."""

import copy

import pytest
import torch

from headrace.algos.action_values import dqn, dqn_manual_gradient
from headrace.algos.action_values.dqn import DQN
from headrace.config.algorithms import GRADIENTS, TARGETS
from headrace.learner.learner import loss_of
from headrace.learner.optimizer import Optimizer
from headrace.models.action_values.value_distributions import Quantiles
from headrace.models.fast_paths import choose
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.marks import repeats
from tests.models import test_manual_gradient
from tests.models.test_manual_gradient import by_itself
from tests.models.test_q_policy import SEEN, SPEC, policy_with

ROWS = 300
CFG = DQN()
NETWORK = Network(activation="relu")
NINE = Space("discrete", (), "int64", nvec=(9,), start=(0,))


def minibatch_for(policy, seen=SEEN, rows=ROWS):
    """Errors within ±1 and beyond."""
    generator = torch.Generator().manual_seed(7)

    def observations(space):
        if space.kind == "dict":
            return {key: observations(part) for key, part in space.parts}
        if space.kind == "discrete":
            return torch.randint(0, space.nvec[0], (rows,), generator=generator)
        return 2 * torch.randn(rows, *space.shape, generator=generator)

    obs = observations(seen)
    target = 2 * torch.randn(rows, generator=generator)
    return {
        "obs": obs,
        "action": torch.randint(0, 5, (rows,), generator=generator),
        "target": target,
        "target_mean": target,
        "weight": torch.rand(rows, generator=generator) / rows,
    }


def of_the_page(policy, minibatch, loss=dqn.loss, cfg=CFG):
    """Metrics, and gradients by name."""
    return test_manual_gradient.of_the_page(policy, minibatch, loss, cfg)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("seen", "network", "options"),
    [
        (SEEN, {}, {}),
        (SEEN, {"hidden_sizes": ()}, {}),
        (SEEN, {"hidden_sizes": (96, 64, 32)}, {}),
        (SEEN, {"hidden_sizes": (96, 64, 32)}, {"layer_norm": True}),
        (SEEN, {"hidden_sizes": ()}, {"layer_norm": True}),
        (SEEN, {"activation": "tanh"}, {}),
        (SEEN, {"activation": "silu", "hidden_sizes": (32, 32)}, {"layer_norm": True}),
        (SEEN, {"normalize_obs": True}, {}),
        (NINE, {}, {}),
        (Space("box", (), "float32"), {}, {}),
        (Space("box", (2, 3), "float32"), {}, {}),
        (Space("dict", parts=(("a", SEEN), ("b", NINE))), {}, {}),
    ],
    ids=["two", "none", "three", "layer norm", "none, layer norm", "tanh", "silu, layer norm",
         "normalized", "discrete", "number", "matrix", "dict"],
)  # fmt: skip
def test_equals_the_page(seen, network, options, dtype):
    network = Network(**{"activation": "relu"} | network)
    spec = EnvSpec("test", seen, SPEC.action)
    policy = policy_with(network, spec=spec, **options).to(dtype)
    torch.manual_seed(0)
    if options:  # gains and shifts unlike the first, so that none is left out
        for norm in policy.model.trunk.norms:
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    minibatch = minibatch_for(policy, seen)
    expected = of_the_page(policy, minibatch)
    gradient = dqn_manual_gradient.Gradient(policy, network, CFG)
    by_itself(gradient, policy, minibatch)
    found = by_itself(gradient, policy, minibatch)  # in the memory of the first
    limit = GRADIENTS[-1].tolerance[dtype]
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            value = value.detach()
            given = torch.as_tensor(got[name], dtype=value.dtype)
            torch.testing.assert_close(given, value, rtol=limit, atol=1e-6, msg=name)


@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_targets_equal_the_page(double_q, layer_norm, dtype):
    cfg = DQN(double_q=double_q)
    torch.manual_seed(1)
    policy, target = (policy_with(NETWORK, layer_norm=layer_norm).to(dtype) for _ in range(2))
    target.requires_grad_(False)
    for p in target.parameters():
        p.add_(0.1 * torch.randn_like(p))
    losses = dqn.DQNAlgorithm().losses({"policy": policy, "target": target}, cfg)
    reference = losses["policy"].prepare
    path, _ = choose(TARGETS, reference, NETWORK)
    of_path = path.make(NETWORK)
    dqn_manual_gradient.Gradient(policy, NETWORK, cfg)  # moves the weights before the first use
    pairs = []
    for rows in (ROWS, ROWS, 7, 0):
        minibatch = {
            "obs": 2 * torch.randn(rows, *SEEN.shape),
            "next_obs": 2 * torch.randn(rows, *SEEN.shape),
            "reward": torch.randn(rows),
            "discount": torch.rand(rows),
        }
        pairs.append((of_path(minibatch), reference(minibatch)))
    for found, expected in pairs:  # after all passes, which use the same memory
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            limit = path.tolerance[dtype]
            torch.testing.assert_close(found[name], value, rtol=limit, atol=limit, msg=name)


@pytest.mark.parametrize("rows", [ROWS, 0])  # a rank may have none
def test_metrics_are_means_by_share_where_rows_have_one(rows):
    policy = policy_with(NETWORK)
    minibatch = minibatch_for(policy, rows=rows)
    minibatch["share"] = torch.rand(rows) / max(rows, 1)
    expected, _ = of_the_page(policy, minibatch)
    gradient = dqn_manual_gradient.Gradient(policy, NETWORK, CFG)
    metrics = gradient(minibatch)
    for name, value in expected.items():
        given = torch.as_tensor(metrics[name], dtype=value.dtype)
        torch.testing.assert_close(given, value.detach(), msg=name)


@repeats("num_parts", [3, 1])
def test_the_optimizer_takes_the_same_steps_with_either(num_parts):
    weights = []
    for is_manual in (False, True):
        policy = policy_with(NETWORK)
        manual = dqn_manual_gradient.Gradient(policy, NETWORK, CFG) if is_manual else None
        modules = {"policy": policy, "target": copy.deepcopy(policy)}
        loss = loss_of(dqn.DQNAlgorithm().losses(modules, CFG)["policy"], CFG, compiled=False)
        optimizer = Optimizer(loss, 0.1, num_parts, manual)
        for _ in range(5):
            minibatch = minibatch_for(policy)
            metrics = optimizer.step(minibatch, 1e-2)
            assert metrics["error"].shape == (ROWS,)
        weights.append({name: p.detach().clone() for name, p in policy.named_parameters()})
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)


def test_a_copy_has_weights_of_its_own():
    """The target network is one, and it is made before or after the vector of all parameters."""
    policy = policy_with(NETWORK)
    before = copy.deepcopy(policy)
    gradient = dqn_manual_gradient.Gradient(policy, NETWORK, CFG)
    after = copy.deepcopy(policy)
    gradient.parameters.add_(1)
    for p, q, r in zip(*(m.parameters() for m in (policy, before, after)), strict=True):
        torch.testing.assert_close(p, q + 1)
        torch.testing.assert_close(p, r + 1)


@pytest.mark.parametrize("column", ["target", "weight"])
def test_what_is_not_finite_comes_through(column):
    policy = policy_with(NETWORK)
    minibatch = minibatch_for(policy)
    minibatch[column] = minibatch[column].clone()
    minibatch[column][3] = float("nan")
    gradient = dqn_manual_gradient.Gradient(policy, NETWORK, CFG)
    gradient(minibatch)
    assert not torch.linalg.vector_norm(gradient.flat).isfinite()


@pytest.mark.parametrize(
    ("network", "options", "reason"),
    [
        ({"precision": "bf16"}, {}, "precision bf16"),
        ({"arithmetic": "plain"}, {}, "--arithmetic plain"),
        ({}, {"dueling": True}, "--dueling"),
        ({}, {"noisy": True}, "noise in weights"),
        ({}, {"returns": Quantiles(1)}, "a distribution of returns"),  # half of Huber's loss
    ],
    ids=str,
)
def test_other_networks_use_autograd(network, options, reason):
    network = Network(**{"activation": "relu"} | network)
    policy = policy_with(network, **options)
    assert choose(GRADIENTS, dqn.loss, policy, network, CFG) == (None, reason)
    losses = dqn.DQNAlgorithm().losses({"policy": policy, "target": policy}, CFG)
    assert choose(TARGETS, losses["policy"].prepare, network) == (None, reason)


def test_a_mask_uses_the_page_s_targets():
    seen = Space("dict", parts=(("obs", SEEN), ("mask", Space("multi_binary", (5,), "int8"))))
    policy = policy_with(NETWORK, spec=EnvSpec("test", seen, SPEC.action, mask_key="mask"))
    losses = dqn.DQNAlgorithm().losses({"policy": policy, "target": policy}, CFG)
    assert choose(TARGETS, losses["policy"].prepare, NETWORK) == (None, "an action mask")
