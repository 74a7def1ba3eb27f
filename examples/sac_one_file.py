"""SAC in one file, with nothing of headrace: to read, and to test the package against.

One process, a policy and two critics, Gymnasium environments with bounded continuous actions, and a
list for the replay. It does what the package does in the plainest way that we know; given the same
random numbers the two agree to the bit (tests/ladder/test_one_file_sac.py). What the package has on
top (memory that is reused, several steps per target, priorities, processes, checkpoints) is left
out.

    python examples/sac_one_file.py            # Pendulum-v1
"""

import copy
import math
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
    """Settings; the defaults suit Pendulum-v1."""

    total_env_steps: int = 20_000
    num_envs: int = 8
    num_steps: int = 8
    batch_size: int = 256
    replay_ratio: float = 1.0
    learning_starts: int = 1_000
    lr: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005
    target_entropy: float = -1.0  # of each component of an action


class Randomness:
    """Where the random numbers come from; the test puts the package's in its place."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = np.random.default_rng(seed)

    def reset_seed(self, env: int, episode: int) -> int:
        """The seed of one episode."""
        return int(np.random.SeedSequence([self._seed, env, episode]).generate_state(1)[0])

    def noise(self, first_step: int, size: tuple[int, int, int]) -> np.ndarray[Any, Any]:
        """`[T, N, A]` uniform numbers in (0, 1) that choose the actions."""
        return self._rng.uniform(1e-6, 1 - 1e-6, size).astype(np.float32)

    def draws(self, gradient_step: int, batch_size: int) -> np.ndarray[Any, Any]:
        """`[B]` uniform numbers in [0, 1) that choose the transitions of a gradient step."""
        return self._rng.random(batch_size)

    def normal(self, gradient_step: int, batch_size: int, count: int) -> Tensor:
        """`[B, count]` normal numbers that choose the actions of a gradient step."""
        return torch.from_numpy(self._rng.standard_normal((batch_size, count))).float()


class Policy(nn.Sequential):
    """Two hidden layers; a mean and the logarithm of a deviation for each part of an action."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__(
            nn.Linear(num_inputs, 256), nn.ReLU(),
            nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 2 * num_actions),
        )  # fmt: skip

    def draw(self, obs: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1], and their log-probabilities."""
        mean, log_std = self(obs).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        before = mean + log_std.exp() * normal
        action = before.tanh()
        squashed = 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
        gaussian = -0.5 * normal.square() - log_std - 0.5 * math.log(2 * math.pi)
        return action, (gaussian - squashed).sum(-1)


class Critics(nn.Module):
    """Two networks with two hidden layers each, computed side by side: weights `[2, in, out]`."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for num_in, num_out in ((num_inputs, 256), (256, 256), (256, 1)):
            bound = 1 / math.sqrt(num_in)
            self.weights.append(nn.Parameter(torch.empty(2, num_in, num_out)))
            self.biases.append(nn.Parameter(torch.empty(2, 1, num_out)))
            nn.init.uniform_(self.weights[-1], -bound, bound)
            nn.init.uniform_(self.biases[-1], -bound, bound)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """The values of both networks, `[2, B]`."""
        at = torch.cat((obs, action), -1).expand(2, -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            at = torch.baddbmm(bias, at, weight)
            at = at.relu() if layer < 2 else at
        return at.squeeze(-1)


@dataclass
class Transition:
    """One step of one env. The action is in [-1, 1]."""

    obs: Tensor
    action: Tensor
    reward: float
    terminated: bool
    next_obs: Tensor


def train(
    make_env: Callable[[], Any],
    cfg: Config,
    randomness: Randomness,
    policy: Policy | None = None,
    critics: Critics | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> Policy:
    """Train `policy` (default: a new one), reporting (env steps, mean return) now and then."""
    T, N = cfg.num_steps, cfg.num_envs  # noqa: N806
    envs = [make_env() for _ in range(N)]
    space = envs[0].action_space
    num_obs, num_actions = int(np.prod(envs[0].observation_space.shape)), int(np.prod(space.shape))
    scale, shift = (space.high - space.low) / 2, (space.high + space.low) / 2
    policy, critics = (
        policy or Policy(num_obs, num_actions),
        critics or Critics(num_obs + num_actions),
    )
    target = copy.deepcopy(critics)
    log_alpha = nn.Parameter(torch.zeros(()))

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=cfg.lr, fused=True)

    of_policy, of_critics, of_alpha = (
        adam(of) for of in (policy.parameters(), critics.parameters(), [log_alpha])
    )

    replay: list[list[Transition]] = [[] for _ in envs]  # of each env, oldest first
    learner_steps = 0
    episode = [0] * N
    episode_return = [0.0] * N
    finished: list[float] = []
    obs = torch.stack([
        torch.from_numpy(env.reset(seed=randomness.reset_seed(i, 0))[0])
        for i, env in enumerate(envs)
    ])  # fmt: skip

    for update in range(-(-cfg.total_env_steps // (T * N))):
        # 1. Take T steps of every env: at random at first, then by the policy.
        env_steps = update * T * N
        noise = torch.from_numpy(randomness.noise(update * T, (T, N, num_actions)))
        for t in range(T):
            action = 2 * noise[t] - 1
            if env_steps >= cfg.learning_starts:
                with torch.no_grad():
                    mean, log_std = policy(obs).chunk(2, -1)
                normal = torch.special.ndtri(noise[t])
                action = (mean + log_std.clamp(-20, 2).exp() * normal).tanh()
            following = []
            for i, env in enumerate(envs):
                scaled = np.clip(action[i].numpy() * scale + shift, space.low, space.high)
                o, r, terminated, truncated, _ = env.step(scaled.reshape(space.shape))
                o = torch.from_numpy(o)
                replay[i].append(Transition(obs[i], action[i], float(r), terminated, o))
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
            seen, next_obs, taken = (
                torch.stack([getattr(each, name) for each in batch])
                for name in ("obs", "next_obs", "action")
            )
            reward = torch.tensor([each.reward for each in batch])
            goes_on = torch.tensor([not each.terminated for each in batch]).float()
            normal = randomness.normal(learner_steps, cfg.batch_size, 2 * num_actions)
            for_target, for_policy = normal.chunk(2, -1)
            weight, alpha = torch.full_like(reward, 1 / len(batch)), log_alpha.detach().exp()

            # The critics: y = r + γ (min_i Q_target_i(s', a') - α log π(a' | s'))
            with torch.no_grad():
                action, log_prob = policy.draw(next_obs, for_target)
                future = target(next_obs, action).amin(0) - alpha * log_prob
                goal = torch.addcmul(reward, cfg.gamma * goes_on, future)
            error = critics(seen, taken) - goal
            _step(of_critics, (error.square().sum(0) * weight).sum())

            # The policy: α log π(a | s) - min_i Q_i(s, a)
            action, log_prob = policy.draw(seen, for_policy)
            value = critics(seen, action).amin(0)
            _step(of_policy, ((alpha * log_prob - value) * weight).sum())

            # The temperature: it falls where the entropy is above its target.
            above = log_prob.detach() + cfg.target_entropy * num_actions
            _step(of_alpha, -(log_alpha * above * weight).sum())

            with torch.no_grad():
                for old, new in zip(target.parameters(), critics.parameters(), strict=True):
                    old.lerp_(new, cfg.tau)
            learner_steps += 1

        if on_update is not None:
            recent = finished[-100:]
            on_update(env_steps, sum(recent) / max(1, len(recent)))

    for env in envs:
        env.close()
    return policy


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step. What the policy's loss left in the critics' gradients is cleared first."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)

    def show(env_steps: int, mean_return: float) -> None:
        """One line in 10 updates."""
        if env_steps % (10 * 64) == 0:
            print(f"{env_steps:>8,} env steps  mean return {mean_return:7.1f}")

    train(lambda: gym.make("Pendulum-v1"), Config(), Randomness(1), on_update=show)
