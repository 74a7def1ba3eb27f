"""Inference in NumPy against the policy's own, the plain one."""

import numpy as np
import pytest
import torch

from headrace import batch
from headrace.algos import ppo
from headrace.models.fast_paths import actor_for
from headrace.models.normalization import CLIP
from headrace.models.numpy_inference import NumpyActor
from headrace.models.policy import Network, PolicyActor
from headrace.spec import PLAIN, EnvSpec, Space
from tests.support import build_policy, inline, plan_for, policy_for, short_cartpole

DISCRETE = Space("discrete", (), "int64", nvec=(5,), start=(0,))
MULTI = Space("multi_discrete", (2,), "int64", nvec=(3, 4), start=(0, 0))
BOX = Space("box", (2,), "float32")
PRODUCT = Space("dict", (5,), "float64", parts=(("a", MULTI), ("b", BOX), ("c", DISCRETE)))
SEEN = Space("box", (6,), "float32")
PARTS = Space(
    "dict",
    parts=(
        ("at", SEEN), ("has", Space("multi_binary", (3,), "int8")),
        ("is", Space("discrete", (), "int64", nvec=(4,), start=(1,))),
    ),
)  # fmt: skip
N = 5000  # more than what is computed at a time after the last step
# Logits and values of a few units, in float32, added up in another order
CLOSE = {"rtol": 1e-6, "atol": 4e-6}


def trained(spec, network):
    """A policy with weights as large as training makes them, and moments that were updated."""
    policy = build_policy(spec, network, 1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in policy.named_parameters():
        if name == "model.actor.weight":  # begins near 0
            parameter.data *= 200
        if "bias" in name or "log_std" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    if policy.normalize_obs is not None:
        rows = {
            key: 3 + 2 * torch.randn(1, 100, *leaf.shape, generator=generator)
            for key, leaf in spec.seen_by_critic.leaves
        }
        seen = rows if spec.seen_by_critic.kind == "dict" else rows[PLAIN]
        policy.normalize_obs.update(seen, torch.ones(1, 100, dtype=torch.bool))
    return policy


def observations(space, generator=None):
    generator = generator or torch.Generator().manual_seed(3)
    if space.kind == "dict":
        return {key: observations(part, generator) for key, part in space.parts}
    if space.kind == "multi_binary":
        return torch.randint(0, 2, (N, *space.shape), dtype=torch.int8, generator=generator)
    if space.nvec:
        of_each = [
            torch.randint(first, first + count, (N,), generator=generator)
            for count, first in zip(space.nvec, space.start, strict=True)
        ]
        return torch.stack(of_each, -1) if space.shape else of_each[0]
    if space.dtype == "uint8":
        return torch.randint(0, 256, (N, *space.shape), dtype=torch.uint8, generator=generator)
    return 2 * torch.randn(N, *space.shape, generator=generator)


def noise_for(policy):
    generator = torch.Generator().manual_seed(4)
    return torch.rand(N, policy.num_draws, generator=generator).clamp(1e-6, 1 - 1e-6)


def acted(actor, spec, obs, noise, num_steps=1, stored=ppo.PPOAlgorithm.stored_outputs):
    """What an actor writes, flat; given what `Policy.act` is given, cut into steps."""
    n = len(noise) // num_steps
    fragment = batch.allocate(batch.columns(spec, stored, num_steps, n))
    act = actor.begin(fragment, noise.reshape(num_steps, n, -1))
    for t in range(num_steps):
        batch.each(lambda o, given, t=t: o[t].copy_(given[t * n : (t + 1) * n]), fragment.obs, obs)
        act(t)
    actor.finish(slice(0, fragment.num_steps))
    return {"action": fragment.action.flatten(0, 1)} | {
        name: column.flatten() for name, column in fragment.stored_outputs.items()
    }


@pytest.mark.parametrize("num_steps", [1, 5, 500])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX, PRODUCT], ids=lambda space: space.kind)
@pytest.mark.parametrize(
    ("seen", "network"),
    [
        (SEEN, {}),
        (SEEN, {"activation": "relu", "hidden_sizes": (32,)}),
        (SEEN, {"activation": "elu", "shared_trunk": True}),
        (SEEN, {"activation": "silu", "hidden_sizes": (96, 64, 32)}),
        (SEEN, {"hidden_sizes": ()}),
        (SEEN, {"normalize_obs": True}),
        (Space("box", (2, 3), "float32"), {"normalize_obs": True}),
        (Space("box", (), "float32"), {}),
        (Space("box", (8,), "uint8"), {"normalize_obs": True}),
        (Space("discrete", (), "int64", nvec=(9,), start=(-2,)), {"normalize_obs": True}),
        (Space("multi_discrete", (2,), "int64", nvec=(3, 2), start=(0, 4)), {}),
        (Space("multi_binary", (2, 2), "int8"), {"normalize_obs": True}),
        (PARTS, {}),
        (PARTS, {"normalize_obs": True, "shared_trunk": True}),
    ],
    ids=lambda of: of.describe() if isinstance(of, Space) else ",".join(of) or "default",
)
def test_equals_the_policy(seen, network, action, num_steps):
    spec, network = EnvSpec("test", seen, action), Network(**network)
    assert_equals_the_policy(spec, network, observations(seen), num_steps)


