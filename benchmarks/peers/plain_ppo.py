"""The plain PPO: one process, one file, on ready-made vector environments, with nothing clever.

What anyone would write who needs PPO once, and so the least that a library should reach. Breakout
steps in ale-py's own vector environment, all else in Gymnasium's SyncVectorEnv. A time limit is
taken for an end, as it often is.
"""

import argparse
import collections
import math

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.peers.make_env import make_env
from benchmarks.peers.result import Stopwatch
from benchmarks.peers.works import SETTINGS

GAMMA, GAE_LAMBDA = 0.99, 0.95
CLIP, VF_COEF, MAX_GRAD_NORM = 0.2, 0.5, 0.5
GAIN = 2**0.5
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def layer(module, gain):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Categorical:
    """One of several actions, `[n]`."""

    def __init__(self, logits):
        self.log_probs = torch.log_softmax(logits, -1)

    def sample(self):
        return torch.multinomial(self.log_probs.exp(), 1)[:, 0]

    def log_prob(self, action):
        return self.log_probs.gather(1, action[:, None])[:, 0]

    def entropy(self):
        return -(self.log_probs.exp() * self.log_probs).sum(-1)


class Gaussian:
    """Some numbers, `[n, k]`, with a deviation that does not depend on the observation."""

    def __init__(self, mean, log_std):
        self.mean, self.log_std = mean, log_std

    def sample(self):
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def log_prob(self, action):
        scaled = (action - self.mean) / self.log_std.exp()
        return -(0.5 * scaled.square() + self.log_std + HALF_LOG_2_PI).sum(-1)

    def entropy(self):
        return (self.log_std + 0.5 + HALF_LOG_2_PI).sum().expand(len(self.mean))


class Mlp(nn.Module):
    """2 × 64 tanh, separate actor and critic; `log_std` is there for actions in a Box."""

    def __init__(self, num_inputs, actions):
        super().__init__()

        def trunk_and_head(num_outputs, gain):
            return nn.Sequential(
                layer(nn.Linear(num_inputs, 64), GAIN),
                nn.Tanh(),
                layer(nn.Linear(64, 64), GAIN),
                nn.Tanh(),
                layer(nn.Linear(64, num_outputs), gain),
            )

        is_box = isinstance(actions, gym.spaces.Box)
        num_outputs = actions.shape[0] if is_box else int(actions.n)
        self.actor, self.critic = trunk_and_head(num_outputs, 0.01), trunk_and_head(1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if is_box else None

    def forward(self, obs):
        outputs, value = self.actor(obs), self.critic(obs)[:, 0]
        if self.log_std is None:
            return Categorical(outputs), value
        return Gaussian(outputs, self.log_std), value


class NatureCnn(nn.Module):
    """The network of Mnih et al. 2015, shared by actor and critic."""

    def __init__(self, num_actions):
        super().__init__()
        self.trunk = nn.Sequential(
            layer(nn.Conv2d(4, 32, 8, 4), GAIN),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, 2), GAIN),
            nn.ReLU(),
            layer(nn.Conv2d(64, 64, 3, 1), GAIN),
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(3136, 512), GAIN),
            nn.ReLU(),
        )
        self.actor = layer(nn.Linear(512, num_actions), 0.01)
        self.critic = layer(nn.Linear(512, 1), 1.0)

    def forward(self, obs):
        hidden = self.trunk(obs.float() / 255)
        return Categorical(self.actor(hidden)), self.critic(hidden)[:, 0]


