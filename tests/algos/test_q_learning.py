"""The pages of PQN and DQN: losses and targets by hand, and every setting seen to do something."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.algos.action_values import dqn, pqn
from headrace.algos.action_values.dqn import DQN
from headrace.algos.action_values.pqn import PQN
from headrace.algos.off_policy import update_target
from headrace.device_seeding import normal_noise
from headrace.errors import ConfigError
from headrace.models.action_values.q_policy import QPolicy
from headrace.models.action_values.value_distributions import MeanOnly
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space
from headrace.storage import checkpoint
from headrace.storage.metrics import read_metrics
from tests.marks import repeats
from tests.support import Counting, short_cartpole

SMALL = {"num_envs": 4, "num_steps": 16, "num_workers": 0, "seed": 1, "quiet": True}


class Values:
    """Stands in for a policy that gives rows known values of their actions."""

    returns = MeanOnly()

    def __init__(self, *rows):
        self.rows = torch.tensor(rows)

    def __call__(self, obs):
        return self.rows, self.rows.amax(-1)

    def outputs(self, obs):
        return self.rows.unsqueeze(-1)

    def best(self, outputs, obs):
        return outputs.squeeze(-1).argmax(-1)

    def if_any_is_allowed(self, value, obs):
        return value


def rows(**columns):
    found = {"obs": None, "next_obs": None, "action": torch.tensor([0, 1])}
    found |= {"weight": torch.tensor([0.5, 0.5])}
    return found | {name: torch.tensor(column) for name, column in columns.items()}


def test_the_losses_by_hand():
    policy = Values([1.0, 9.0], [9.0, 5.0])  # Q(s, a) = 1 and 5
    minibatch = rows(target=[1.5, 2.0])  # errors -0.5 and 3
    total, metrics = pqn.loss(policy, minibatch, PQN())
    assert float(total) == pytest.approx((0.25 + 9) / 2)
    assert float(metrics["td_error"]) == pytest.approx(3.5 / 2)
    # Huber: 0.5 * 0.25 and 3 - 0.5
    total, metrics = dqn.loss(policy, minibatch | {"target_mean": minibatch["target"]}, DQN())
    assert float(total) == pytest.approx((0.125 + 2.5) / 2)
    assert float(metrics["td_error"]) == pytest.approx(3.5 / 2)
    assert float(metrics["mean_value"]) == 3.0
    assert metrics["error"].tolist() == [0.5, 3.0]


def test_metrics_are_means_of_rows_whatever_weights_priorities_give_them():
    policy = Values([1.0, 9.0], [9.0, 5.0])  # Q(s, a) = 1 and 5
    minibatch = rows(target=[1.5, 2.0], target_mean=[1.5, 2.0], clipped=[0.0, 0.5])
    minibatch |= {"weight": torch.tensor([0.5, 0.1]), "share": torch.tensor([0.5, 0.5])}
    total, metrics = dqn.loss(policy, minibatch, DQN())
    assert float(total) == pytest.approx(0.5 * 0.125 + 0.1 * 2.5)
    assert float(metrics["td_error"]) == pytest.approx(3.5 / 2)
    assert float(metrics["mean_value"]) == 3.0
    assert float(metrics["clipped_targets"]) == 0.25
    assert float(dqn.best_values(policy, policy, minibatch)["max_value"]) == 9.0


def test_the_targets_by_hand():
    policy = Values([2.0, 1.0], [0.0, 1.0])  # chooses 0, 1
    target = Values([3.0, 7.0], [5.0, 4.0])  # the largest: 7, 5
    of = rows(reward=[1.0, 2.0], discount=[0.5, 0.0])
    found = dqn.targets(of, policy=policy, target=target, cfg=DQN(double_q=True))
    assert found["target"].tolist() == [1 + 0.5 * 3, 2.0]
    found = dqn.targets(of, policy=policy, target=target, cfg=DQN(double_q=False))
    assert found["target"].tolist() == [1 + 0.5 * 7, 2.0]


def test_epsilon_falls_linearly_and_stays():
    cfg = DQN(exploration_initial_eps=0.8, exploration_final_eps=0.2, exploration_fraction=0.5)
    expected = [0.8, 0.5, 0.2, 0.2]
    assert [cfg.epsilon(share) for share in (0, 0.25, 0.5, 1)] == pytest.approx(expected)
    assert DQN(exploration_fraction=0.0, exploration_final_eps=0.1).epsilon(0.0) == pytest.approx(
        0.1
    )


def test_a_target_network_follows_by_a_share():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before = other.weight.clone()
    update_target(other, one, 0.25)
    torch.testing.assert_close(other.weight, 0.75 * before + 0.25 * one.weight)
    update_target(other, one, 1.0)
    assert torch.equal(other.weight, one.weight)


def train(path, algo, **more):
    settings = SMALL | {"total_env_steps": 640} | more
    return headrace.train(short_cartpole, algo=algo, run_dir=path, **settings)


BASE = {
    "dqn": {"lr": 1e-2, "learning_starts": 64, "replay_ratio": 0.2, "target_update_interval": 10},
    "pqn": {"lr": 1e-2},
}
BASE["prioritized"] = BASE["dqn"] | {"priority_alpha": 0.6}
BASE["c51"] = BASE["dqn"] | {"distribution": "c51"}
BASE["qr"] = BASE["dqn"] | {"distribution": "qr"}
BASE["noisy"] = BASE["dqn"] | {"noisy": True}


@repeats(
    ("algo", "setting", "value"),
    [
        ("pqn", "q_lambda", 0.0),
        ("pqn", "gamma", 0.5),
        ("pqn", "layer_norm", False),
        ("pqn", "num_epochs", 1),
        ("pqn", "num_minibatches", 1),
        ("pqn", "exploration_final_eps", 0.5),
        ("pqn", "exploration_fraction", 0.01),
        ("pqn", "lr_schedule", "constant"),
        ("dqn", "gamma", 0.5),
        ("dqn", "double_q", False),
        ("dqn", "dueling", True),
        ("dqn", "layer_norm", True),
        ("dqn", "n_step", 3),
        ("dqn", "batch_size", 16),
        ("dqn", "tau", 0.5),
        ("dqn", "target_update_interval", 3),
        ("dqn", "exploration_initial_eps", 0.5),
        ("dqn", "replay_size", 128),
        ("dqn", "lr_schedule", "linear"),
        ("dqn", "priority_alpha", 0.6),
        ("dqn", "distribution", "c51"),
        ("dqn", "distribution", "qr"),
        ("dqn", "noisy", True),
        ("c51", "num_atoms", 21),
        ("c51", "v_min", -20.0),
        ("c51", "v_max", 20.0),
        ("qr", "num_atoms", 21),
        ("noisy", "exploration_final_eps", 0.5),
        ("prioritized", "priority_alpha", 1.0),
        ("prioritized", "priority_beta", 1.0),
    ],
    keep=4,
)
def test_every_setting_changes_what_is_learned(tmp_path, algo, setting, value):
    kind = PQN if algo == "pqn" else DQN
    weights = []
    for name, changed in (("one", {}), ("other", {setting: value})):
        run = train(tmp_path / name, kind(**BASE[algo] | changed))
        found = checkpoint.newest(run.dir).tensors("policy_default")
        weights.append(torch.cat([w.flatten() for key, w in found.items() if "epsilon" not in key]))
    assert weights[0].shape != weights[1].shape or not torch.equal(*weights)


def test_the_ratio_is_exact_and_begins_after_learning_starts(tmp_path):
    run = train(tmp_path / "run", DQN(learning_starts=100, replay_ratio=0.3))
    steps = {row["env_steps"]: row["learner_steps"] for row in read_metrics(run.dir)}
    assert steps == {n: 3 * max(0, n - 100) // 10 for n in range(64, 641, 64)}


def test_the_ratio_counts_as_it_is_written():
    ratios = [0.29, 0.57, 1.1, 1, 20.0, 1e-06]  # in binary numbers 0.29 * 100 is less than 29
    steps = [DQN(learning_starts=0, replay_ratio=r).learner_steps_after(100) for r in ratios]
    assert steps == [29, 57, 110, 100, 2_000, 0]


def test_noise_in_weights_replaces_random_actions_unless_they_are_given(tmp_path):
    by_noise = train(tmp_path / "noisy", DQN(**BASE["noisy"]))
    assert {row["epsilon"] for row in read_metrics(by_noise.dir)} == {0.0}
    both = train(tmp_path / "both", DQN(**BASE["noisy"], exploration_final_eps=0.5))
    assert read_metrics(both.dir)[-1]["epsilon"] == 0.5


def test_noise_is_that_of_the_weights_version_and_of_the_gradient_step(tmp_path):
    run = train(tmp_path / "run", DQN(**BASE["noisy"] | {"target_update_interval": 1_000}))
    saved = checkpoint.newest(run.dir)
    by_module = {
        "model.actor.noise_out": saved.tensors("policy_default"),
        "modules.target.model.actor.noise_out": saved.tensors("learner_default"),
    }
    # Ten updates, of which the last is number 9; int(0.2 * (640 - 64)) gradient steps
    addresses = (9, 0), (int(0.2 * (640 - 64)) - 1, 2)
    for (name, tensors), address in zip(by_module.items(), addresses, strict=True):
        count = sum(t.numel() for key, t in tensors.items() if ".noise_" in key)
        noise = normal_noise(1, *address, count, torch.device("cpu"))[-2:].float()
        expected = noise.sign() * noise.abs().sqrt()
        torch.testing.assert_close(tensors[name], expected)


@pytest.mark.more
def test_clipped_targets_are_counted_and_warned_of_once(tmp_path, capsys):
    """A return is some 20 here: v_max = 2 is too narrow, and 200 is not."""
    for v_max, expected in ((2.0, 1), (200.0, 0)):
        algo = DQN(**BASE["c51"], v_min=0.0, v_max=v_max)
        run = train(tmp_path / str(v_max), algo, quiet=False)
        share = read_metrics(run.dir)[-1]["clipped_targets"]
        assert (share > 0.05) == bool(expected)
        said = "".join(capsys.readouterr())
        assert said.count("outside of v_min=0 to v_max=2, and clipped. Use a wider") == expected


def test_metrics_show_epsilon_and_errors(tmp_path):
    run = train(tmp_path / "run", DQN(learning_starts=100, exploration_fraction=0.5))
    first, last = read_metrics(run.dir)[0], read_metrics(run.dir)[-1]
    assert first["epsilon"] == 1.0
    assert last["epsilon"] == pytest.approx(0.05)
    assert last["td_error"] > 0
    assert "td_error" not in first  # there was no gradient step yet


@pytest.mark.parametrize("interval", [1, 1000])
def test_metrics_show_the_best_values_and_how_far_the_target_network_is(tmp_path, interval):
    algo = DQN(learning_starts=100, target_update_interval=interval, replay_ratio=1 / 64)
    rows = [row for row in read_metrics(train(tmp_path / "run", algo).dir) if "td_error" in row]
    for row in rows:
        assert (row["target_gap"] == 0) == (interval == 1)
    # One gradient step in an update: of the same rows, but a step later
    assert all(row["max_value"] > row["mean_value"] - 0.1 for row in rows)
    assert any(row["max_value"] > row["mean_value"] for row in rows)


@pytest.mark.more
def test_metrics_show_how_much_is_stored_and_how_old_it_is_that_is_learned_from(tmp_path):
    run = train(tmp_path / "run", DQN(learning_starts=100, replay_size=200))
    rows = read_metrics(run.dir)
    assert "replay_age" not in rows[0]
    for row in rows:  # last observations of cut-off episodes have rows as well
        assert 0.9 * min(row["env_steps"], 200) <= row["replay_rows"] <= min(row["env_steps"], 200)
    ages = [row["replay_age"] for row in rows if "replay_age" in row]
    assert len(ages) > 5 and all(0.3 * 200 < age < 0.7 * 200 for age in ages[4:])
    assert run.summary["meter"]["replay"] > 0


@pytest.mark.more
@repeats("algo", [PQN(), DQN(n_step=1), DQN(n_step=3)], ids=["pqn", "1", "3"], keep=2)
def test_time_limits_are_no_terminal_states(tmp_path, algo):
    """Reward 1 per step for ever, cut off every 5 steps: Q is 1 / (1 - 0.8) = 5 all the same."""

    class Endless(Counting):
        def __init__(self):
            super().__init__(truncate_at=5)

        def _obs(self):  # all alike: the last one of an episode is not learned from
            return np.ones(2, np.float32)

    settings = {name: getattr(algo, name) for name in algo._explicit}
    more = {"lr": 3e-3, "gamma": 0.8, "exploration_fraction": 0.1}
    if isinstance(algo, DQN):
        more |= {"learning_starts": 100, "target_update_interval": 20, "replay_ratio": 0.5}
    values = []
    headrace.train(
        Endless, algo=type(algo)(**settings | more), total_env_steps=6_400,
        run_dir=tmp_path / "run", on_update=lambda _, m: values.append(m.get("mean_value")),
        **SMALL,
    )  # fmt: skip
    assert 4.5 < values[-1] < 5.5


@pytest.mark.more
def test_rainbow_is_dqn_with_its_parts(tmp_path):
    parts = {"n_step": 3, "priority_alpha": 0.5, "dueling": True, "noisy": True}
    one = train(tmp_path / "a", headrace.Rainbow(**BASE["dqn"]))
    same = train(tmp_path / "b", DQN(**BASE["dqn"], **parts, distribution="qr"))
    plain = train(tmp_path / "c", DQN(**BASE["dqn"]))
    weights = [checkpoint.newest(run.dir).tensors("policy_default") for run in (one, same, plain)]
    assert weights[0].keys() == weights[1].keys() != weights[2].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


class Recall(gym.Env):
    """The first observation shows which of two actions is right four steps later."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 1], np.float32), {}

    def step(self, action):
        self.t += 1
        is_over = self.t == 4
        reward = float(is_over and action == self.cue)
        return np.zeros(2, np.float32), reward, is_over, False, {}


