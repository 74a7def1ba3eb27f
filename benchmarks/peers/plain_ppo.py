"""The plain PPO: one process, one file, on ready-made vector environments, with nothing clever.

What anyone would write who needs PPO once, and so the least that a library should reach. CartPole
steps in Gymnasium's SyncVectorEnv, Breakout in ale-py's own vector environment.
"""

import argparse
import collections

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.peers.result import Stopwatch

NUM_EPOCHS, NUM_MINIBATCHES = 4, 4
LR, GAMMA, GAE_LAMBDA = 2.5e-4, 0.99, 0.95
CLIP, ENT_COEF, VF_COEF, MAX_GRAD_NORM = 0.2, 0.01, 0.5, 0.5
GAIN = 2**0.5


def layer(module, gain):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Mlp(nn.Module):
    """2 × 64 tanh, separate actor and critic."""

    def __init__(self, num_inputs, num_actions):
        super().__init__()

        def trunk_and_head(num_outputs, gain):
            return nn.Sequential(
                layer(nn.Linear(num_inputs, 64), GAIN),
                nn.Tanh(),
                layer(nn.Linear(64, 64), GAIN),
                nn.Tanh(),
                layer(nn.Linear(64, num_outputs), gain),
            )

        self.actor, self.critic = trunk_and_head(num_actions, 0.01), trunk_and_head(1, 1.0)

    def forward(self, obs):
        return self.actor(obs), self.critic(obs)[:, 0]


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
        return self.actor(hidden), self.critic(hidden)[:, 0]


class Rollouts:
    """T steps of N environments, again and again, and the returns of finished episodes."""

    def __init__(self, env, net, num_steps):
        self.env, self.net, self.num_steps = env, net, num_steps
        shape, obs_space = (num_steps, env.num_envs), env.single_observation_space
        dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
        self.obs = torch.zeros((num_steps + 1, env.num_envs, *obs_space.shape), dtype=dtype)
        self.action = torch.zeros(shape, dtype=torch.int64)
        self.log_prob, self.reward, self.done = (torch.zeros(shape) for _ in range(3))
        self.value = torch.zeros(num_steps + 1, env.num_envs)
        self.obs[-1] = torch.as_tensor(env.reset(seed=0)[0])
        self.episode_return = np.zeros(env.num_envs)
        self.returns = collections.deque(maxlen=100)

    @torch.no_grad()
    def collect(self):
        self.obs[0] = self.obs[-1]
        for t in range(self.num_steps):
            logits, self.value[t] = self.net(self.obs[t])
            log_probs = torch.log_softmax(logits, -1)
            action = torch.multinomial(log_probs.exp(), 1)
            self.action[t] = action[:, 0]
            self.log_prob[t] = log_probs.gather(1, action)[:, 0]
            obs, reward, terminated, truncated, _ = self.env.step(action[:, 0].numpy())
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


def update(net, optimizer, rollouts):
    advantages = rollouts.advantages()
    returns = (advantages + rollouts.value[:-1]).reshape(-1)
    obs = rollouts.obs[:-1].flatten(0, 1)
    actions, old_log_probs = rollouts.action.reshape(-1, 1), rollouts.log_prob.reshape(-1)
    advantages = advantages.reshape(-1)
    for _ in range(NUM_EPOCHS):
        for rows in torch.randperm(len(obs)).chunk(NUM_MINIBATCHES):
            logits, value = net(obs[rows])
            log_probs = torch.log_softmax(logits, -1)
            ratio = (log_probs.gather(1, actions[rows])[:, 0] - old_log_probs[rows]).exp()
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value_loss = (value - returns[rows]).square().mean()
            entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
            loss = policy_loss + VF_COEF * value_loss - ENT_COEF * entropy
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def make_cartpoles(num_envs):
    return gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * num_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", choices=["cartpole", "atari"], required=True)
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.env == "cartpole":
        env = make_cartpoles(args.num_envs)
        net = Mlp(env.single_observation_space.shape[0], int(env.single_action_space.n))
    else:
        from benchmarks.peers.atari import make_vector

        env = make_vector(args.num_envs, args.threads)
        net = NatureCnn(int(env.single_action_space.n))
    optimizer = torch.optim.Adam(net.parameters(), lr=LR, eps=1e-5, fused=True)
    rollouts = Rollouts(env, net, num_steps=128)
    stopwatch, env_steps = Stopwatch(), 0
    while env_steps < args.env_steps:
        rollouts.collect()
        update(net, optimizer, rollouts)
        env_steps += rollouts.reward.numel()
        stopwatch.mark(env_steps)
    stopwatch.print_result(np.mean(rollouts.returns) if rollouts.returns else None)
    env.close()


if __name__ == "__main__":
    main()
