"""DQN in one file, with nothing of headrace: to read, and to test the package against.

One process, one network, Gymnasium environments with discrete actions, and a list for the replay.
It does what the package does in the plainest way that we know; given the same random numbers the
two agree to the bit (tests/ladder/test_one_file_dqn.py). What the package has on top (memory that
is reused, several steps per target, normalized layers, priorities, processes, checkpoints) is left
out.

    python examples/dqn_one_file.py            # CartPole-v1
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Settings; the defaults suit CartPole-v1."""

    total_env_steps: int = 50_000
    num_envs: int = 8
    num_steps: int = 32
    batch_size: int = 64
    replay_ratio: float = 0.5
    learning_starts: int = 1_000
    target_update_interval: int = 10
    exploration_fraction: float = 0.16
    final_epsilon: float = 0.04
    double_q: bool = True
    lr: float = 2.3e-3
    gamma: float = 0.99
    max_grad_norm: float = 10.0


class Randomness:
    """Where the random numbers come from; the test puts the package's in its place."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = np.random.default_rng(seed)

    def reset_seed(self, env: int, episode: int) -> int:
        """The seed of one episode."""
        return int(np.random.SeedSequence([self._seed, env, episode]).generate_state(1)[0])

    def noise(self, first_step: int, num_steps: int, num_envs: int) -> np.ndarray[Any, Any]:
        """`[T, N]` uniform numbers in (0, 1) that choose the actions."""
        return self._rng.uniform(1e-6, 1 - 1e-6, (num_steps, num_envs)).astype(np.float32)

    def draws(self, gradient_step: int, batch_size: int) -> np.ndarray[Any, Any]:
        """`[B]` uniform numbers in [0, 1) that choose the transitions of a gradient step."""
        return self._rng.random(batch_size)


class QNetwork(nn.Sequential):
    """Two hidden layers, and a value for each action."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        def layer(num_in: int, num_out: int, gain: float) -> nn.Linear:
            linear = nn.Linear(num_in, num_out)
            nn.init.orthogonal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)
            return linear

        super().__init__(
            layer(num_inputs, 256, 2**0.5), nn.ReLU(),
            layer(256, 256, 2**0.5), nn.ReLU(),
            layer(256, num_actions, 1.0),
        )  # fmt: skip


@dataclass
class Transition:
    """One step of one env."""

    obs: Tensor
    action: int
    reward: float
    terminated: bool
    next_obs: Tensor


def train(
    make_env: Callable[[], Any],
    cfg: Config,
    randomness: Randomness,
    network: QNetwork | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> QNetwork:
    """Train `network` (default: a new one), reporting (env steps, mean return) now and then."""
    T, N = cfg.num_steps, cfg.num_envs  # noqa: N806
    envs = [make_env() for _ in range(N)]
    num_actions = int(envs[0].action_space.n)
    network = network or QNetwork(int(np.prod(envs[0].observation_space.shape)), num_actions)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=cfg.lr, eps=1e-5, fused=True)

    replay: list[list[Transition]] = [[] for _ in envs]  # of each env, oldest first
    epsilon, learner_steps = torch.tensor(1.0), 0
    episode = [0] * N
    episode_return = [0.0] * N
    finished: list[float] = []
    obs = torch.stack([
        torch.from_numpy(env.reset(seed=randomness.reset_seed(i, 0))[0])
        for i, env in enumerate(envs)
    ])  # fmt: skip

    for update in range(-(-cfg.total_env_steps // (T * N))):
        # 1. Take T steps of every env: the best action or, with probability epsilon, any.
        noise = torch.from_numpy(randomness.noise(update * T, T, N))
        for t in range(T):
            with torch.no_grad():
                best = network(obs).argmax(-1)
            any_action = torch.full((N, num_actions), 1 / num_actions)
            best_action = nn.functional.one_hot(best, num_actions)
            probability = epsilon * any_action + (1 - epsilon) * best_action
            # The first action whose cumulative probability reaches the noise.
            cdf = probability.cumsum(-1)
            action = (cdf < noise[t].unsqueeze(-1) * cdf[:, -1:]).sum(-1)
            following = []
            for i, env in enumerate(envs):
                o, r, terminated, truncated, _ = env.step(action[i].numpy())
                o = torch.from_numpy(o)
                replay[i].append(Transition(obs[i], int(action[i]), float(r), terminated, o))
                episode_return[i] += float(r)
                if terminated or truncated:
                    finished.append(episode_return[i])
                    episode[i] += 1
                    episode_return[i] = 0.0
                    o = torch.from_numpy(env.reset(seed=randomness.reset_seed(i, episode[i]))[0])
                following.append(o)
            obs = torch.stack(following)

        # 2. Take the gradient steps that are due. A batch has one transition of each of
        #    `batch_size` equal parts of the replay.
        env_steps = (update + 1) * T * N
        kept = [transition for of_env in replay for transition in of_env]
        ratio = Fraction(str(cfg.replay_ratio))
        while learner_steps < int(ratio * max(0, env_steps - cfg.learning_starts)):
            draws = randomness.draws(learner_steps, cfg.batch_size)
            parts = (np.arange(cfg.batch_size) + draws) * (len(kept) / cfg.batch_size)
            batch = [kept[int(part)] for part in parts]
            reward = torch.tensor([each.reward for each in batch])
            goes_on = torch.tensor([not each.terminated for each in batch]).float()
            chosen = torch.tensor([each.action for each in batch])
            next_obs = torch.stack([each.next_obs for each in batch])
            with torch.no_grad():
                values = target(next_obs)
                best = (network(next_obs) if cfg.double_q else values).argmax(-1)
                future = values.gather(-1, best.unsqueeze(-1)).squeeze(-1)
                goal = torch.addcmul(reward, cfg.gamma * goes_on, future)
            value = network(torch.stack([each.obs for each in batch]))
            value = value.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            error = nn.functional.smooth_l1_loss(value, goal, reduction="none")
            loss = (error * torch.full_like(error, 1 / len(batch))).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), cfg.max_grad_norm)
            optimizer.step()
            learner_steps += 1
            if learner_steps % cfg.target_update_interval == 0:
                target.load_state_dict(network.state_dict())

        # Epsilon falls from 1; that of an update is as of the update's beginning.
        passed = update * T * N / cfg.total_env_steps / cfg.exploration_fraction
        epsilon.fill_(1 + (cfg.final_epsilon - 1) * min(1.0, passed))
        if on_update is not None:
            recent = finished[-100:]
            on_update(env_steps, sum(recent) / max(1, len(recent)))

    for env in envs:
        env.close()
    return network


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)

    def show(env_steps: int, mean_return: float) -> None:
        """One line in 10 updates."""
        if env_steps % (10 * 256) == 0:
            print(f"{env_steps:>8,} env steps  mean return {mean_return:6.1f}")

    train(lambda: gym.make("CartPole-v1"), Config(), Randomness(1), on_update=show)