RECURRENT = {
    "core": "gru", "core_size": 16, "hidden_sizes": (32,), "n_step": 1, "lr": 3e-3,
    "lr_schedule": "constant", "num_workers": 0, "seed": 1, "quiet": True,
}  # fmt: skip


@pytest.mark.more
def test_a_recurrent_core_remembers_what_it_saw(tmp_path):
    run = headrace.train(
        Recall, algo="dqn", run_dir=tmp_path / "run", total_env_steps=6_000, learning_starts=500,
        replay_ratio=0.25, sequence_length=8, burn_in=4, **RECURRENT,
    )  # fmt: skip
    assert np.mean(run.evaluate(episodes=50).returns) > 0.9  # without a memory: 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"priority_alpha": 0.6}, "priority_alpha=0.6.*sequences are drawn.*--priority-alpha 0"),
        ({"replay_size": 512}, "replay_size=512: 6. rows of each of 8.*2 \\* 49.*replay-size 784"),
        ({"num_learners": 2}, "num_learners=2.*one learner.*--num-learners 1"),
    ],
)
def test_what_sequences_cannot_have_is_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=rf"(?s){words}"):
        headrace.train(
            Recall, algo="dqn", run_dir=tmp_path / "run", total_env_steps=640, learning_starts=64,
            **RECURRENT | settings,
        )  # fmt: skip


def test_the_burn_in_of_a_sequence_gets_no_gradient():
    spec = EnvSpec("x", Space("box", (3,), "float32"), Space("discrete", (), "int64", nvec=(2,)))
    network = Network(core="lstm", core_size=4, hidden_sizes=(8,))
    policy = QPolicy(spec, network, epsilon=0.0)
    obs = torch.randn(7, 5, 3, requires_grad=True)
    reset = torch.rand(7, 5) < 0.3
    memory = torch.randn(5, 8), reset
    outputs = policy.outputs_of_sequence(obs, *memory, burn_in=3)
    whole = policy.outputs_of_sequence(obs, *memory, burn_in=0)
    torch.testing.assert_close(outputs, whole[3:])
    outputs.sum().backward()
    assert (obs.grad[:3] == 0).all()
    assert (obs.grad[3:] != 0).any()
