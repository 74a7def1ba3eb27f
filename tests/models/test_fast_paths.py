"""Every fast path computes what its reference does, within a tolerance."""

import re

import pytest
import torch

import headrace
from headrace.algos import ppo
from headrace.config.algorithms import GRADIENTS
from headrace.models import numpy_inference
from headrace.models.policy import Network, PolicyActor
from headrace.spec import EnvSpec
from tests.models.test_manual_gradient import CFG, by_itself, minibatch_for, of_the_page
from tests.models.test_numpy_inference import BOX, DISCRETE, SEEN, acted, trained

SPECS = [EnvSpec("test", SEEN, action) for action in (DISCRETE, BOX)]


@pytest.mark.parametrize("spec", SPECS, ids=["discrete", "box"])
def test_numpy_acts_as_torch_does(spec):
    network = Network(normalize_obs=True)
    policy = trained(spec, network)
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(24, *SEEN.shape, generator=generator)
    noise = torch.rand(24, policy.num_draws, generator=generator).clamp(1e-6, 1 - 1e-6)
    assert numpy_inference.unsupported(policy, spec, network) == ""
    fast = acted(numpy_inference.actor_for(policy, spec, network), spec, obs, noise)
    with torch.no_grad():
        plain = acted(PolicyActor(policy.act), spec, obs, noise)
    for name in ("log_prob", "value"):
        torch.testing.assert_close(fast[name], plain[name], rtol=4e-6, atol=4e-6, msg=name)


@pytest.mark.parametrize("spec", SPECS, ids=["discrete", "box"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_manual_gradients_are_those_of_autograd(dtype, limit, spec):
    network = Network(normalize_obs=True)
    policy = trained(spec, network)
    minibatch = minibatch_for(policy, SEEN, CFG)
    policy.to(dtype)
    manual = GRADIENTS[ppo.loss]
    assert manual.unsupported(policy, network, CFG) == ""
    fast = by_itself(manual.Gradient(policy, network, CFG), policy, minibatch)[1]
    plain = of_the_page(policy, minibatch)[1]
    for name, expected in plain.items():
        torch.testing.assert_close(fast[name], expected, rtol=limit, atol=limit, msg=name)


def test_every_fast_path_names_a_reason_where_it_is_unsupported():
    network = Network(arithmetic="plain")
    policy = trained(SPECS[0], network)
    reason = "--arithmetic plain"
    assert numpy_inference.unsupported(policy, SPECS[0], network) == reason
    assert GRADIENTS[ppo.loss].unsupported(policy, network, ppo.PPO()) == reason


@pytest.mark.parametrize(
    ("settings", "act", "gradient"),
    [
        ({}, "numpy", "manual"),
        ({"arithmetic": "plain"}, "torch (--arithmetic plain)", "autograd (--arithmetic plain)"),
        ({"core": "gru"}, "torch (a recurrent core)", "autograd (a recurrent core)"),
        ({"algo": "a2c"}, "numpy", "autograd"),
    ],
    ids=str,
)
def test_start_of_a_run_shows_what_computes(tmp_path, capsys, settings, act, gradient):
    headrace.train(
        "CartPole-v1", run_dir=tmp_path / "run", total_env_steps=128, num_envs=8, num_steps=16,
        **settings,
    )  # fmt: skip
    said = re.search(r"compute: (.*) \(reference: --arithmetic plain\)", capsys.readouterr().out)
    assert said and said[1] == f"act = {act}, gradient = {gradient}"
