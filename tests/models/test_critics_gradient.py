"""Gradients of SAC's and TD3's losses that are written out, against autograd's; and targets."""

from dataclasses import replace

import pytest
import torch

from headrace.config.algorithms import ALGORITHMS, GRADIENTS, TARGETS
from headrace.distributed.ranks import SINGLE_RANK
from headrace.learner.learner import loss_of
from headrace.learner.optimizer import Optimizer
from headrace.models.critics.actor import ActorNetwork, ActorPolicy
from headrace.models.critics.heads import SquashedGaussian
from headrace.models.fast_paths import choose
from headrace.models.manual import squashed
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.models.test_manual_gradient import by_itself

ROWS = 300
SEEN = Space("box", (5,), "float32")
ACTION = Space("box", (3,), "float32", low=(-1.0,) * 3, high=(1.0,) * 3)
RELU = Network(activation="relu", hidden_sizes=(48, 24))


def losses_for(algo, network=RELU, seen=SEEN, action=ACTION, dtype=torch.float32, **settings):
    """The losses by name, and the algorithm's settings."""
    algorithm, spec = ALGORITHMS[algo], EnvSpec("test", seen, action)
    config = algorithm.Config(replay_size=100, learning_starts=0, **settings)
    torch.manual_seed(0)
    policy = algorithm.build_policy(spec, network, config)
    modules = algorithm.build(policy, spec, network, config, 1, SINGLE_RANK)
    for name, module in modules.items():
        if name != "replay":
            module.to(dtype)
    if policy.normalize_obs is not None:
        rows = 3 * torch.randn(50, *seen.shape) + 1
        policy.normalize_obs.update(rows, torch.ones(50, dtype=torch.bool), SINGLE_RANK)
    return algorithm.losses(modules, config), config


def choice(spec, network, config):
    """The fast path of a loss, or None; the reason; and what the path makes."""
    arguments = (spec.module, network, config)
    path, reason = choose(GRADIENTS, spec.function, *arguments)
    return path, reason, path and path.make(*arguments)


