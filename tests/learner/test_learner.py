"""What the learner does to its normalizers, in a run."""

import gymnasium as gym
import numpy as np
import torch

import headrace


class Far(gym.Env):
    """Observations near 1,000 and rewards near 500, in episodes of five steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), 500.0 + action, False, self.t == 5, {}

    def _observe(self):
        return (1000 + self.np_random.normal(size=3)).astype(np.float32)


class Watched(torch.nn.Module):
    """A network that keeps what it sees, apart at acting and at learning."""

    seen: dict = {}  # noqa: RUF012

    def __init__(self, spec):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2 + 1)

    def forward(self, obs):
        self.seen.setdefault(torch.is_grad_enabled(), []).append(obs.detach().clone())
        out = self.layer(obs)
        return out[..., :-1], out[..., -1]


def test_the_first_batch_sets_the_normalizers_before_it_is_learned_from(tmp_path):
    Watched.seen = {}
    value_losses = []
    headrace.train(
        Far, algo=headrace.PPO(num_epochs=1, num_minibatches=2, lr=0.0), total_env_steps=128,
        num_envs=4, num_steps=16, num_workers=0, model=Watched, seed=1, quiet=True,
        network=headrace.Network(normalize_obs=True, normalize_reward=True),
        run_dir=tmp_path / "run", on_update=lambda _, m: value_losses.append(m["value_loss"]),
    )  # fmt: skip
    acted, learned = Watched.seen[False], Watched.seen[True]
    assert 10 in torch.cat(acted[:32])  # clipped: no normalizer had data yet
    first = torch.cat(learned[:2])
    assert first.mean().abs() < 1e-3
    assert (first.std(correction=0) - 1).abs() < 1e-2
    assert value_losses[0] < 1e4  # half of the square of 500 would be 125,000


def test_normalizers_that_have_data_are_not_set_again(tmp_path):
    """A run that begins with another run's policy acts and learns with the same normalization."""
    given = {
        "algo": headrace.PPO(num_epochs=1, num_minibatches=1, lr=0.0),
        "num_envs": 4, "num_steps": 16, "num_workers": 0, "model": Watched, "quiet": True,
        "network": headrace.Network(normalize_obs=True),
    }  # fmt: skip
    headrace.train(Far, total_env_steps=640, seed=1, run_dir=tmp_path / "before", **given)
    Watched.seen = {}
    headrace.train(
        Far, total_env_steps=64, seed=2, run_dir=tmp_path / "run",
        init_from=str(tmp_path / "before"), **given,
    )  # fmt: skip
    (learned,) = Watched.seen[True]
    assert torch.isin(
        learned, torch.cat([each.reshape(-1, 3) for each in Watched.seen[False]])
    ).all()
