"""PPO in one file, with nothing of headrace: to read, and to test the package against.

One process, one network, Gymnasium environments with discrete actions. It does what the package
does in the plainest way that we know; given the same random numbers the two agree to the bit
(tests/ladder/test_one_file.py). What the package has on top (processes, normalizers, continuous
actions, checkpoints, several learners) is left out.

    python examples/ppo_one_file.py            # CartPole-v1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Settings; the defaults suit CartPole-v1."""

    total_env_steps: int = 100_000
    num_envs: int = 8
    num_steps: int = 32
    num_epochs: int = 20
    num_minibatches: int = 1
    lr: float = 1e-3
    gamma: float = 0.98
    gae_lambda: float = 0.8
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


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

    def order(self, update: int, epoch: int, num_steps: int, num_envs: int) -> np.ndarray[Any, Any]:
        """`[T, N]`: for each env (column) the order in which its steps are learned from."""
        return np.argsort(self._rng.random((num_steps, num_envs)), axis=0)


class Agent(nn.Module):
    """Two separate networks: one for the action's logits, one for the value."""

    def __init__(self, num_inputs: int, num_actions: int) -> None:
        super().__init__()

        def layer(num_in: int, num_out: int, gain: float) -> nn.Linear:
            linear = nn.Linear(num_in, num_out)
            nn.init.orthogonal_(linear.weight, gain)
            nn.init.zeros_(linear.bias)
            return linear

        def network(num_outputs: int, last_gain: float) -> nn.Sequential:
            return nn.Sequential(
                layer(num_inputs, 64, 2**0.5), nn.Tanh(),
                layer(64, 64, 2**0.5), nn.Tanh(),
                layer(64, num_outputs, last_gain),
            )  # fmt: skip

        self.actor = network(num_actions, 0.01)
        self.critic = network(1, 1.0)

    def value(self, obs: Tensor) -> Tensor:
        """V(s)."""
        value: Tensor = self.critic(obs)
        return value.squeeze(-1)


def train(
    make_env: Callable[[], Any],
    cfg: Config,
    randomness: Randomness,
    agent: Agent | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> Agent:
    """Train `agent` (default: a new one), reporting (env steps, mean return) after each update."""
    T, N = cfg.num_steps, cfg.num_envs  # noqa: N806
    envs = [make_env() for _ in range(N)]
    num_inputs = int(np.prod(envs[0].observation_space.shape))
    agent = agent or Agent(num_inputs, int(envs[0].action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5, fused=True)

    obs = torch.zeros(T + 1, N, num_inputs)
    action = torch.zeros(T, N, dtype=torch.int64)
    log_prob, value, reward, next_value = (torch.zeros(T, N) for _ in range(4))
    terminated, truncated = (torch.zeros(T, N, dtype=torch.bool) for _ in range(2))

    episode = [0] * N
    episode_return = [0.0] * N
    finished: list[float] = []
    for i, env in enumerate(envs):
        obs[0, i] = torch.from_numpy(env.reset(seed=randomness.reset_seed(i, 0))[0])

    num_updates = -(-cfg.total_env_steps // (T * N))
    for update in range(num_updates):
        # 1. Collect T steps of every env.
        noise = torch.from_numpy(randomness.noise(update * T, T, N))
        cut_short: list[tuple[int, int, Tensor]] = []  # step, env, final observation
        with torch.no_grad():
            for t in range(T):
                log_p = agent.actor(obs[t]).log_softmax(-1)
                value[t] = agent.value(obs[t])
                # The first action whose cumulative probability reaches the noise.
                cdf = log_p.exp().cumsum(-1)
                action[t] = (cdf < noise[t].unsqueeze(-1) * cdf[:, -1:]).sum(-1)
                log_prob[t] = log_p.gather(-1, action[t].unsqueeze(-1)).squeeze(-1)
                for i, env in enumerate(envs):
                    o, r, terminated[t, i], truncated[t, i], _ = env.step(action[t, i].numpy())
                    reward[t, i] = float(r)
                    episode_return[i] += float(r)
                    if terminated[t, i] or truncated[t, i]:
                        if not terminated[t, i]:
                            cut_short.append((t, i, torch.from_numpy(o)))
                        finished.append(episode_return[i])
                        episode[i] += 1
                        episode_return[i] = 0.0
                        o, _ = env.reset(seed=randomness.reset_seed(i, episode[i]))
                    obs[t + 1, i] = torch.from_numpy(o)

            # 2. Advantages. The next state's value is the next row's, except where a time limit
            #    cut the episode: there it is the final observation's. A terminal state has none.
            next_value[:-1] = value[1:]
            next_value[-1] = agent.value(obs[T])
            if cut_short:
                steps, columns, finals = zip(*cut_short, strict=True)
                next_value[list(steps), list(columns)] = agent.value(torch.stack(finals))
            advantage = torch.zeros(T, N)
            trace = torch.zeros(N)
            for t in reversed(range(T)):
                delta = reward[t] + cfg.gamma * next_value[t] * ~terminated[t] - value[t]
                goes_on = ~(terminated[t] | truncated[t])
                trace = torch.addcmul(delta, cfg.gamma * cfg.gae_lambda * goes_on.float(), trace)
                advantage[t] = trace
            target = advantage + value

        # 3. Learn: every minibatch takes the same number of steps of every env.
        flat_obs = obs[:T].reshape(T * N, num_inputs)
        flat = [x.reshape(T * N) for x in (action, log_prob, advantage, target)]
        for epoch in range(cfg.num_epochs):
            order = torch.from_numpy(randomness.order(update, epoch, T, N))
            rows = order * N + torch.arange(N)
            for index in rows.reshape(cfg.num_minibatches, -1):
                b_action, b_log_prob, b_advantage, b_target = (x[index] for x in flat)
                weight = torch.ones(len(index)) / len(index)
                mean = (b_advantage * weight).sum()
                deviation = ((b_advantage - mean).square() * weight).sum().sqrt()
                target_mean = (b_target * weight).sum()
                spread = ((b_target - target_mean).square() * weight).sum().sqrt()
                # Once a task is solved, advantages are noise, which is not to be scaled up.
                deviation = torch.maximum(deviation, 0.05 * spread)
                b_advantage = (b_advantage - mean) / (deviation + 1e-8)

                log_p = agent.actor(flat_obs[index]).log_softmax(-1)
                new_log_prob = log_p.gather(-1, b_action.unsqueeze(-1)).squeeze(-1)
                ratio = (new_log_prob - b_log_prob).exp()
                clipped = ratio.clamp(1 - cfg.clip_coef, 1 + cfg.clip_coef)
                gain = torch.min(ratio * b_advantage, clipped * b_advantage)
                error = (agent.value(flat_obs[index]) - b_target).square()
                entropy = -(log_p.exp() * log_p).sum(-1)
                loss = (
                    -(gain * weight).sum()
                    + cfg.vf_coef * (0.5 * (error * weight).sum())
                    - cfg.ent_coef * (entropy * weight).sum()
                )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
                optimizer.step()

        obs[0] = obs[T].clone()
        if on_update is not None:
            recent = finished[-100:]
            on_update((update + 1) * T * N, sum(recent) / max(1, len(recent)))

    for env in envs:
        env.close()
    return agent


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)

    def show(env_steps: int, mean_return: float) -> None:
        """One line in 40 updates."""
        if env_steps % (40 * 256) == 0:
            print(f"{env_steps:>8,} env steps  mean return {mean_return:6.1f}")

    train(lambda: gym.make("CartPole-v1"), Config(), Randomness(1), on_update=show)
