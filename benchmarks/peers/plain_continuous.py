"""Plain SAC and TD3: one process, one file, with nothing clever, in the way of CleanRL's scripts.

What anyone would write who needs them once. Transitions are NumPy arrays, each with both of its
observations. The policy is a module, each critic another one.
"""

import argparse
import collections
import copy
import math

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.peers import continuous_works as work
from benchmarks.peers.make_env import make_env
from benchmarks.peers.plain_dqn import Replay
from benchmarks.peers.result import Stopwatch


def mlp(num_in, num_out):
    return nn.Sequential(
        nn.Linear(num_in, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, num_out)
    )


class Critic(nn.Module):
    def __init__(self, num_in):
        super().__init__()
        self.net = mlp(num_in, 1)

    def forward(self, obs, action):
        return self.net(torch.cat([obs, action], 1))[:, 0]


class Learner:
    """What SAC and TD3 have in common: two critics and their targets."""

    def __init__(self, num_obs, num_actions, num_outputs):
        self.num_actions = num_actions
        self.actor = mlp(num_obs, num_outputs)
        self.critics = [Critic(num_obs + num_actions) for _ in range(2)]
        self.targets = copy.deepcopy(self.critics)
        of_critics = [p for critic in self.critics for p in critic.parameters()]
        self.of_critics = torch.optim.Adam(of_critics, lr=work.LR)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=work.LR)
        self.steps = 0

    def learn(self, rows):
        obs, action, reward, goes_on, next_obs = rows
        with torch.no_grad():
            goal = reward + 0.99 * goes_on * self.future(next_obs)
        losses = [nn.functional.mse_loss(critic(obs, action), goal) for critic in self.critics]
        step(self.of_critics, losses[0] + losses[1])
        self.steps += 1
        self.improve(obs)

    def follow(self, pairs):
        for target, source in pairs:
            for old, new in zip(target.parameters(), source.parameters(), strict=True):
                old.data.copy_(0.005 * new.data + 0.995 * old.data)


class SAC(Learner):
    def __init__(self, num_obs, num_actions):
        super().__init__(num_obs, num_actions, 2 * num_actions)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.of_alpha = torch.optim.Adam([self.log_alpha], lr=work.LR)

    def draw(self, obs):
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        before = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_prob = log_prob - 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
        return before.tanh(), log_prob.sum(1)

    act = draw

    def future(self, next_obs):
        action, log_prob = self.draw(next_obs)
        least = torch.min(*(target(next_obs, action) for target in self.targets))
        return least - self.log_alpha.exp() * log_prob

    def improve(self, obs):
        action, log_prob = self.draw(obs)
        least = torch.min(*(critic(obs, action) for critic in self.critics))
        alpha = self.log_alpha.exp().item()
        step(self.of_actor, (alpha * log_prob - least).mean())
        above = log_prob.detach() - self.num_actions
        step(self.of_alpha, -(self.log_alpha.exp() * above).mean())
        self.follow(zip(self.targets, self.critics, strict=True))


class TD3(Learner):
    def __init__(self, num_obs, num_actions):
        super().__init__(num_obs, num_actions, num_actions)
        self.target_actor = copy.deepcopy(self.actor)

    def act(self, obs):
        action = self.actor(obs).tanh()
        return (action + 0.1 * torch.randn_like(action)).clamp(-1, 1), None

    def future(self, next_obs):
        action = self.target_actor(next_obs).tanh()
        action = (action + (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)).clamp(-1, 1)
        return torch.min(*(target(next_obs, action) for target in self.targets))

    def improve(self, obs):
        if self.steps % 2:
            return
        step(self.of_actor, -self.critics[0](obs, self.actor(obs).tanh()).mean())
        pairs = zip(self.targets, self.critics, strict=True)
        self.follow([*pairs, (self.target_actor, self.actor)])


def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", choices=["sac", "td3"], required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    mode = gym.vector.AutoresetMode.SAME_STEP
    makers = [lambda: make_env(work.ENV)] * work.NUM_ENVS
    envs = gym.vector.SyncVectorEnv(makers, autoreset_mode=mode)
    num_obs, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    learner = {"sac": SAC, "td3": TD3}[args.algo](num_obs, num_actions)
    like = np.zeros(num_obs, np.float32), np.zeros(num_actions, np.float32)
    replay, stopwatch = Replay(work.REPLAY_SIZE, *like), Stopwatch()
    returns, running = collections.deque(maxlen=100), np.zeros(work.NUM_ENVS)
    env_steps = 0
    obs = envs.reset(seed=0)[0].astype(np.float32)
    while env_steps < args.env_steps:
        for _ in range(work.NUM_STEPS):
            if env_steps < work.LEARNING_STARTS:
                action = rng.uniform(-1, 1, (work.NUM_ENVS, num_actions)).astype(np.float32)
            else:
                with torch.no_grad():
                    action = learner.act(torch.from_numpy(obs))[0].numpy()
            next_obs, reward, terminated, truncated, info = envs.step(action)
            last_obs, ended = next_obs.copy(), terminated | truncated
            if ended.any():
                last_obs[ended] = np.stack(list(info["final_obs"][ended]))
            replay.add(obs, action, reward, terminated, last_obs)
            running += reward
            returns.extend(running[ended])
            running[ended] = 0
            obs = next_obs.astype(np.float32)
            env_steps += work.NUM_ENVS
        if env_steps <= work.LEARNING_STARTS:
            continue
        while learner.steps < env_steps - work.LEARNING_STARTS:
            learner.learn(replay.draw(rng, work.BATCH_SIZE))
        stopwatch.mark(env_steps)
    mean = np.mean(returns) if returns else None
    stopwatch.print_result(mean, learner_steps=learner.steps)
    envs.close()


if __name__ == "__main__":
    main()