def minibatch_for(seen=SEEN, num_targets=1, rows=ROWS):
    """Errors within ±1 and beyond, and large deviations of actions."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def observations(space):
        if space.kind == "dict":
            return {key: observations(part) for key, part in space.parts}
        if space.kind == "discrete":
            return torch.randint(0, space.nvec[0], (rows,), generator=generator)
        return 4 * normal(rows, *space.shape)

    obs = observations(seen)
    return {
        "obs": obs,
        "seen": obs,
        "action": normal(rows, 3).tanh(),
        "noise": normal(rows, 16),
        "target": 2 * normal(rows, num_targets),
        "missing_entropy": normal(rows),
        "weight": torch.rand(rows, generator=generator) / rows,
    }


def assert_equals_autograd(spec, network, config, minibatch, dtype=torch.float32):
    """Compare metrics and gradients of a loss."""
    spec.module.zero_grad()
    total, expected = spec.function(spec.module, minibatch, config)
    total.backward()
    gradients = {key: p.grad.clone() for key, p in spec.module.named_parameters()}
    path, _, gradient = choice(spec, network, config)
    by_itself(gradient, spec.module, minibatch)
    found, own = by_itself(gradient, spec.module, minibatch)  # in the memory of the first
    limit = path.tolerance[dtype]
    for got, wanted in ((found, expected), (own, gradients)):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            given = torch.as_tensor(got[key], dtype=value.dtype)
            torch.testing.assert_close(given, value.detach(), rtol=limit, atol=1e-6, msg=key)


CASES = {
    "sac": ("sac", {}, {}),
    "a fixed temperature": ("sac", {}, {"ent_coef": 0.2}),
    "no hidden layer": ("sac", {"hidden_sizes": ()}, {}),
    "three hidden layers": ("sac", {"hidden_sizes": (96, 64, 32)}, {}),
    "tanh": ("sac", {"activation": "tanh"}, {}),
    "silu": ("td3", {"activation": "silu"}, {}),
    "layer norm": ("td3", {"hidden_sizes": (24, 24)}, {"layer_norm": True}),
    "normalized": ("sac", {"normalize_obs": True}, {}),
    "tqc": ("tqc", {}, {}),
    "redq": ("redq", {"hidden_sizes": (16,)}, {"num_critics": 4}),
    "td3": ("td3", {}, {}),
    "ddpg": ("ddpg", {"normalize_obs": True}, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_page(case, dtype):
    algo, of_network, settings = CASES[case]
    network = replace(RELU, **of_network)
    losses, config = losses_for(algo, network, dtype=dtype, **settings)
    minibatch = minibatch_for(num_targets=46 if algo == "tqc" else 1)
    for spec in losses.values():
        assert_equals_autograd(spec, network, config, minibatch, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_targets_equal_the_page(case, dtype):
    algo, of_network, settings = CASES[case]
    network = replace(RELU, **of_network)
    losses, _ = losses_for(algo, network, dtype=dtype, **settings)
    reference = losses["critics"].prepare
    of = reference.keywords
    for module in (of["target"], *([of["target_policy"]] if "target_policy" in of else [])):
        for p in module.parameters():  # unlike what they are copies of
            p.add_(0.1 * torch.randn_like(p))
    path, _ = choose(TARGETS, reference, network)
    of_path = path.make(network)
    pairs = []
    for seed, rows in ((1, ROWS), (2, ROWS), (3, 7), (4, 0)):  # a rank may have none
        torch.manual_seed(seed)
        minibatch = minibatch_for(rows=rows) | {
            "next_obs": 3 * torch.randn(rows, *SEEN.shape),
            "noise": torch.randn(rows, 16),
            "reward": torch.randn(rows),
            "discount": torch.rand(rows),
        }
        if algo == "td3":
            minibatch["noise"] = minibatch["noise"][:, :3]
        with torch.no_grad():
            expected = reference(minibatch)
        pairs.append((of_path(minibatch), expected))
    for found, expected in pairs:  # after all passes, which use the same memory
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            limit = path.tolerance[dtype]
            torch.testing.assert_close(found[key], value, rtol=limit, atol=limit, msg=key)


def test_targets_follow_the_weights_that_gradients_moved_to_one_vector():
    losses, config = losses_for("sac")
    reference = losses["critics"].prepare
    of_path = choose(TARGETS, reference, RELU)[0].make(RELU)
    optimizer = Optimizer(
        loss_of(losses["policy"], config, compiled=False), 0.0,
        manual=choice(losses["policy"], RELU, config)[2],
    )  # fmt: skip
    rows = minibatch_for() | {
        "next_obs": torch.randn(ROWS, 5),
        "reward": torch.zeros(ROWS),
        "discount": torch.ones(ROWS),
    }
    before = of_path(rows)["target"]
    for _ in range(3):
        optimizer.step(rows, 0.1)
    expected, found = reference(rows)["target"], of_path(rows)["target"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, rtol=1e-2)


def test_a_deviation_at_its_bound_is_not_moved():
    losses, config = losses_for("sac")
    spec = losses["policy"]
    with torch.no_grad():
        spec.module.model.actor.bias[3:] = torch.tensor([50.0, -50.0, 0.0])
    *_, gradient = choice(spec, RELU, config)
    _, own = by_itself(gradient, spec.module, minibatch_for())
    of_bias = own["model.actor.bias"]
    assert of_bias[3] == of_bias[4] == 0 != of_bias[5]


NINE = Space("discrete", (), "int64", nvec=(9,), start=(0,))


@pytest.mark.parametrize("seen", [NINE, Space("dict", parts=(("a", SEEN), ("b", NINE)))])
def test_choices_and_dicts_of_observations_are_seen(seen):
    losses, config = losses_for("sac", seen=seen)
    for spec in losses.values():
        assert_equals_autograd(spec, RELU, config, minibatch_for(seen))


def test_critics_that_agree_share_the_gradient():
    losses, config = losses_for("sac", num_critics=3)
    with torch.no_grad():
        for parameter in losses["critics"].module.layers.parameters():
            parameter[1] = parameter[0]
    assert_equals_autograd(losses["policy"], RELU, config, minibatch_for())


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_the_optimizers_take_the_same_steps_with_either(algo):
    weights = []
    for is_manual in (False, True):
        losses, config = losses_for(algo)
        optimizers = {
            name: Optimizer(
                loss_of(spec, config, compiled=False), 0.0, 3 if name != "temperature" else 1,
                choice(spec, RELU, config)[2] if is_manual else None,
            )
            for name, spec in losses.items()
        }  # fmt: skip
        for _ in range(5):
            for optimizer in optimizers.values():
                optimizer.step(minibatch_for(), 1e-3)
        weights.append(
            {
                (name, key): p.detach().clone()
                for name, spec in losses.items()
                for key, p in spec.module.named_parameters()
            }
        )
    for key, expected in weights[0].items():
        torch.testing.assert_close(weights[1][key], expected, rtol=1e-3, atol=1e-5, msg=str(key))


@pytest.mark.parametrize("column", ["target", "weight"])
def test_what_is_not_finite_comes_through(column):
    losses, config = losses_for("sac")
    minibatch = minibatch_for()
    minibatch[column][3] = float("nan")
    *_, gradient = choice(losses["critics"], RELU, config)
    gradient(minibatch)
    assert not torch.linalg.vector_norm(gradient.flat).isfinite()


CHOICES = Space("discrete", (), "int64", nvec=(3,), start=(0,))
IMAGE = Space("box", (16, 16, 3), "uint8")


@pytest.mark.parametrize(
    ("algo", "network", "settings", "spaces", "reason"),
    [
        ("sac", {"precision": "bf16"}, {}, {}, "precision bf16"),
        ("td3", {"arithmetic": "plain"}, {}, {}, "--arithmetic plain"),
        ("sac", {}, {"dropout": 0.1}, {}, "dropout"),
        ("td3", {}, {}, {"seen": IMAGE}, "images"),
    ],
    ids=lambda of: of if isinstance(of, str) else " ".join(of),
)
def test_other_networks_use_autograd(algo, network, settings, spaces, reason):
    network = replace(RELU, **network)
    losses, config = losses_for(algo, network, **spaces, **settings)
    for name in ("critics", "policy"):
        assert choice(losses[name], network, config)[:2] == (None, reason)
    assert choose(TARGETS, losses["critics"].prepare, network) == (None, reason)


def test_a_device_uses_autograd():
    losses, config = losses_for("sac")
    for spec in losses.values():
        spec.module.to("meta")
    for spec in losses.values():
        assert choice(spec, RELU, config)[:2] == (None, "on a GPU")
    reference = losses["critics"].prepare
    reference.keywords["target"].to("meta")
    assert choose(TARGETS, reference, RELU) == (None, "on a GPU")


@pytest.mark.parametrize(
    ("algo", "core", "action", "written_out"),
    [
        ("sac", "none", ACTION, "critics policy temperature"),
        ("td3", "none", ACTION, "critics policy"),
        ("crossq", "none", ACTION, "temperature"),
        ("sac", "gru", ACTION, "temperature"),
        ("sac", "none", CHOICES, "temperature"),
        ("bc", "none", ACTION, ""),
        ("cql", "none", ACTION, "policy temperature"),
        ("iql", "none", ACTION, "critics"),
        ("td3bc", "none", ACTION, "critics"),
    ],
    ids=lambda of: of.kind if isinstance(of, Space) else of,
)
def test_which_losses_are_written_out(algo, core, action, written_out):
    network = replace(RELU, core=core)
    losses, config = losses_for(algo, network, action=action)
    found = [name for name, spec in losses.items() if choice(spec, network, config)[0]]
    assert " ".join(found) == written_out
    prepare = losses["critics"].prepare if "critics" in losses else None
    has_targets = algo in ("sac", "td3", "td3bc") and core == "none" and action is ACTION
    assert (choose(TARGETS, prepare, network)[0] is not None) == has_targets


class Louder(SquashedGaussian):
    """Draws in its own way."""


def test_networks_and_distributions_of_one_s_own_use_autograd():
    spec, config = EnvSpec("test", SEEN, ACTION), ALGORITHMS["sac"].Config(learning_starts=0)
    elu = replace(RELU, activation="elu")
    # Headrace's network by another's hand: its settings are not the run's
    made = ActorPolicy(spec, RELU, SquashedGaussian(3), lambda _: ActorNetwork(spec, elu, 6))
    louder = ActorPolicy(spec, RELU, Louder(3))
    reasons = (made, "a network of your own"), (louder, "a distribution of its own")
    for policy, reason in reasons:
        modules = ALGORITHMS["sac"].build(policy, spec, RELU, config, 1, SINGLE_RANK)
        losses = ALGORITHMS["sac"].losses(modules, config)
        assert choice(losses["policy"], RELU, config)[:2] == (None, reason)
        assert choose(TARGETS, losses["critics"].prepare, RELU) == (None, reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_squashed_gaussian_is_the_reference_s_also_far_out(dtype):
    head, size = SquashedGaussian(3).to(dtype), 3
    torch.manual_seed(0)
    mean = torch.tensor([-50.0, -3.0, 0.0, 1e-3, 3.0, 50.0], dtype=dtype).repeat(40)
    log_std = torch.tensor([-50.0, -20.0, -1.0, 0.0, 2.0, 9.0], dtype=dtype).repeat_interleave(40)
    params = torch.cat((mean.view(-1, size), log_std.view(-1, size)), -1).requires_grad_()
    normal = torch.randn(len(params), size, dtype=dtype)
    action, log_prob = head.draw(params, normal)
    signal = torch.randn_like(action), torch.randn_like(log_prob)
    (gradient,) = torch.autograd.grad((action, log_prob), params, signal)
    found = squashed.draw(params.detach().numpy(), normal.numpy())
    limit = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    of_params = found[2](signal[0].numpy(), signal[1].unsqueeze(-1).numpy())
    for got, wanted in ((found[0], action), (found[1], log_prob), (of_params, gradient)):
        given, wanted = torch.from_numpy(got), wanted.detach()
        torch.testing.assert_close(given, wanted, rtol=limit, atol=limit)
