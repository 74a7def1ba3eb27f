"""stable-baselines3 until CartPole-v1 is solved, with settings tuned for that.

They are in the style of its zoo's: 8 environments × 32 steps, 20 epochs of one minibatch, gamma
0.98, lambda 0.8, learning rate 1e-3 and clip 0.2, both falling to 0 over 100,000 env steps. Solved:
the mean return of the last 100 training episodes is 475. Asked after each step, not after
each update, which is a little in its favor.
"""

import argparse
import collections
import json

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

EPISODES = 100


class StopWhenSolved(BaseCallback):
    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.returns = wanted, collections.deque(maxlen=EPISODES)

    def _on_step(self):
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return len(self.returns) < EPISODES or np.mean(self.returns) < self.wanted


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mean-return", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = VecMonitor(DummyVecEnv([lambda: gym.make("CartPole-v1")] * 8))
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        ent_coef=0.0,
        seed=args.seed,
        device="cpu",
    )
    stop = StopWhenSolved(args.mean_return)
    model.learn(100_000, callback=stop)
    mean = float(np.mean(stop.returns)) if len(stop.returns) == EPISODES else None
    print("RESULT " + json.dumps({"env_steps": model.num_timesteps, "mean_return": mean}))


if __name__ == "__main__":
    main()
