"""Every fast path computes what its reference does, within the tolerance that it declares."""

import re

import pytest
import torch

import headrace
from headrace.algos.action_values import dqn
from headrace.algos.action_values.dqn import DQN
from headrace.algos.critics import sac, td3
from headrace.algos.critics.shared import critics_loss
from headrace.algos.ppo import PPO, PPOAlgorithm
from headrace.algos.ppo import loss as ppo_loss
from headrace.config.algorithms import GRADIENTS
from headrace.models.action_values.q_policy import QNetwork, QPolicy
from headrace.models.fast_paths import ACTING, choose
from headrace.models.policy import ActorCritic, Network, Policy, PolicyActor
from headrace.spec import EnvSpec
from tests.models import test_dqn_gradient as of_dqn
from tests.models import test_manual_gradient as of_ppo
from tests.models.test_manual_gradient import CFG
from tests.models.test_numpy_inference import BOX, DISCRETE, SEEN, acted, trained
from tests.models.test_q_policy import STORED, policy_with

SPECS = [EnvSpec("test", SEEN, action) for action in (DISCRETE, BOX)]
BY_VALUES = QPolicy.act, dqn.loss
OF_CRITICS = critics_loss, sac.actor_loss, td3.actor_loss, sac.temperature_loss
"""Compared in test_critics_gradient.py."""
CASES = [
    pytest.param(path, dtype, spec, id=f"{path.name}-{dtype}-{spec.action.kind}")
    for path in (*ACTING, *GRADIENTS) for dtype in path.tolerance for spec in SPECS
    if path.reference not in OF_CRITICS
    and (path.reference not in BY_VALUES or spec.action is DISCRETE)
]  # fmt: skip


@pytest.mark.parametrize(("path", "dtype", "spec"), CASES)
def test_fast_path_is_within_its_tolerance_of_the_reference(path, dtype, spec):
    is_by_values = path.reference in BY_VALUES
    network = Network(normalize_obs=True, activation="relu" if is_by_values else "tanh")
    policy = policy_with(network) if is_by_values else trained(spec, network)
    if path in ACTING:
        assert path.unsupported(policy, spec, network) == ""
        stored = STORED if is_by_values else PPOAlgorithm.stored_outputs
        generator = torch.Generator().manual_seed(1)
        obs = torch.randn(24, *SEEN.shape, generator=generator)
        noise = torch.rand(24, policy.num_draws, generator=generator).clamp(1e-6, 1 - 1e-6)
        fast = acted(path.make(policy, spec, network), spec, obs, noise, 1, stored)
        with torch.no_grad():
            plain = acted(PolicyActor(policy.act), spec, obs, noise, 1, stored)
        pairs = {name: (fast[name], plain[name]) for name in stored}
    else:
        page, settings = (of_dqn, DQN()) if is_by_values else (of_ppo, CFG)
        if is_by_values:
            minibatch = of_dqn.minibatch_for(policy)
        else:
            minibatch = of_ppo.minibatch_for(policy, SEEN, CFG)
        policy.to(dtype)
        assert path.unsupported(policy, network, settings) == ""
        fast = page.by_itself(path.make(policy, network, settings), policy, minibatch)[1]
        plain = page.of_the_page(policy, minibatch, path.reference, settings)[1]
        pairs = {name: (fast[name], plain[name]) for name in plain}
    for name, (value, expected) in pairs.items():
        limit = path.tolerance[dtype]
        torch.testing.assert_close(value, expected, rtol=limit, atol=limit, msg=name)


def test_every_fast_path_names_a_reason_where_it_is_unsupported():
    network = Network(arithmetic="plain")
    for path in ACTING:
        is_by_values = path.reference is QPolicy.act
        policy = policy_with(network) if is_by_values else trained(SPECS[0], network)
        arguments = policy, SPECS[0], network
        assert choose(ACTING, path.reference, *arguments) == (None, "--arithmetic plain")
    for path in GRADIENTS:
        if path.reference in OF_CRITICS:
            continue
        is_by_values = path.reference in BY_VALUES
        policy = policy_with(network) if is_by_values else trained(SPECS[0], network)
        arguments = policy, network, PPO()
        assert choose(GRADIENTS, path.reference, *arguments) == (None, "--arithmetic plain")


def test_a_network_that_a_user_makes_of_our_classes_is_computed_as_it_is():
    spec, network, other = SPECS[0], Network(), Network(activation="elu")
    actor_critic = Policy(spec, network, lambda spec: ActorCritic(spec, other))
    by_values = QPolicy(spec, network, lambda spec: QNetwork(spec, other), epsilon=0.1)
    for policy, act, loss, config in (
        (actor_critic, Policy.act, ppo_loss, PPO()),
        (by_values, QPolicy.act, dqn.loss, DQN()),
    ):
        reason = None, "a network of your own"
        assert choose(ACTING, act, policy, spec, network) == reason
        assert choose(GRADIENTS, loss, policy, network, config) == reason


@pytest.mark.parametrize(
    ("settings", "act", "gradient"),
    [
        ({}, "numpy", "manual"),
        ({"arithmetic": "plain"}, "torch (--arithmetic plain)", "autograd (--arithmetic plain)"),
        ({"core": "gru"}, "torch (a recurrent core)", "autograd (a recurrent core)"),
        ({"algo": "a2c"}, "numpy", "manual"),
        ({"algo": "dqn"}, "numpy", "manual"),
        ({"algo": headrace.DQN(dueling=True)}, "numpy", "autograd (--dueling)"),
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