@torch.no_grad()
def assert_equals_the_policy(spec, network, obs, num_steps):
    policy = trained(spec, network)
    noise = noise_for(policy)
    fast = actor_for(policy, spec, network)
    assert isinstance(fast, NumpyActor)
    plain, quick = policy.act(obs, noise), acted(fast, spec, obs, noise, num_steps)
    assert plain.keys() == quick.keys()
    for name, theirs in plain.items():
        assert (quick[name].shape, quick[name].dtype) == (theirs.shape, theirs.dtype), name
    torch.testing.assert_close(quick["value"], plain["value"], **CLOSE)
    on_any_rows = fast.act_on(obs, noise)
    if spec.action is BOX:
        torch.testing.assert_close(quick["action"], plain["action"], **CLOSE)
        torch.testing.assert_close(on_any_rows, plain["action"], **CLOSE)
        same = torch.ones(N, dtype=torch.bool)
    else:
        # A choice may differ where the noise is on the boundary between two: 1e-6 of all, or so
        same, of_any_rows = (
            torch.isclose(of.float(), plain["action"].float(), **CLOSE).reshape(N, -1).all(-1)
            for of in (quick["action"], on_any_rows)
        )
        assert (~same).sum() <= 1 and (~of_any_rows).sum() <= 1
        assert len(plain["action"].unique()) > 2, "the test must see several choices"
    torch.testing.assert_close(quick["log_prob"][same], plain["log_prob"][same], **CLOSE)
    return quick["action"]


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX, PRODUCT], ids=lambda space: space.kind)
@pytest.mark.parametrize("beside", [((PLAIN, SEEN),), PARTS.parts], ids=["plain", "parts"])
def test_equals_the_policy_with_a_mask(beside, action, num_steps):
    bits = {"discrete": 5, "multi_discrete": 7, "box": 0, "dict": 12}[action.kind]
    mask = Space("box", (bits,), "int8")
    spec = EnvSpec("test", Space("dict", parts=(*beside, ("mask", mask))), action, mask_key="mask")
    allowed = torch.rand(N, bits, generator=torch.Generator().manual_seed(6)) < 0.6
    allowed[0] = False  # as in a row that only resets
    obs = observations(spec.seen)
    obs = (obs if spec.seen.kind == "dict" else {PLAIN: obs}) | {"mask": allowed.to(torch.int8)}
    taken = assert_equals_the_policy(spec, Network(normalize_obs=True), obs, num_steps)[1:]
    if action is DISCRETE:
        assert allowed[1:].gather(1, taken[:, None])[allowed[1:].any(1)].all()


@pytest.mark.parametrize("beside", [((PLAIN, SEEN),), PARTS.parts], ids=["plain", "parts"])
def test_equals_the_policy_whose_critic_sees_the_game(beside):
    state = Space("box", (2, 4), "float32")
    space = Space("dict", parts=(*beside, ("state", state)))
    spec = EnvSpec("test", space, DISCRETE, state_key="state")
    assert_equals_the_policy(spec, Network(normalize_obs=True), observations(space), 5)


