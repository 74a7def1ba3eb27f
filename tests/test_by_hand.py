"""PPO's loss with its gradient written out, against the page's own by autograd."""

import pytest
import torch

from headrace.algos import a2c, by_hand, ppo
from headrace.algos.a2c import A2C
from headrace.algos.ppo import PPO
from headrace.models import policy as policies
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from tests.test_numpy_actor import BOX, DISCRETE, MULTI, SEEN, own, trained

ROWS = 300
CFG = PPO(ent_coef=0.02, vf_coef=0.7)


def minibatch_for(policy, seen, cfg):
    """What another policy did: ratios on both sides of the clip; some rows have no weight."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    obs = 2 * normal(ROWS, *seen.shape)
    if seen.dtype == "uint8":
        obs = torch.randint(0, 256, (ROWS, *seen.shape), dtype=torch.uint8, generator=generator)
    noise = torch.rand(ROWS, policy.num_draws, generator=generator).clamp(1e-6, 1 - 1e-6)
    with torch.no_grad():
        acted = policy.act(obs, noise)
    weight = (torch.rand(ROWS, generator=generator) < 0.9).float()
    return {
        "obs": obs,
        "action": acted["action"],
        "log_prob": acted["log_prob"] + 0.3 * normal(ROWS),
        "value": acted["value"],
        "advantage": normal(ROWS),
        "target": acted["value"] + normal(ROWS),
        "weight": weight / weight.sum(),
        "clip_coef": torch.tensor(cfg.clip_coef),
    }


def gradients(loss, policy, minibatch, cfg=CFG):
    policy.zero_grad()
    total, metrics = loss(policy, minibatch, cfg)
    total.backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    return total.detach(), metrics, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
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
    ],
    ids=lambda of: of.describe() if isinstance(of, Space) else ",".join(of) or "default",
)
def test_equals_the_page(seen, network, action, dtype):
    spec, network = EnvSpec("test", seen, action), Network(**network)
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, seen, CFG)
    policy.to(dtype)
    fast = by_hand.loss_for(policy, network, CFG, ppo.loss)
    assert fast is not ppo.loss
    total, metrics, plain = gradients(ppo.loss, policy, minibatch)
    assert 0.1 < metrics["clip_fraction"] < 0.9
    close = {"rtol": 1e-4, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-9}
    for _ in range(2):  # the second in the memory of the first
        total_by_hand, metrics_by_hand, quick = gradients(fast, policy, minibatch)
        torch.testing.assert_close(total_by_hand, total, **close)
        assert metrics.keys() == metrics_by_hand.keys()
        for name, metric in metrics.items():
            torch.testing.assert_close(
                metrics_by_hand[name].double(), metric.double(), rtol=1e-4, atol=1e-6
            )
        assert plain.keys() == quick.keys()
        for name, gradient in plain.items():
            assert gradient.abs().max() > 1e-5, name
            assert quick[name].dtype == dtype
            torch.testing.assert_close(quick[name], gradient, **close)


def test_gradients_are_added_up_and_scaled_as_autograd_does():
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network()
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, CFG)
    fast = by_hand.loss_for(policy, network, CFG, ppo.loss)
    _, _, once = gradients(fast, policy, minibatch)
    policy.zero_grad()
    for _ in range(2):  # both forward passes before the first backward
        first, second = fast(policy, minibatch, CFG)[0], fast(policy, minibatch, CFG)[0]
        (first + 0.5 * second).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * once[name])


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
    fast = by_hand.loss_for(policy, network, CFG, ppo.loss)
    for loss in (ppo.loss, fast):
        total, _, found = gradients(loss, policy, minibatch)
        assert not torch.isfinite(total)
        assert not torch.isfinite(torch.nn.utils.get_total_norm(found.values()))


@pytest.mark.parametrize(
    ("seen", "action", "network", "cfg", "model"),
    [
        (SEEN, DISCRETE, {"arithmetic": "plain"}, PPO(), None),
        (SEEN, DISCRETE, {"precision": "bf16"}, PPO(), None),
        (SEEN, DISCRETE, {"activation": "relu"}, PPO(), None),
        (SEEN, DISCRETE, {"hidden_sizes": ()}, PPO(), None),
        (SEEN, DISCRETE, {}, PPO(clip_value_loss=True), None),
        (SEEN, DISCRETE, {}, PPO(), own),
        (SEEN, MULTI, {}, PPO(), None),
        (SEEN, DISCRETE, {}, A2C(), None),
        (Space("box", (12, 12), "uint8"), DISCRETE, {}, PPO(), None),
        (Space("dict", parts=(("a", SEEN),)), DISCRETE, {}, PPO(), None),
    ],
    ids=["plain", "bf16", "relu", "linear", "clip_value_loss", "own network", "multi_discrete",
         "a2c", "image", "dict"],
)  # fmt: skip
def test_the_rest_is_the_page_s(seen, action, network, cfg, model):
    spec, network = EnvSpec("test", seen, action), Network(**network)
    policy = policies.build(spec, network, 0, model)
    page = a2c.loss if isinstance(cfg, A2C) else ppo.loss
    assert by_hand.loss_for(policy, network, cfg, page) is page


def test_masked_actions_are_the_page_s():
    parts = (("", SEEN), ("mask", Space("box", (5,), "int8")))
    spec = EnvSpec("test", Space("dict", parts=parts), DISCRETE, mask_key="mask")
    policy = policies.build(spec, Network(), 0)
    assert by_hand.loss_for(policy, Network(), PPO(), ppo.loss) is ppo.loss