class Rollouts:
    """T steps of N environments, again and again, and the returns of finished episodes."""

    def __init__(self, env, net, num_steps):
        self.env, self.net, self.num_steps = env, net, num_steps
        shape, obs_space = (num_steps, env.num_envs), env.single_observation_space
        dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
        self.obs = torch.zeros((num_steps + 1, env.num_envs, *obs_space.shape), dtype=dtype)
        actions = env.single_action_space
        self.low_high = (actions.low, actions.high) if isinstance(actions, gym.spaces.Box) else None
        dtype = torch.float32 if self.low_high else torch.int64
        self.action = torch.zeros((*shape, *actions.shape), dtype=dtype)
        self.log_prob, self.reward, self.done = (torch.zeros(shape) for _ in range(3))
        self.value = torch.zeros(num_steps + 1, env.num_envs)
        self.obs[-1] = torch.as_tensor(env.reset(seed=0)[0])
        self.episode_return = np.zeros(env.num_envs)
        self.returns = collections.deque(maxlen=100)

    @torch.no_grad()
    def collect(self):
        self.obs[0] = self.obs[-1]
        for t in range(self.num_steps):
            chances, self.value[t] = self.net(self.obs[t])
            action = chances.sample()
            self.action[t], self.log_prob[t] = action, chances.log_prob(action)
            taken = action.numpy().clip(*self.low_high) if self.low_high else action.numpy()
            obs, reward, terminated, truncated, _ = self.env.step(taken)
            done = terminated | truncated
            self.obs[t + 1] = torch.as_tensor(obs)
            self.reward[t], self.done[t] = torch.as_tensor(reward), torch.as_tensor(done)
            self.episode_return += reward
            for ended in np.flatnonzero(done):
                self.returns.append(self.episode_return[ended])
                self.episode_return[ended] = 0
        self.value[-1] = self.net(self.obs[-1])[1]

    def advantages(self):
        advantages = torch.zeros_like(self.reward)
        trace = torch.zeros(self.env.num_envs)
        for t in reversed(range(self.num_steps)):
            live = 1 - self.done[t]
            error = self.reward[t] + GAMMA * self.value[t + 1] * live - self.value[t]
            trace = error + GAMMA * GAE_LAMBDA * live * trace
            advantages[t] = trace
        return advantages


def update(net, optimizer, rollouts, settings):
    advantages = rollouts.advantages()
    returns = (advantages + rollouts.value[:-1]).reshape(-1)
    obs = rollouts.obs[:-1].flatten(0, 1)
    actions, old_log_probs = rollouts.action.flatten(0, 1), rollouts.log_prob.reshape(-1)
    advantages = advantages.reshape(-1)
    columns = obs, actions, old_log_probs, advantages, returns
    for _ in range(settings.num_epochs):
        for rows in torch.randperm(len(obs)).chunk(settings.num_minibatches):
            gradient_step(net, optimizer, [column[rows] for column in columns], settings.ent_coef)


def loss(net, obs, action, old_log_prob, advantage, target, ent_coef):
    chances, value = net(obs)
    ratio = (chances.log_prob(action) - old_log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
    value_loss = (value - target).square().mean()
    return policy_loss + VF_COEF * value_loss - ent_coef * chances.entropy().mean()


def gradient_step(net, optimizer, columns, ent_coef, loss=loss):
    optimizer.zero_grad(set_to_none=True)
    loss(net, *columns, ent_coef).backward()
    nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
    optimizer.step()


def make_vector(env, num_envs):
    return gym.vector.SyncVectorEnv(
        [lambda: make_env(env)] * num_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(SETTINGS), required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    settings = SETTINGS[args.work]
    if args.work == "atari":
        from benchmarks.peers import atari

        env = atari.make_vector(settings.num_envs, args.threads)
        net = NatureCnn(int(env.single_action_space.n))
    else:
        env = make_vector(settings.env, settings.num_envs)
        net = Mlp(env.single_observation_space.shape[0], env.single_action_space)
    optimizer = torch.optim.Adam(net.parameters(), lr=settings.lr, eps=1e-5, fused=True)
    rollouts = Rollouts(env, net, settings.num_steps)
    stopwatch, env_steps = Stopwatch(), 0
    while env_steps < args.env_steps:
        rollouts.collect()
        update(net, optimizer, rollouts, settings)
        env_steps += rollouts.reward.numel()
        stopwatch.mark(env_steps)
    stopwatch.print_result(np.mean(rollouts.returns) if rollouts.returns else None)
    env.close()


if __name__ == "__main__":
    main()
