"""The losses of SAC with recurrent cores, row by row, and a task that takes a memory."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import headrace
from headrace.algos.critics import recurrent_sac
from headrace.config.algorithms import ALGORITHMS
from headrace.distributed.ranks import SINGLE_RANK
from headrace.errors import ConfigError
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space

BOX = Space("box", (3,), "float32")
SPEC = EnvSpec("toy", BOX, Space("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0)))
NETWORK = Network(hidden_sizes=(8,), activation="relu", core="lstm", core_size=4)
BURN_IN, LENGTH, B = 2, 4, 5
T = BURN_IN + LENGTH + 2


@pytest.fixture
def parts():
    algorithm = ALGORITHMS["sac"]
    config = algorithm.Config(
        replay_size=100, sequence_length=LENGTH, burn_in=BURN_IN, ent_coef=0.5, n_step=2
    )
    torch.manual_seed(0)
    policy = algorithm.build_policy(SPEC, NETWORK, config)
    modules = algorithm.build(policy, SPEC, NETWORK, config, 1, SINGLE_RANK)
    rows = {
        "obs": torch.randn(T, B, 3),
        "reset": torch.rand(T, B) < 0.3,
        "state": torch.randn(B, 8),
        "action": torch.rand(LENGTH, B, 2) * 2 - 1,
        "reward": torch.randn(LENGTH, B),
        "discount": torch.rand(LENGTH, B),
        "next_row": torch.randint(1, LENGTH + 2, (LENGTH, B)),
        "noise": torch.randn(LENGTH * B, 4),
        "weight": torch.rand(LENGTH * B),
    }
    return modules, config, rows


def unrolled(core, features, state, reset):
    """The core's outputs, one row after the other."""
    found = []
    for row, is_first in zip(features, reset, strict=True):
        output, state = core.one_row(row, state.masked_fill(is_first.unsqueeze(-1), 0.0))
        found.append(output)
    return torch.stack(found)


def by_rows(modules, rows):
    """The head's parameters, and features of critics and of targets, after the burn-in."""
    policy, zeros = modules["policy"], torch.zeros(B, 8)
    hidden = unrolled(policy.model.core, rows["obs"], rows["state"], rows["reset"])
    params = policy.model.heads(hidden)[0]
    of = [
        unrolled(modules[name].core, rows["obs"], zeros, rows["reset"])
        for name in ("critics", "target")
    ]
    return [each[BURN_IN:] for each in (params, *of)]


def test_losses_and_targets_are_those_of_single_rows(parts):
    modules, config, rows = parts
    policy, critics, target = (modules[name] for name in ("policy", "critics", "target"))
    params, of_critics, of_target = by_rows(modules, rows)
    size = 2
    expected = torch.empty(LENGTH, B)
    for t in range(LENGTH):
        for b in range(B):
            at = int(rows["next_row"][t, b]), b
            normal = rows["noise"][t * B + b, :size]
            action, log_prob = policy.head.draw(params[at][None], normal[None])
            value = target.outputs(of_target[at][None], action).amin(0)[0, 0] - 0.5 * log_prob[0]
            expected[t, b] = rows["reward"][t, b] + rows["discount"][t, b] * value
    of = {"policy": policy, "target": target, "temperature": modules["temperature"]}
    found = recurrent_sac.targets(rows, **of, cfg=config)["target"]
    torch.testing.assert_close(found.view(LENGTH, B), expected.detach())

    rows |= {"target": found}
    total, _ = recurrent_sac.critics_loss(critics, rows, config, policy=policy)
    values = critics.outputs(of_critics[:LENGTH].flatten(0, 1), rows["action"].flatten(0, 1))
    errors = (values - found).square().sum((0, -1))
    torch.testing.assert_close(total, (errors * rows["weight"]).sum())

    of = {"critics": critics, "temperature": modules["temperature"]}
    total, metrics = recurrent_sac.actor_loss(policy, rows, config, **of)
    action, log_prob = policy.head.draw(params[:LENGTH].flatten(0, 1), rows["noise"][:, size:])
    least = critics.outputs(of_critics[:LENGTH].flatten(0, 1), action).amin(0)[:, 0]
    torch.testing.assert_close(total, ((0.5 * log_prob - least) * rows["weight"]).sum())
    assert metrics["missing_entropy"].shape == (LENGTH * B,)


def test_each_loss_moves_its_own_module(parts):
    modules, config, rows = parts
    policy, critics = modules["policy"], modules["critics"]
    of = {"critics": critics, "temperature": modules["temperature"]}
    recurrent_sac.actor_loss(policy, rows, config, **of)[0].backward()
    assert all(parameter.grad is None for parameter in critics.parameters())
    assert all(parameter.grad is not None for parameter in policy.parameters())
    policy.zero_grad(set_to_none=True)
    of = {name: modules[name] for name in ("target", "temperature")}
    rows |= recurrent_sac.targets(rows, policy=policy, **of, cfg=config)
    recurrent_sac.critics_loss(critics, rows, config, policy=policy)[0].backward()
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(parameter.grad is not None for parameter in critics.parameters())


class Recall(gym.Env):
    """The first observation shows the action that is right four steps later."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = 2 * int(self.np_random.integers(2)) - 1, 0
        return np.array([self.cue, 1], np.float32), {}

    def step(self, action):
        self.t += 1
        is_over = self.t == 4
        reward = -abs(self.cue - float(action[0])) if is_over else 0.0
        return np.zeros(2, np.float32), reward, is_over, False, {}


CORE = {"core": "gru", "core_size": 16, "hidden_sizes": (32,), "num_workers": 0, "quiet": True}


@pytest.mark.slow
def test_a_recurrent_core_remembers_what_it_saw(tmp_path):
    run = headrace.train(
        Recall, algo="sac", run_dir=tmp_path / "run", total_env_steps=5_000, learning_starts=500,
        replay_ratio=0.25, sequence_length=8, burn_in=4, batch_size=64, lr=3e-3, seed=1, **CORE,
    )  # fmt: skip
    assert np.mean(run.evaluate(episodes=50).returns) > -0.4  # without a memory: -1


def test_choices_and_algorithms_without_cores_are_refused_in_words(tmp_path):
    for env, algo, words in (
        ("CartPole-v1", "sac", r"(?s)core='gru'.*choices.*--algo dqn"),
        (Recall, "crossq", r"(?s)core='gru'.*crossq does not learn"),
        (Recall, "td3", r"(?s)core='gru'.*td3 does not learn"),
    ):
        with pytest.raises(ConfigError, match=words):
            headrace.train(env, algo=algo, run_dir=tmp_path / algo, total_env_steps=640, **CORE)