@torch.no_grad()
def test_normalized_observations_are_clipped():
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network(normalize_obs=True)
    policy = trained(spec, network)
    far = torch.full((3, 6), 1e6)
    assert policy.normalize_obs(far).max() == CLIP
    noise = noise_for(policy)[:3]
    plain = policy.act(far, noise)
    quick = acted(actor_for(policy, spec, network), spec, far, noise)
    torch.testing.assert_close(quick["value"], plain["value"], **CLOSE)


@torch.no_grad()
def test_a_choice_of_probability_0_is_never_taken_nor_do_large_logits_overflow():
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network()
    policy = build_policy(spec, network, 0)
    policy.model.actor.weight.zero_()
    policy.model.actor.bias.copy_(torch.tensor([-2e3, 200.0, 200.3, -2e3, -2e3]))
    noise = torch.tensor([2.0**-24, 0.3, 0.7, 1 - 2.0**-24]).unsqueeze(-1)
    out = acted(actor_for(policy, spec, network), spec, torch.zeros(4, 6), noise)
    assert set(out["action"].tolist()) == {1, 2}
    assert torch.isfinite(out["log_prob"]).all()


@torch.no_grad()
def test_products_do_not_warn_of_what_blas_says_of_itself():
    """A product that says "invalid value" in every run, as right ones do on some processors."""
    spec, network = EnvSpec("test", SEEN, DISCRETE), Network(activation="relu")
    policy = build_policy(spec, network, 0)
    policy.model.critic_trunk.layers[0].weight[0, 0] = np.inf  # times 0
    noise = noise_for(policy)[:3]
    out = acted(actor_for(policy, spec, network), spec, torch.zeros(3, 6), noise)
    assert out["value"].isnan().all()


def own(spec):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 6)

        def forward(self, obs):
            out = self.layer(obs)
            return out[..., :5], out[..., 5]

    return Own()


@pytest.mark.parametrize(
    ("seen", "network", "model"),
    [
        (SEEN, {"arithmetic": "plain"}, None),
        (SEEN, {"precision": "bf16"}, None),
        (SEEN, {}, own),
        (Space("box", (12, 12), "uint8"), {}, None),
        (Space("dict", parts=(("a", SEEN), ("b", Space("box", (12, 12), "uint8")))), {}, None),
    ],
    ids=["plain", "bf16", "own network", "image", "image in a dict"],
)
def test_the_rest_is_the_policy_s(seen, network, model):
    spec, network = EnvSpec("test", seen, DISCRETE), Network(**network)
    policy = build_policy(spec, network, 0, model)
    assert isinstance(actor_for(policy, spec, network), PolicyActor)


@pytest.mark.parametrize("normalize_obs", [False, True])
def test_a_sampler_acts_with_the_weights_that_were_published_last(normalize_obs):
    batches = {}
    for arithmetic in ("plain", "auto"):
        network = Network(arithmetic=arithmetic, normalize_obs=normalize_obs)
        plan = plan_for(short_cartpole, num_steps=32, network=network)
        collector, policy = inline(plan), policy_for(plan)
        generator = torch.Generator().manual_seed(5)
        for version in range(3):
            with torch.no_grad():  # as an update does: in place
                for parameter in policy.parameters():
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
                if normalize_obs:
                    policy.normalize_obs.moments[0].mean += 0.1 * version
            collector.publish({"default": policy}, version)
            fragments = collector.collect().fragments
        batches[arithmetic] = [
            {"action": f.action.clone()} | {k: v.clone() for k, v in f.stored_outputs.items()}
            for f in fragments
        ]
        collector.close()
    for plain, quick in zip(batches["plain"], batches["auto"], strict=True):
        assert torch.equal(quick["action"], plain["action"])
        for name in ("value", "log_prob"):
            torch.testing.assert_close(quick[name], plain[name], rtol=1e-6, atol=1e-5)
            assert np.ptp(plain[name].numpy()) > 0.1
        assert not torch.equal(quick["log_prob"], plain["log_prob"]), "both were plain"
