"""The plain DQN: one process, one file, on ready-made vector environments, with nothing clever.

What anyone would write who needs DQN once. Transitions are NumPy arrays, each with both of its
observations. Breakout steps in ale-py's own vector environment, CartPole in Gymnasium's
SyncVectorEnv.
"""

import argparse
import collections

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.peers import atari
from benchmarks.peers.make_env import make_env
from benchmarks.peers.replay_works import REPLAY_SETTINGS, TRAINING_STEPS
from benchmarks.peers.result import Stopwatch


class Pixels(nn.Module):
    """Bytes to numbers from 0 to 1."""

    def forward(self, obs):
        return obs.float() / 255


def network(obs_shape, num_actions):
    if len(obs_shape) == 1:
        return nn.Sequential(
            nn.Linear(obs_shape[0], 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, num_actions),
        )  # fmt: skip
    return nn.Sequential(
        Pixels(),
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, num_actions),
    )  # fmt: skip


def make_vector(settings, threads):
    if settings.env.startswith("ALE/"):
        return atari.make_vector(settings.num_envs, threads)
    mode = gym.vector.AutoresetMode.SAME_STEP
    makers = [lambda: make_env(settings.env)] * settings.num_envs
    return gym.vector.SyncVectorEnv(makers, autoreset_mode=mode)


class Replay:
    """The newest transitions."""

    def __init__(self, size, obs, action):
        """Make room for `size` steps with observations and actions like these arrays."""
        self.obs, self.next_obs = (np.zeros((size, *obs.shape), obs.dtype) for _ in range(2))
        self.action = np.zeros((size, *action.shape), action.dtype)
        self.reward = np.zeros(size, np.float32)
        self.goes_on = np.zeros(size, np.float32)
        self.size, self.count = size, 0

    def add(self, obs, action, reward, terminated, next_obs):
        at = (self.count + np.arange(len(obs))) % self.size
        self.obs[at], self.next_obs[at] = obs, next_obs
        self.action[at], self.reward[at], self.goes_on[at] = action, reward, ~terminated
        self.count += len(obs)

    def draw(self, rng, num_rows):
        rows = rng.integers(min(self.count, self.size), size=num_rows)
        columns = self.obs, self.action, self.reward, self.goes_on, self.next_obs
        return [torch.from_numpy(column[rows]) for column in columns]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=list(REPLAY_SETTINGS), required=True)
    parser.add_argument("--env-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    settings = REPLAY_SETTINGS[args.work]
    envs = make_vector(settings, args.threads)
    space, num_actions = envs.single_observation_space, int(envs.single_action_space.n)
    online, target = network(space.shape, num_actions), network(space.shape, num_actions)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=settings.lr)
    like = np.zeros(space.shape, space.dtype), np.zeros((), np.int64)
    replay, stopwatch = Replay(settings.replay_size, *like), Stopwatch()
    returns, running = collections.deque(maxlen=100), np.zeros(settings.num_envs)
    env_steps = gradient_steps = 0
    obs, _ = envs.reset(seed=0)
    while env_steps < args.env_steps:
        for _ in range(TRAINING_STEPS):
            epsilon = max(0.05, 1 - 0.95 * env_steps / (0.1 * args.env_steps))
            with torch.no_grad():
                action = online(torch.from_numpy(obs)).argmax(1).numpy()
            is_random = rng.random(settings.num_envs) < epsilon
            action = np.where(is_random, rng.integers(num_actions, size=len(action)), action)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            last_obs, ended = next_obs.copy(), terminated | truncated
            if ended.any():
                last_obs[ended] = np.stack(list(info["final_obs"][ended]))
            replay.add(obs, action, reward, terminated, last_obs)
            running += reward
            returns.extend(running[ended])
            running[ended] = 0
            obs = next_obs
            env_steps += settings.num_envs
        due = int(settings.ratio * max(0, env_steps - settings.learning_starts))
        if gradient_steps == due:
            continue
        while gradient_steps < due:
            rows, chosen, reward, goes_on, next_rows = replay.draw(rng, settings.batch_size)
            with torch.no_grad():
                goal = reward + 0.99 * goes_on * target(next_rows).max(1).values
            value = online(rows).gather(1, chosen[:, None])[:, 0]
            loss = nn.functional.smooth_l1_loss(value, goal)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(online.parameters(), 10)
            optimizer.step()
            gradient_steps += 1
            if gradient_steps % settings.target_interval == 0:
                target.load_state_dict(online.state_dict())
        stopwatch.mark(env_steps)
    mean = np.mean(returns) if returns else None
    stopwatch.print_result(mean, learner_steps=gradient_steps)
    envs.close()


if __name__ == "__main__":
    main()
